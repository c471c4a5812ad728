#include "autobatch/plan/flush_graph.h"

#include "autobatch/common/prefetch.h"
#include "autobatch/rules/rule.h"

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

// Prefetch distance in operands. The values of operands are scattered over the tape.
constexpr uint32_t kAhead = 16;

}  // namespace

inline void FlushGraph::add(NodeId id) {
  Node& node = tape_->nodes[id];
  node.number = --gap_;
  if (node.signature->local == kNone) add_kind(node.signature, node.num_values);
  *--signature_ = node.signature->local;
  Kind& kind = kinds_[*signature_];
  first_extent_ -= node.num_values;
  *--nodes_ = {id, node.first_value, first_extent_};
  for (uint32_t k = 0; k < node.num_values; ++k) {
    const Value& value = tape_->values[node.first_value + k];
    const int64_t extent = value.geometry->extent;
    extents_[first_extent_ + k] = extent;
    if (extent != extents_[kind.first_extent + k]) kind.is_uniform = false;
    kind.needs_grad |= value.requires_grad;
  }
  uint32_t* input = inputs_;
  Read* read = reads_;
  for (uint32_t slot = node.num_operands; slot-- > 0;) {
    const uint32_t at = node.first_operand + slot;
    if (at >= kAhead) prefetch_row(tape_->values.data() + tape_->operands[at - kAhead], 1);
    const ValueId operand = tape_->operands[at];
    if (operand == kNone) continue;
    const Value& value = tape_->values[operand];
    if (value.is_graph_input()) continue;
    NodeState& state = tape_->nodes[value.node].state;
    if (state == NodeState::kComputed) {
      earlier_.push_back({node.number, value.base, slot});
      continue;
    }
    state = NodeState::kNeeded;
    *--input = value.node;
    *--read = {value.index, slot};
  }
  const uint32_t end = *input_begin_;
  *--input_begin_ = end - static_cast<uint32_t>(inputs_ - input);
  inputs_ = input;
  reads_ = read;
}

void FlushGraph::build(Tape& tape, at::ArrayRef<NodeId> nodes,
                       const std::vector<ValueId>* results) {
  forget();
  tape_ = &tape;
  choose(nodes, results);
  make_room(nodes);
  for (size_t i = nodes.size(); i-- > 0;) {
    if (tape.nodes[nodes[i]].state == NodeState::kNeeded) add(nodes[i]);
  }
  size_ = static_cast<uint32_t>(nodes.size()) - gap_;
  finish();
}

void FlushGraph::choose(at::ArrayRef<NodeId> nodes, const std::vector<ValueId>* results) {
  const NodeState state = results == nullptr ? NodeState::kNeeded : NodeState::kChosen;
  for (NodeId id : nodes) {
    Node& node = tape_->nodes[id];
    if (node.state != NodeState::kGone) node.state = state;
  }
  if (results == nullptr) return;
  for (const ValueId id : *results) {
    Node& node = tape_->nodes[tape_->values[id].node];
    if (node.state == NodeState::kChosen) node.state = NodeState::kNeeded;
  }
}

void FlushGraph::make_room(at::ArrayRef<NodeId> nodes) {
  size_t operands = 0, values = 0;
  for (NodeId id : nodes) {
    operands += tape_->nodes[id].num_operands;
    values += tape_->nodes[id].num_values;
  }
  kinds_.clear();
  earlier_.clear();
  const size_t count = nodes.size();
  policy_memory_ = pooled_array<uint32_t>(count + (count + 1) + operands);
  node_memory_ = pooled_array<OfNode>(count);
  read_memory_ = pooled_array<Read>(operands);
  extents_ = pooled_array<int64_t>(values);
  gap_ = static_cast<uint32_t>(count);
  first_extent_ = static_cast<uint32_t>(values);
  signature_ = policy_memory_.get() + count;
  input_begin_ = signature_ + count;
  inputs_ = input_begin_ + 1 + operands;
  *input_begin_ = static_cast<uint32_t>(operands);
  nodes_ = node_memory_.get() + count;
  reads_ = read_memory_.get() + operands;
}

void FlushGraph::add_kind(Signature* signature, uint32_t num_results) {
  signature->local = static_cast<uint32_t>(kinds_.size());
  kinds_.push_back({signature, num_results, first_extent_ - num_results});
}

// Renumbers nodes, signatures and inputs, so that the first node of the graph has number 0.
void FlushGraph::finish() {
  const uint32_t unused = *input_begin_;
  std::vector<uint32_t> rank(kinds_.size(), kNone);
  uint32_t ranks = 0;
  for (uint32_t number = 0; number < size_; ++number) {
    uint32_t& of_kind = rank[signature_[number]];
    if (of_kind == kNone) of_kind = ranks++;
    signature_[number] = of_kind;
    input_begin_[number] -= unused;
  }
  input_begin_[size_] -= unused;
  if (gap_ > 0) {
    for (uint32_t number = 0; number < size_; ++number) tape_->nodes[id(number)].number = number;
  }
  if (size_ < tape_->nodes.size()) {
    for (uint32_t e = 0; e < input_begin_[size_]; ++e) inputs_[e] = number(inputs_[e]);
  }
  for (EarlierRead& read : earlier_) read.reader -= gap_;
  std::reverse(earlier_.begin(), earlier_.end());
  sort_kinds(rank);
}

// Sorts the kinds by their first nodes.
void FlushGraph::sort_kinds(std::span<const uint32_t> rank) {
  const std::vector<Kind> unsorted = kinds_;
  for (size_t k = 0; k < rank.size(); ++k) kinds_[rank[k]] = unsorted[k];
  describe_kinds();
}

void FlushGraph::describe_kinds() {
  batchable_.clear();
  heavy_.clear();
  family_ = 0;
  for (uint32_t k = 0; k < kinds_.size(); ++k) {
    Signature* signature = kinds_[k].signature;
    signature->local = k;
    batchable_.push_back(signature->rule->batchable() ? 1 : 0);
    heavy_.push_back(signature->rule->heavy() ? 1 : 0);
    // The family is a sum, so that the order of the signatures does not matter.
    const uint64_t mixed = reinterpret_cast<uintptr_t>(signature) * 0x9E3779B97F4A7C15U;
    family_ += mixed ^ (mixed >> 29);
  }
}

// Moves nodes to the front of node_memory_. Writes signatures and inputs to new arrays.
void FlushGraph::merge(std::span<const Merge> merges) {
  // For each node: the index of its merge in `merges` if the node is merged, and kNone otherwise.
  // After the loop below has handled a node that is not merged, the entry contains the node's new
  // number.
  const auto merge_of = pooled_array<uint32_t>(size_);
  std::fill_n(merge_of.get(), size_, kNone);
  for (uint32_t m = 0; m < merges.size(); ++m) merge_of[merges[m].merged] = m;
  if (!earlier_.empty()) merge_earlier(merges, merge_of.get());
  forget_kinds();
  const std::vector<Kind> kinds = std::exchange(kinds_, {});
  const ScheduleInput old = view();
  const Read* const reads = reads_;
  const auto policy_memory = std::move(policy_memory_);
  const auto read_memory = std::move(read_memory_);
  make_list_room(size_, old.inputs.size());
  auto merge = merges.begin();
  uint32_t count = 0, end = 0;
  for (uint32_t number = 0; number < size_; ++number) {
    tape_->nodes[id(number)].number = kNone;
    if (merge_of[number] != kNone) continue;
    const bool joins = merge != merges.end() && merge->reader == number;
    const Kind& kind = kinds[old.signature[number]];
    signature_[count] = number_of(joins ? merge->signature : kind.signature, kind);
    input_begin_[count] = end;
    const uint32_t from = joins ? merge->merged : number;
    const uint32_t more = joins ? (merge++)->first_slot : 0;
    for (uint32_t i = old.input_begin[from]; i < old.input_begin[from + 1]; ++i, ++end) {
      inputs_[end] = merge_of[old.inputs[i]];
      reads_[end] = {reads[i].result(), reads[i].slot() + more};
    }
    nodes_[count] = nodes_[number];
    tape_->nodes[id(count)].number = count;
    merge_of[number] = count++;
  }
  input_begin_[count] = end;
  for (EarlierRead& read : earlier_) read.reader = merge_of[read.reader];
  size_ = count;
  gap_ = 0;
  describe_kinds();
}

void FlushGraph::make_list_room(uint32_t nodes, size_t inputs) {
  policy_memory_ = pooled_array<uint32_t>(nodes + (nodes + 1) + inputs);
  read_memory_ = pooled_array<Read>(inputs);
  signature_ = policy_memory_.get();
  input_begin_ = signature_ + nodes;
  inputs_ = input_begin_ + nodes + 1;
  reads_ = read_memory_.get();
}

// Returns the index of the signature's kind. If the signature is new, adds a kind. The new kind is
// a copy of `like`, the former kind of the node, with the new signature.
uint32_t FlushGraph::number_of(Signature* signature, const Kind& like) {
  if (signature->local == kNone) {
    signature->local = static_cast<uint32_t>(kinds_.size());
    kinds_.push_back(like);
    kinds_.back().signature = signature;
  }
  return signature->local;
}

void FlushGraph::merge_earlier(std::span<const Merge> merges, const uint32_t* merge_of) {
  for (EarlierRead& read : earlier_) {
    if (merge_of[read.reader] == kNone) continue;
    const Merge& merge = merges[merge_of[read.reader]];
    read = {merge.reader, read.base, read.slot + merge.first_slot};
  }
  std::ranges::stable_sort(earlier_, {}, &EarlierRead::reader);
}

void FlushGraph::forget_kinds() {  // signatures outlive the flush, even if the flush fails
  for (const Kind& kind : kinds_) kind.signature->local = kNone;
}

void FlushGraph::forget() {
  forget_kinds();
  if (tape_ == nullptr) return;
  for (uint32_t number = 0; number < size_; ++number) tape_->nodes[id(number)].number = kNone;
  size_ = 0;
}

ScheduleInput FlushGraph::view() const {
  ScheduleInput s;
  s.signature = {signature_, size_};
  s.input_begin = {input_begin_, size_t{size_} + 1};
  s.inputs = {inputs_, input_begin_[size_]};
  s.num_signatures = static_cast<uint32_t>(kinds_.size());
  s.batchable = batchable_;
  s.heavy = heavy_;
  s.family = family_;
  return s;
}

BoundInput FlushGraph::take_bound_input() {
  const ScheduleInput s = view();
  const GiveBackMemory give_back = policy_memory_.get_deleter();
  return {{policy_memory_.release(), give_back},
          s.signature,
          s.input_begin,
          s.inputs,
          std::move(batchable_)};
}

void FlushGraph::append_order(std::vector<NodeId>& order) const {
  // Reserves memory only once, because the order of an open record grows with each read.
  if (order.empty()) order.reserve(order_.size());
  for (const uint32_t number : order_) order.push_back(nodes_[number].id);
}

}  // namespace autobatch
