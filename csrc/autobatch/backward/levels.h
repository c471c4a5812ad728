// Divides the backward over a flush into levels where the user holds values that are read again
// (docs/design.md, section 7). Finds the destinations of each held value's gradient at each level.
#pragma once

#include "autobatch/backward/backward.h"

#include <map>
#include <vector>

namespace autobatch {

// The destinations of a held value's gradient at one level: the graph inputs that nodes of the
// level read, and the held values of lower levels.
struct Reach {
  std::vector<uint32_t> graph_inputs;
  std::vector<uint32_t> exports;  // into FlushRecord::exports
};

// Fills in the levels and exports of `record`, and the level of each held value.
void plan_levels(FlushRecord& record);

// Divides large parts of levels to reduce the peak memory of backward. Also assigns parts gradient
// buffers of their own, which are freed when the part has run. Must be called after plan_levels.
void divide_parts(FlushRecord& record);

// Returns, by held value, its reach by level. There is an entry for the held value's own level and
// for every other level at which the gradient has a destination. Must be called after plan_levels.
std::vector<std::map<uint32_t, Reach>> find_reach(const FlushRecord& record);

}  // namespace autobatch
