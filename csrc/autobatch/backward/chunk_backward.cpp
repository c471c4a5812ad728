// What backward runs at a time, and where the gradients that it reads lie.
#include "autobatch/backward/levels.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pooled_memory.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace autobatch {
namespace {

// A part has at least this size, and a batch at most so many: as of divided batches
// (chunk_batches.cpp).
constexpr int64_t kLeastPart = int64_t{1} << 18;  // bytes
constexpr int64_t kMostParts = 64;
// Gradients that come so many parts before they are read have a buffer apart from those that come
// later: else these would take up their memory for as long. But not of less than this.
constexpr uint32_t kLongWait = 64;
constexpr int64_t kLeastBuffers = int64_t{1} << 14;  // bytes

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

  // What a rule keeps of a batch as a whole is for backward of the whole.
  uint32_t count_of_parts(const Level::Part& part) const {
    const BatchRecord& batch = record_.batches[part.batch];
    if (batch.kept != nullptr || !batch.local.empty() || !may_place(part)) return 1;
    const int64_t most = std::min<int64_t>(kMostParts, part.count);
    return static_cast<uint32_t>(std::clamp<int64_t>(bytes(part) / kLeastPart, 1, most));
  }

  // The results of a node that is differentiated in halves belong to parts of two levels.
  // Where a call costs much, one for each piece costs more than it saves.
  bool may_place(const Level::Part& part) const {
    const Node& first = node(part, 0);
    if (first.num_values == 0 || !record_.batches[part.batch].needs_grad) return false;
    for (uint32_t i = 0; i < part.count && !record_.is_divided.empty(); ++i) {
      if (record_.divided(node_id(part, i))) return false;
    }
    return !wants_few_launches(record_.tape.values[first.first_value].device);
  }

  // About: of its results, as if all members were like the first.
  int64_t bytes(const Level::Part& part) const {
    const Node& first = node(part, 0);
    int64_t sum = 0;
    for (uint32_t k = 0; k < first.num_values; ++k) {
      const Value& value = record_.tape.values[first.first_value + k];
      sum += value.geometry->extent * static_cast<int64_t>(c10::elementSize(value.dtype));
    }
    return sum * part.count;
  }

  // In the order of capture, in which nodes and what they read lie near each other. (Of nodes
  // that are differentiated in halves, the position of either is near enough.)
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

  // A member whose gradient waits where the first one's does not, or the reverse; 0 if there is
  // none.
  uint32_t find_other(const Level::Part& part) const {
    for (uint32_t i = 1; i < part.count; ++i) {
      if (waits(part, i) != waits(part, 0)) return i;
    }
    return 0;
  }

  // A new buffer for each result, of the members that `is_there` says.
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
  std::vector<uint32_t> parts_of_;  // by batch
  // By node: the part that it is in, and the last part that reads a result of it.
  PooledArray<uint32_t> position_of_, last_reader_;
  uint32_t position_ = 0;  // of a part among those of all levels
};

}  // namespace

void divide_parts(FlushRecord& record) { PartDivider(record).run(); }

}  // namespace autobatch
