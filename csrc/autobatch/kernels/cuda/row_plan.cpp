#include "autobatch/kernels/cuda/row_plan.h"

#include <algorithm>

namespace autobatch::cuda {
namespace {

RowEntry entry_of(const RowLookups& member, int64_t start) {
  RowEntry entry{};
  entry.start = start;
  entry.first = member.first;
  const size_t missing = kMostLookupDims - member.sizes.size();
  std::ranges::fill(entry.sizes, 1);
  std::ranges::copy(member.sizes, entry.sizes + missing);
  std::ranges::copy(member.steps, entry.steps + missing);
  for (size_t l = 0; l < member.lists.size(); ++l) {
    const RowLookups::List& list = member.lists[l];
    entry.lists[l] = {reinterpret_cast<uint64_t>(list.values), list.length, list.step, {}};
    std::ranges::copy(list.strides, entry.lists[l].strides + missing);
  }
  return entry;
}

}  // namespace

std::optional<RowPlan> plan_rows(const RowQuery& query) {
  RowPlan plan;
  if (query.types.size() > kMostLists) return std::nullopt;
  plan.layout.lists = static_cast<int32_t>(query.types.size());
  for (size_t l = 0; l < query.types.size(); ++l) {
    plan.layout.is_int[l] = query.types[l] == c10::ScalarType::Int;
  }
  plan.layout.from_end = query.from_end;
  for (const RowLookups& member : query.members) {
    if (member.count() == 0) continue;
    if (member.sizes.size() > kMostLookupDims) return std::nullopt;
    plan.entries.push_back(entry_of(member, plan.layout.total));
    plan.layout.total += member.count();
  }
  plan.layout.num_entries = static_cast<int64_t>(plan.entries.size());
  return plan;
}

}  // namespace autobatch::cuda
