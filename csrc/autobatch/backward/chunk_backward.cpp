// Divides levels into parts, which backward runs one after the other. Assigns buffers to the
// gradients of the parts' results.
#include "autobatch/backward/levels.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pooled_memory.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace autobatch {
namespace {

// Minimum size of a part (the same size as in chunk_batches.cpp), and maximum number of parts of a
// batch.
constexpr int64_t kLeastPart = int64_t{1} << 18;  // in bytes
constexpr int64_t kMostParts = 64;
// Gradients that arrive more than kLongWait parts before they are read get a separate buffer. With
// a common buffer for all gradients of the part, the whole buffer would be allocated when the first
// gradient arrives. A part with fewer than kLeastBuffers bytes has only one buffer.
constexpr uint32_t kLongWait = 64;
constexpr int64_t kLeastBuffers = int64_t{1} << 14;  // in bytes

class PartDivider {
 public:
  explicit PartDivider(FlushRecord& record) : record_(record), parts_of_(record.batches.size(), 0) {
    for (const Level& level : record.levels) {
      for (const Level::Part& part : level.parts) ++parts_of_[part.batch];
    }
  }

  void run() {
    for (Level& level : record_.levels) {
      std::vector<Level::Part> parts;
      parts.reserve(level.parts.size());
      for (const Level::Part& part : level.parts) divide(part, parts);
      level.parts = std::move(parts);
    }
    const size_t num_parts = std::accumulate(parts_of_.begin(), parts_of_.end(), size_t{0});
    if (num_parts > kLongWait) find_last_readers();
    for (Level& level : record_.levels) {
      for (Level::Part& part : level.parts) {
        if (may_place(part)) place(part);
        ++position_;
      }
    }
  }

 private:
  NodeId node_id(const Level::Part& part, uint32_t i) const {
    return record_.level_order[part.first + i];
  }
  const Node& node(const Level::Part& part, uint32_t i) const {
    return record_.tape.nodes[node_id(part, i)];
  }

  void divide(const Level::Part& part, std::vector<Level::Part>& parts) {
    const uint32_t count = count_of_parts(part);
    parts_of_[part.batch] += count - 1;
    for (uint32_t k = 0, at = 0; k < count; ++k) {
      const auto end = static_cast<uint32_t>((uint64_t{k} + 1) * part.count / count);
      parts.push_back({part.batch, part.first + at, end - at, part.half});
      at = end;
    }
  }

  // If a rule keeps state for the batch as a whole, backward must not divide the batch.
  uint32_t count_of_parts(const Level::Part& part) const {
    const BatchRecord& batch = record_.batches[part.batch];
    if (batch.kept != nullptr || !batch.local.empty() || !may_place(part)) return 1;
    const int64_t most = std::min<int64_t>(kMostParts, part.count);
    return static_cast<uint32_t>(std::clamp<int64_t>(bytes(part) / kLeastPart, 1, most));
  }

  // Whether the part may have separate gradient buffers. Returns false if the backward of some
  // nodes is divided into halves (Level::Half), because their results belong to parts of two
  // levels. Also returns false on devices where a call is expensive, because separate buffers need
  // additional calls.
  bool may_place(const Level::Part& part) const {
    const Node& first = node(part, 0);
    if (first.num_values == 0 || !record_.batches[part.batch].needs_grad) return false;
    for (uint32_t i = 0; i < part.count && !record_.is_divided.empty(); ++i) {
      if (record_.divided(node_id(part, i))) return false;
    }
    return !wants_few_launches(record_.tape.values[first.first_value].device);
  }

  // Returns the approximate size of the part's results, as if all members had the sizes of the
  // first member.
  int64_t bytes(const Level::Part& part) const {
    const Node& first = node(part, 0);
    int64_t sum = 0;
    for (uint32_t k = 0; k < first.num_values; ++k) {
      const Value& value = record_.tape.values[first.first_value + k];
      sum += value.geometry->extent * static_cast<int64_t>(c10::elementSize(value.dtype));
    }
    return sum * part.count;
  }

  // Fills position_of_ and last_reader_. Visits nodes in order of capture, because nodes and their
  // operands are then close together in memory. (If the backward of a node is divided into halves,
  // the node has two positions. Either position is accurate enough.)
  void find_last_readers() {
    const Tape& tape = record_.tape;
    position_of_ = pooled_array<uint32_t>(tape.nodes.size());
    last_reader_ = pooled_array<uint32_t>(tape.nodes.size());
    std::fill_n(position_of_.get(), tape.nodes.size(), kNone);
    std::fill_n(last_reader_.get(), tape.nodes.size(), 0);
    uint32_t position = 0;
    for (const Level& level : record_.levels) {
      for (const Level::Part& part : level.parts) {
        for (uint32_t i = 0; i < part.count; ++i) position_of_[node_id(part, i)] = position;
        ++position;
      }
    }
    for (NodeId reader = 0; reader < tape.nodes.size(); ++reader) {
      if (position_of_[reader] == kNone) continue;
      for (const ValueId id : tape.operands_of(tape.nodes[reader])) {
        if (id == kNone || tape.values[id].is_graph_input()) continue;
        uint32_t& last = last_reader_[tape.values[id].node];
        last = std::max(last, position_of_[reader]);
      }
    }
  }

  bool waits(const Level::Part& part, uint32_t i) const {
    return last_reader_ != nullptr && last_reader_[node_id(part, i)] > position_ + kLongWait;
  }

  void place(Level::Part& part) {
    part.other = bytes(part) < kLeastBuffers ? 0 : find_other(part);
    if (part.other != 0) {
      const auto is = [&](bool waiting) {
        return [&, waiting](uint32_t i) { return waits(part, i) == waiting; };
      };
      place_gradients(part, is(false));
      place_gradients(part, is(true));
    } else if (parts_of_[part.batch] > 1) {
      place_gradients(part, [](uint32_t) { return true; });
    }
  }

  // Returns the first member for which `waits` differs from its value for the part's first member.
  // Returns 0 if there is no such member.
  uint32_t find_other(const Level::Part& part) const {
    for (uint32_t i = 1; i < part.count; ++i) {
      if (waits(part, i) != waits(part, 0)) return i;
    }
    return 0;
  }

  // Assigns a new buffer to the gradients of each result, for the members selected by `is_there`.
  template <class IsThere>
  void place_gradients(const Level::Part& part, const IsThere& is_there) {
    Store& store = record_.store;
    for (uint32_t k = 0; k < node(part, 0).num_values; ++k) {
      int64_t length = 0;
      for (uint32_t i = 0; i < part.count; ++i) {
        if (!is_there(i)) continue;
        const ValueId id = node(part, i).first_value + k;
        store.places[id].grad = static_cast<uint32_t>(store.grad_lengths.size());
        store.places[id].grad_offset = length;
        length += record_.tape.values[id].geometry->extent;
      }
      store.grad_lengths.push_back(length);
    }
  }

  FlushRecord& record_;
  std::vector<uint32_t> parts_of_;  // for each batch: number of its parts
  // For each node: the position of its part, and the position of the last part that reads one of
  // the node's results.
  PooledArray<uint32_t> position_of_, last_reader_;
  uint32_t position_ = 0;  // position of the current part among the parts of all levels
};

}  // namespace

void divide_parts(FlushRecord& record) { PartDivider(record).run(); }

}  // namespace autobatch
