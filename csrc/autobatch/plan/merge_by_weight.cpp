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

  void run() {
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
    if (last + 1 < batches.size()) batches.resize(last + 1);
  }

 private:
  const Node& node(uint32_t i) const { return record_.tape.nodes[graph_.at(i)]; }

  // Whether batch `b`, which comes next, can be run with `group`.
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
    // Once each: who sees some of the members tells by the first and the last how many there are.
    const auto weights = group_with_.find(b.signature);
    if (weights != group_with_.end() && weights->second == group_) return false;
    return !have_same_inputs(last, b) && !waits(b);
  }

  // With the batch that was joined last.
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
  const Rule* rule_ = nullptr;             // the last that was asked for
  const WeightGroups* joining_ = nullptr;  // that, if its batches can be joined
  // Groups are known by the place of their first member in the order.
  uint32_t group_ = kNone;          // that `group_of_` is up to date of
  uint32_t previous_ = kNone;       // the first member of the batch that joined it last
  std::vector<uint32_t> group_of_;  // by number
  std::unordered_map<const Signature*, uint32_t> group_with_;  // the last that has it
};

}  // namespace

void join_weight_groups(FlushRecord& record, size_t first_batch, const FlushGraph& graph) {
  if (record.batches.size() > first_batch + 1) WeightMerger(record, first_batch, graph).run();
}

}  // namespace autobatch
