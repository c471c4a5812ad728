// Divides backward over a flush into levels. A level ends where a value that the user holds is read
// again (docs/design.md, section 7). Also finds, for each held value and each
// level, the destinations of the held value's gradient.
#pragma once

#include "autobatch/backward/backward.h"

#include <map>
#include <vector>

namespace autobatch {

// The destinations of a held value's gradient at one level. A destination is a graph input that a
// node of the level reads, or a held value of a lower level.
struct Reach {
  std::vector<uint32_t> graph_inputs;
  std::vector<uint32_t> exports;  // indices into FlushRecord::exports
};

// Computes the levels and exports of `record`, and the level of each held value.
void plan_levels(FlushRecord& record);

// Divides large parts of levels to reduce the peak memory of backward. Also assigns separate
// gradient buffers to parts. The buffers of a part are freed when the part has run. Must be called
// after plan_levels.
void divide_parts(FlushRecord& record);

// Returns, for each held value, its reach at each level. A held value has an entry for its own
// level and for every other level at which its gradient has a destination. Must be called after
// plan_levels.
std::vector<std::map<uint32_t, Reach>> find_reach(const FlushRecord& record);

}  // namespace autobatch
