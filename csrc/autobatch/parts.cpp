// What backward runs at a time, and where the gradients that it reads lie.
#include "autobatch/levels.h"

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

// A part has at least this size, and a batch at most so many: as of divided batches (divide.cpp).
constexpr int64_t kLeastPart = int64_t{1} << 18;  // bytes
constexpr int64_t kMostParts = 64;
// Gradients that come so many parts before they are read have a buffer apart from those that come
// later: else these would take up their memory for as long. But not of less than this.
constexpr uint32_t kLongWait = 64;
constexpr int64_t kLeastBuffers = int64_t{1} << 14;  // bytes

class PartDivider {
 public:
  explicit PartDivider(FlushRecord& record)
      : record_(record),
        parts_of_(record.batches.size(), 0),
        last_reader_(record.tape.nodes.size(), 0) {
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
      find_last_readers(level);
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
  // Elsewhere than on a CPU a call for each piece costs more than it saves.
  bool may_place(const Level::Part& part) const {
    const Node& first = node(part, 0);
    if (first.num_values == 0 || !record_.batches[part.batch].needs_grad) return false;
    for (uint32_t i = 0; i < part.count && !record_.is_divided.empty(); ++i) {
      if (record_.divided(node_id(part, i))) return false;
    }
    return record_.tape.values[first.first_value].device.is_cpu();
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

  void find_last_readers(const Level& level) {
    uint32_t position = position_;
    for (const Level::Part& part : level.parts) {
      for (uint32_t i = 0; i < part.count; ++i) {
        for (const ValueId id : record_.tape.operands_of(node(part, i))) {
          if (id == kNone) continue;
          const Value& value = record_.tape.values[id];
          if (!value.is_outside()) last_reader_[value.node] = position;
        }
      }
      ++position;
    }
  }

  bool waits(const Level::Part& part, uint32_t i) const {
    return last_reader_[node_id(part, i)] > position_ + kLongWait;
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
  std::vector<uint32_t> parts_of_;     // by batch
  std::vector<uint32_t> last_reader_;  // by node: the last part that reads a result of it
  uint32_t position_ = 0;              // of a part among those of all levels
};

}  // namespace

void divide_parts(FlushRecord& record) { PartDivider(record).run(); }

}  // namespace autobatch
