#include "autobatch/member_order.h"

#include "autobatch/rules.h"

#include <algorithm>
#include <vector>

namespace autobatch {
namespace {

class Orderer {
 public:
  explicit Orderer(FlushRecord& record)
      : record_(record), first_use_(record.tape.nodes.size(), kNone) {}

  // Batches have to come last one first: what reads a result stands where it will by then.
  void order(const BatchRecord& batch) {
    const uint32_t end = batch.first + batch.count;
    uint32_t first = batch.first;
    for (uint32_t i = first + 1; i <= end; ++i) {
      if (i < end && node(i).signature == node(first).signature) continue;
      if (may_order(node(first))) sort(first, i);
      first = i;
    }
    if (!batch.rule->copies_regions()) note_uses(batch);  // that takes them from wherever they lie
  }

 private:
  const Node& node(uint32_t i) const { return record_.tape.nodes[record_.order[i]]; }

  // What draws random numbers does so in the order of capture.
  static bool may_order(const Node& node) { return !node.signature->op->random; }

  // By the place of the first that reads it; what nothing reads comes last.
  void sort(uint32_t first, uint32_t end) {
    const std::span<NodeId> members(record_.order.data() + first, end - first);
    const auto use = [&](NodeId id) { return first_use_[id]; };
    if (std::ranges::is_sorted(members, {}, use)) return;
    keys_.clear();
    for (uint32_t i = 0; i < members.size(); ++i) {
      keys_.emplace_back(static_cast<uint64_t>(use(members[i])) << 32 | i, members[i]);
    }
    std::sort(keys_.begin(), keys_.end());
    for (uint32_t i = 0; i < members.size(); ++i) members[i] = keys_[i].second;
  }

  void note_uses(const BatchRecord& batch) {
    for (uint32_t i = batch.first + batch.count; i-- > batch.first;) {
      for (const ValueId id : record_.tape.operands_of(node(i))) {
        if (id == kNone) continue;
        const NodeId producer = record_.tape.values[id].node;
        if (producer != kNone) first_use_[producer] = i;
      }
    }
  }

  FlushRecord& record_;
  std::vector<uint32_t> first_use_;  // by node: the place of the first that reads its results
  std::vector<std::pair<uint64_t, NodeId>> keys_;
};

}  // namespace

void order_members(FlushRecord& record, size_t first_batch) {
  Orderer orderer(record);
  for (size_t b = record.batches.size(); b-- > first_batch;) orderer.order(record.batches[b]);
}

}  // namespace autobatch
