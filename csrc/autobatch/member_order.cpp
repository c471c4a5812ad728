#include "autobatch/member_order.h"

#include "autobatch/rules.h"

#include <algorithm>
#include <vector>

namespace autobatch {
namespace {

class Orderer {
 public:
  Orderer(FlushRecord& record, const Reads& reads)
      : record_(record), reads_(reads), first_use_(record.tape.nodes.size(), kNone) {}

  // Batches have to come last one first: what reads a result stands where it will by then.
  void order(const BatchRecord& batch) {
    const uint32_t end = batch.first + batch.count;
    uint32_t first = batch.first;
    // Members of one weight stand together: mostly the last is as the first, and all are.
    const bool one = node(first).signature == node(end - 1).signature;
    for (uint32_t i = one ? end : first + 1; i <= end; ++i) {
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
      keys_.push_back(static_cast<uint64_t>(use(members[i])) << 32 | i);
    }
    std::sort(keys_.begin(), keys_.end());
    before_.assign(members.begin(), members.end());
    for (uint32_t i = 0; i < members.size(); ++i) {
      members[i] = before_[static_cast<uint32_t>(keys_[i])];
    }
  }

  void note_uses(const BatchRecord& batch) {
    for (uint32_t i = batch.first + batch.count; i-- > batch.first;) {
      for (const Read& read : reads_.of(record_.order[i])) first_use_[read.node] = i;
    }
  }

  FlushRecord& record_;
  const Reads& reads_;
  std::vector<uint32_t> first_use_;  // by node: the place of the first that reads its results
  std::vector<uint64_t> keys_;
  std::vector<NodeId> before_;
};

}  // namespace

void order_members(FlushRecord& record, size_t first_batch, const Reads& reads) {
  Orderer orderer(record, reads);
  for (size_t b = record.batches.size(); b-- > first_batch;) orderer.order(record.batches[b]);
}

}  // namespace autobatch
