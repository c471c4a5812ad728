#include "autobatch/rules/packed_sequence.h"

#include <algorithm>
#include <numeric>

namespace autobatch {

Packing::Packing(const std::vector<int64_t>& lengths) : sequence_(lengths.size()) {
  std::iota(sequence_.begin(), sequence_.end(), 0);
  std::stable_sort(sequence_.begin(), sequence_.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  begin_.push_back(0);
  auto running = static_cast<int64_t>(lengths.size());
  for (int64_t step = 0; step < lengths[sequence_.front()]; ++step) {
    while (lengths[sequence_[running - 1]] <= step) --running;
    begin_.push_back(begin_.back() + running);
  }
}

Sequences::Sequences(const BatchView& batch, bool batch_first) {
  std::vector<int64_t> lengths;
  int64_t rows = 0;
  for (int64_t m = 0; m < batch.size(); ++m) {
    const auto& sizes = batch.operand_value(m, 0).geometry->sizes;
    const int64_t length = sizes[batch_first ? 1 : 0];
    const int64_t width = sizes[batch_first ? 0 : 1];
    first_.push_back(static_cast<int64_t>(members_.size()));
    for (int64_t b = 0; b < width; ++b) {
      members_.push_back({rows, first_.back(), width, b, length});
      lengths.push_back(length);
    }
    rows += length * width;
  }
  packing_.emplace(lengths);
  place_.resize(lengths.size());
  for (int64_t s = 0; s < packing_->sequences(); ++s) place_[packing_->sequence(s)] = s;
}

std::vector<int64_t> Sequences::rows(bool batch_first) const {
  std::vector<int64_t> out;
  out.reserve(packing_->rows());
  for (int64_t t = 0; t < packing_->steps(); ++t) {
    for (int64_t s = 0; s < packing_->count(t); ++s) {
      const Sequence& q = members_[packing_->sequence(s)];
      out.push_back(q.first_row +
                    (batch_first ? q.in_member * q.length + t : t * q.member_width + q.in_member));
    }
  }
  return out;
}

std::vector<int64_t> Sequences::states(int64_t run, int64_t runs) const {
  std::vector<int64_t> out;
  for (int64_t s = 0; s < packing_->sequences(); ++s) {
    const Sequence& q = members_[packing_->sequence(s)];
    out.push_back(q.first_sequence * runs + run * q.member_width + q.in_member);
  }
  return out;
}

std::vector<int64_t> Sequences::rows_of(const Sequences& some,
                                        const std::vector<int64_t>& positions) const {
  std::vector<int64_t> place;  // by sequence of `some`: its place in this object
  for (size_t m = 0; m < positions.size(); ++m) {
    const int64_t first = first_[positions[m]];
    for (int64_t b = 0; b < members_[first].member_width; ++b) place.push_back(place_[first + b]);
  }
  std::vector<int64_t> out;
  for (int64_t t = 0; t < some.packing().steps(); ++t) {
    for (int64_t s = 0; s < some.packing().count(t); ++s) {
      out.push_back(packing_->begin(t) + place[some.packing().sequence(s)]);
    }
  }
  return out;
}

}  // namespace autobatch
