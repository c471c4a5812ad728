#include "autobatch/graph/slice_costs.h"

#include <algorithm>
#include <bit>

namespace autobatch {

size_t SliceCosts::row_of(size_t nodes) {
  return std::min<size_t>(std::bit_width(nodes) - 1, kSizes - 1);
}

void SliceCosts::begin(Nanoseconds bound, size_t num_pending) {
  const double all = nodes_ == 0 ? 0 : static_cast<double>(num_pending) * slices_ / nodes_;
  bound_ = std::max(static_cast<double>(bound.count()), all / kLeastSlices);
  taken_ = kSlice;
}

void SliceCosts::end(Nanoseconds took, size_t nodes) {
  const double ratio = static_cast<double>(took.count()) / taken_;
  scale_ += (std::clamp(ratio, 0.25, 4.0) - scale_) / 8;
  slices_ += static_cast<double>(took.count()) - slices_ / 8;
  nodes_ += static_cast<double>(nodes) - nodes_ / 8;
}

void SliceCosts::add(uint64_t serial, size_t nodes, Nanoseconds took) {
  if (nodes == 0) return;
  if (rows_.size() >= kMostKept) rows_.clear();
  float& known = rows_[serial][row_of(nodes)];
  const auto now =
      static_cast<float>(static_cast<double>(took.count()) / static_cast<double>(nodes));
  // Limits the effect of a single slow batch (a page fault, for example) on an earlier measurement.
  known = known == 0 ? now : known + (std::min(now, 4 * known) - known) / 4;
}

double SliceCosts::expect(uint64_t serial, size_t nodes) const {
  const auto found = rows_.find(serial);
  if (found == rows_.end()) return kUnknown;
  const Row& row = found->second;
  const size_t size = row_of(nodes);
  // Uses the nearest smaller size that has run. In a smaller batch, each node takes longer, so the
  // result is an upper bound. Because of this upper bound, the batch size grows step by step.
  for (size_t i = size + 1; i-- > 0;) {
    if (row[i] > 0) return row[i] * static_cast<double>(nodes);
  }
  for (size_t i = size + 1; i < kSizes; ++i) {
    if (row[i] > 0) return row[i] * static_cast<double>(nodes);
  }
  return kUnknown;
}

size_t SliceCosts::most(uint64_t serial) const {
  const auto found = rows_.find(serial);
  if (found == rows_.end()) return size_t{1} << 10;
  const Row& row = found->second;
  size_t most = 1;
  float known = *std::ranges::find_if(row, [](float one) { return one > 0; });
  for (size_t i = 0; i < kSizes; ++i) {
    if (row[i] > 0) known = row[i];
    const double fit = bound_ / known;
    if (fit >= static_cast<double>(size_t{1} << i)) {
      most = std::max(most, std::min(static_cast<size_t>(fit), (size_t{2} << i) - 1));
    }
  }
  return most;
}

}  // namespace autobatch
