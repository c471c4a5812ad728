#include "autobatch/plan/merge_by_weight.h"

#include "autobatch/rules/rule.h"
#include "autobatch/rules/weight_groups.h"

#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

class WeightMerger {
 public:
  WeightMerger(FlushRecord& record, size_t first_batch, const FlushGraph& graph)
      : record_(record), first_batch_(first_batch), graph_(graph) {}

  size_t run() {
    std::vector<BatchRecord>& batches = record_.batches;
    size_t last = first_batch_;
    for (size_t b = first_batch_ + 1; b < batches.size(); ++b) {
      if (joins(batches[last], batches[b])) {
        mark(batches[b]);
        batches[last].count += batches[b].count;
        batches[last].needs_grad |= batches[b].needs_grad;
        previous_ = batches[b].first;
      } else if (++last != b) {
        batches[last] = std::move(batches[b]);
      }
    }
    const size_t merged = batches.size() - (last + 1);
    if (merged != 0) batches.resize(last + 1);
    return merged;
  }

 private:
  const Node& node(uint32_t i) const { return record_.tape.nodes[graph_.at(i)]; }

  // Whether the next batch `b` can join `group`.
  bool joins(const BatchRecord& group, const BatchRecord& b) {
    if (group.rule != b.rule) return false;
    if (std::exchange(rule_, b.rule) != b.rule) joining_ = dynamic_cast<const WeightGroups*>(rule_);
    if (joining_ == nullptr) return false;
    const uint32_t last = group.first + group.count - 1;
    if (!joining_->may_join(record_.tape, node(last), node(b.first))) return false;
    if (group_ != group.first) {
      group_ = previous_ = group.first;
      group_of_.resize(graph_.size(), kNone);
      mark(group);
    }
    // A group contains each weight at most once, because is_one_group() compares only the first and
    // the last member.
    const auto weights = group_with_.find(b.signature);
    if (weights != group_with_.end() && weights->second == group_) return false;
    return !have_same_inputs(last, b) && !waits(b);
  }

  // Whether `b` has the same inputs as the batch that was joined last.
  bool have_same_inputs(uint32_t last, const BatchRecord& b) const {
    if (last + 1 - previous_ != b.count) return false;
    return input(last) == input(b.first + b.count - 1) && input(previous_) == input(b.first);
  }
  ValueId input(uint32_t i) const { return record_.tape.operands[node(i).first_operand]; }

  bool waits(const BatchRecord& b) const {
    for (uint32_t i = b.first; i < b.first + b.count; ++i) {
      for (ValueId id : record_.tape.operands_of(node(i))) {
        if (id == kNone) continue;
        const NodeId producer = record_.tape.values[id].node;
        const uint32_t number = producer == kNone ? kNone : graph_.number(producer);
        if (number != kNone && group_of_[number] == group_) return true;
      }
    }
    return false;
  }

  void mark(const BatchRecord& b) {
    for (uint32_t i = b.first; i < b.first + b.count; ++i) group_of_[graph_.member_at(i)] = group_;
    group_with_[b.signature] = group_;
  }

  FlushRecord& record_;
  size_t first_batch_;
  const FlushGraph& graph_;
  const Rule* rule_ = nullptr;             // rule of the last call of joins()
  const WeightGroups* joining_ = nullptr;  // rule_, or null if its batches cannot be joined
  // A group is identified by the position of its first member in the order.
  uint32_t group_ = kNone;          // the group that was last marked in `group_of_`
  uint32_t previous_ = kNone;       // first member of the batch that joined last
  std::vector<uint32_t> group_of_;  // for each node number: its last group
  // For each signature: the last group with a batch of this signature.
  std::unordered_map<const Signature*, uint32_t> group_with_;
};

}  // namespace

size_t merge_by_weight(FlushRecord& record, size_t first_batch, const FlushGraph& graph) {
  if (record.batches.size() <= first_batch + 1) return 0;
  return WeightMerger(record, first_batch, graph).run();
}

}  // namespace autobatch
