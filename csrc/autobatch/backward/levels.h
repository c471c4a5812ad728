// How the backward over a flush is divided where the user holds values that are read again
// (docs/design.md, section 7): into levels, and what each held value's gradient flows to in them.
#pragma once

#include "autobatch/backward/backward.h"

#include <map>
#include <vector>

namespace autobatch {

// What a held value's gradient flows to at one level: the graph inputs that are read there, and
// the held values of lower levels.
struct Reach {
  std::vector<uint32_t> graph_inputs;
  std::vector<uint32_t> exports;  // into FlushRecord::exports
};

// Fills in the record's levels and exports, and the levels of its held values.
void plan_levels(FlushRecord& record);

// Divides large parts of levels, so that what backward of one needs for itself is less, and gives
// parts gradients of their own, which go when the part has been run. After plan_levels.
void divide_parts(FlushRecord& record);

// By held value, then by level; levels without any are left out. After plan_levels.
std::vector<std::map<uint32_t, Reach>> find_reach(const FlushRecord& record);

}  // namespace autobatch
