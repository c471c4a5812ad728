#include "autobatch/plan/chunk_batches.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/rules/rule.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

// Minimum size of a part and maximum number of parts of a batch. A GEMM does not become slower when
// it is divided within these limits.
constexpr int64_t kLeastPart = int64_t{1} << 18;  // in bytes
constexpr int64_t kMostParts = 16;
// Minimum size of a divided batch in bytes. Dividing a smaller batch adds calls but saves little
// memory.
constexpr int64_t kLeastBatch = int64_t{1} << 20;

class Divider {
 public:
  Divider(FlushRecord& record, size_t first_batch, FlushGraph& graph,
          std::span<const FirstUse> first_uses)
      : record_(record),
        graph_(graph),
        batches_(std::span(record.batches).subspan(first_batch)),
        first_batch_(first_batch),
        first_uses_(first_uses) {}

  size_t run() {
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      if (may_divide(batches_[b])) large_.push_back(b);
    }
    if (large_.empty()) return 0;
    before_.resize(batches_.size());
    is_divided_.resize(batches_.size(), 0);
    size_t divided = 0;
    for (const uint32_t b : large_) divided += divide(b) ? 1 : 0;
    if (divided != 0) put_parts();
    return divided;
  }

 private:
  const Node& node(const BatchRecord& batch, uint32_t i) const {
    return record_.tape.nodes[graph_.at(batch.first + i)];
  }

  // Random ops are not divided, because they draw numbers in capture order. Only matmul-like ops
  // are divided. The results of other ops may be smaller than their operands, and the division
  // would keep the operands alive for longer.
  bool may_divide(const BatchRecord& batch) const {
    if (batch.count < 2 || !batch.rule->heavy() || batch.rule->report_name() != "native")
      return false;
    const Node& first = node(batch, 0);
    if (batch.signature->op->random || first.num_values == 0) return false;
    const Value& value = record_.tape.values[first.first_value];
    if (wants_few_launches(value.device)) return false;
    return batch.count * bytes(batch, 0) >= kLeastBatch;
  }

  // Returns the size of a member's results in bytes. All members have the same dtypes.
  int64_t bytes(const BatchRecord& batch, uint32_t i) const {
    const uint32_t number = graph_.members(batch)[i];
    const Value* first = &record_.tape.values[graph_.first_value(graph_.members(batch).front())];
    int64_t sum = 0;
    for (uint32_t k = 0; k < graph_.kind(number).num_results; ++k) {
      sum += graph_.extent(number, k) * static_cast<int64_t>(c10::elementSize(first[k].dtype));
    }
    return sum;
  }

  uint32_t reader(const BatchRecord& batch, uint32_t i) const {
    return first_uses_[graph_.members(batch)[i]].batch;
  }

  // Divides batch `b` into parts. Returns false if the batch is not divided. A batch is not divided
  // if there would be only one part, or if the batch has a result that no batch reads. The user
  // holds such a result, so the result is soon copied out of its slab.
  bool divide(uint32_t b) {
    const BatchRecord& batch = batches_[b];
    const int64_t of_first = bytes(batch, 0);
    const int64_t least = std::max(kLeastPart, batch.count * of_first / kMostParts);
    const bool is_even = graph_.is_even(graph_.members(batch));
    // For each part: the index of its first member, and the batch before which the part runs.
    std::vector<std::pair<uint32_t, uint32_t>> parts;
    int64_t size = least;
    for (uint32_t i = 0; i < batch.count; ++i) {
      const uint32_t at = reader(batch, i);
      if (at == kNone) return false;
      if (size >= least && (i == 0 || at != reader(batch, i - 1))) {
        parts.emplace_back(i, at);
        size = 0;
      }
      parts.back().second = std::min(parts.back().second, at);
      size += is_even ? of_first : bytes(batch, i);
    }
    if (parts.size() < 2) return false;
    for (size_t k = 0; k < parts.size(); ++k) {
      const uint32_t end = k + 1 < parts.size() ? parts[k + 1].first : batch.count;
      BatchRecord part = batch;
      part.first = batch.first + parts[k].first;
      part.count = end - parts[k].first;
      part.signature = node(part, 0).signature;  // batches merged by weight have several signatures
      part.goes_on = k > 0 && part.signature == node(batch, parts[k].first - 1).signature;
      before_[parts[k].second].push_back(std::move(part));
    }
    is_divided_[b] = 1;
    return true;
  }

  void put_parts() {
    std::vector<BatchRecord> all;
    std::vector<uint32_t> order;
    const uint32_t start = batches_.front().first;
    const auto put = [&](BatchRecord& batch) {
      const std::span<const uint32_t> members = graph_.members(batch);
      batch.first = start + static_cast<uint32_t>(order.size());
      order.insert(order.end(), members.begin(), members.end());
      all.push_back(std::move(batch));
    };
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      for (BatchRecord& part : before_[b]) put(part);
      if (!is_divided_[b]) put(batches_[b]);
    }
    graph_.set_order(std::move(order), start);
    record_.batches.resize(first_batch_);
    record_.batches.insert(record_.batches.end(), std::make_move_iterator(all.begin()),
                           std::make_move_iterator(all.end()));
  }

  FlushRecord& record_;
  FlushGraph& graph_;
  std::span<BatchRecord> batches_;
  size_t first_batch_;
  std::span<const FirstUse> first_uses_;          // indexed by node number
  std::vector<uint32_t> large_;                   // indices of the batches that may be divided
  std::vector<std::vector<BatchRecord>> before_;  // for each batch: parts that run before it
  std::vector<uint8_t> is_divided_;               // for each batch: whether it is divided
};

}  // namespace

size_t chunk_batches(FlushRecord& record, size_t first_batch, FlushGraph& graph,
                     std::span<const FirstUse> first_uses) {
  return Divider(record, first_batch, graph, first_uses).run();
}

}  // namespace autobatch
