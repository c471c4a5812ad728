#include "autobatch/rules/weight_groups.h"

namespace autobatch {

std::vector<WeightGroup> weight_groups(const BatchView& batch, size_t slot, int64_t width) {
  std::vector<WeightGroup> groups;
  const Signature* signature = nullptr;
  int64_t row = 0;
  for (int64_t m = 0; m < batch.size(); ++m) {
    if (batch.node(m).signature != signature) {
      signature = batch.node(m).signature;
      groups.push_back({m, 0, row, 0});
    }
    const int64_t rows = batch.operand_value(m, slot).geometry->numel / width;
    ++groups.back().count;
    groups.back().rows += rows;
    row += rows;
  }
  return groups;
}

Regions regions_of_group(const BatchView& batch, size_t slot, const WeightGroup& group) {
  Regions regions;
  regions.reserve(static_cast<size_t>(group.count));
  for (int64_t m = group.first; m < group.first + group.count; ++m) {
    regions.push_back(batch.operand_region(m, slot));
  }
  return regions;
}

BackwardBatch part_of_group(BackwardBatch& batch, const WeightGroup& group,
                            std::vector<NodeId>& members) {
  members.clear();
  for (int64_t m = group.first; m < group.first + group.count; ++m) {
    members.push_back(batch.member(m));
  }
  return batch.part(members);
}

}  // namespace autobatch
