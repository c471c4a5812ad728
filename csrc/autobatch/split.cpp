// Graph::split: the part of a graph that a read needs, taken out to be flushed alone.
#include "autobatch/gather.h"
#include "autobatch/graph.h"
#include "autobatch/pending_tensor.h"
#include "autobatch/signature.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <set>
#include <unordered_set>
#include <utility>

namespace autobatch {

class Splitter {
 public:
  Splitter(Graph& graph, at::ArrayRef<ValueId> targets, SignatureTable& signatures)
      : graph_(graph), old_(graph.tape_), signatures_(signatures) {
    choose(targets);
    mark_uses();
  }

  // Whether anything would stay.
  bool divides() const { return divides_; }

  Split run() {
    number_nodes();
    for (ValueId id = 0; id < old_.values.size(); ++id) {
      if (part_uses_[id]) copy_to_part(id);
      if (rest_uses_[id]) copy_to_rest(id);
    }
    for (NodeId id = 0; id < old_.nodes.size(); ++id) {
      if (fate_[id] == kPart) copy_node(id, split_.tape, part_value_);
      if (fate_[id] == kRest) copy_node(id, rest_, rest_value_);
    }
    copy_writes();
    install();
    for (NodeId id = 0; id < fate_.size(); ++id) {
      if (fate_[id] != kPart) new_node_[id] = kNone;
    }
    split_.node_number = std::move(new_node_);
    split_.value_number = std::move(part_value_);
    return std::move(split_);
  }

 private:
  enum Fate : uint8_t { kDead, kPart, kRest };

  // What was computed before goes with the part, whether somebody can still reach it or not.
  void choose(at::ArrayRef<ValueId> targets) {
    fate_.assign(old_.nodes.size(), kDead);
    const std::vector<NodeId> chosen = graph_.choose(targets);
    for (NodeId id : graph_.waiting()) fate_[id] = kRest;
    for (NodeId id : chosen) fate_[id] = kPart;
    for (NodeId id = 0; id < old_.nodes.size(); ++id) {
      if (graph_.is_computed(id)) fate_[id] = kPart;
      divides_ = divides_ || fate_[id] == kRest;
    }
    for (ValueId target : targets) is_target_.insert(target);
  }

  void add_target(ValueId id) {
    is_target_.insert(id);
    part_uses_[id] = 1;
  }

  // With a view of an outside tensor that shares memory with itself the views of that: left behind,
  // they would not tell which of its elements they are of.
  void add_views_of_shared() {
    const auto is_of_shared_target = [&](ValueId id) {
      for (ValueId of = old_.values[id].parent; of != kNone; of = old_.values[of].parent) {
        if (old_.values[of].geometry->overlapping && is_target_.count(of) != 0) return true;
      }
      return false;
    };
    for (ValueId id = 0; id < old_.values.size() && !is_target_.empty(); ++id) {
      const Value& value = old_.values[id];
      if (!value.is_outside() || value.tensor == nullptr || !is_of_shared_target(id)) continue;
      add_target(id);
    }
  }

  // With a piece of an outside tensor the others that one call gave: to autograd they are results
  // of one node.
  void add_siblings() {
    std::set<std::pair<ValueId, uint16_t>> calls;
    const auto call_of = [&](ValueId id) {
      return std::pair(old_.values[id].parent, old_.values[id].call);
    };
    for (const ValueId target : is_target_) {
      if (old_.values[target].call != 0) calls.insert(call_of(target));
    }
    for (ValueId id = 0; id < old_.values.size() && !calls.empty(); ++id) {
      const Value& value = old_.values[id];
      if (!value.is_outside() || value.tensor == nullptr || calls.count(call_of(id)) == 0) continue;
      add_target(id);
    }
  }

  // Of what shares memory with itself: that not all of its views tell which of its elements they
  // are of, or that one of them will be a tensor, over memory that is shared as it says.
  void mark_blurred() {
    blurred_.assign(old_.values.size(), 0);
    std::vector<uint8_t> shares(old_.values.size(), 0);  // itself, or what it is a view of
    for (ValueId id = 0; id < old_.values.size(); ++id) {
      ValueId of = old_.values[id].parent;
      shares[id] = old_.values[id].geometry->overlapping || (of != kNone && shares[of] != 0);
      const bool stays = old_.values[id].tensor != nullptr && !is_made_by_part(id);
      for (; of != kNone && shares[of] != 0; of = old_.values[of].parent) {
        if (stays || !old_.tells_apart(id, of)) blurred_[of] = 1;
      }
    }
  }

  // Which values either side has to know: operands, what tensors stand for, what those are views
  // of.
  void mark_uses() {
    part_uses_.assign(old_.values.size(), 0);
    rest_uses_.assign(old_.values.size(), 0);
    for (NodeId id = 0; id < old_.nodes.size(); ++id) {
      if (fate_[id] == kDead) continue;
      const Node& node = old_.nodes[id];
      auto& uses = fate_[id] == kPart ? part_uses_ : rest_uses_;
      for (uint32_t k = 0; k < node.num_values; ++k) uses[node.first_value + k] = 1;
      for (ValueId operand : old_.operands_of(node)) {
        if (operand != kNone) uses[operand] = 1;
      }
    }
    for (ValueId target : is_target_) part_uses_[target] = 1;
    // A view of an outside tensor that the part reads goes with it, so that its gradient is seen.
    for (ValueId id = static_cast<ValueId>(old_.values.size()); id-- > 0;) {
      const Value& value = old_.values[id];
      if (!part_uses_[id] || value.parent == kNone) continue;
      part_uses_[value.parent] = 1;
      if (value.is_outside() && value.tensor != nullptr) is_target_.insert(id);
    }
    add_views_of_shared();
    add_siblings();
    mark_blurred();
    for (ValueId id = 0; id < old_.values.size(); ++id) {
      const Value& value = old_.values[id];
      if (value.is_outside() && value.parent == kNone) {
        rest_uses_[id] |= old_.outside[value.index].is_weight ? 1 : 0;
      }
      if (value.tensor == nullptr) continue;
      (is_made_by_part(id) ? part_uses_ : rest_uses_)[id] = 1;
      divides_ = divides_ || !is_made_by_part(id);
    }
    for (ValueId id = static_cast<ValueId>(old_.values.size()); id-- > 0;) {
      const Value& value = old_.values[id];
      for (auto* uses : {&part_uses_, &rest_uses_}) {
        const bool ends = value.parent == kNone || (uses == &rest_uses_ && is_export(id));
        if ((*uses)[id] && !ends) (*uses)[value.parent] = 1;
      }
    }
  }

  // Whether the rest sees the value as an outside tensor: a result of the part, and whatever of the
  // part the user holds, so that the way of its gradient leads through the tensor. Where a
  // view does not tell which of its elements it is of, the rest reads what that is a view of.
  bool is_export(ValueId id) const {
    const Value& value = old_.values[id];
    if (value.geometry->overlapping && blurred_[id] != 0) return false;
    if (value.is_outside()) return is_target_.count(id) != 0;
    return fate_[value.node] == kPart && (value.parent == kNone || value.tensor != nullptr);
  }

  // Whether its tensor, if it has one, becomes real with the part.
  bool is_made_by_part(ValueId id) const {
    const Value& value = old_.values[id];
    return value.is_outside() ? is_target_.count(id) != 0 : fate_[value.node] == kPart;
  }

  void number_nodes() {
    new_node_.assign(old_.nodes.size(), kNone);
    NodeId part = 0, rest = 0;
    for (NodeId id = 0; id < old_.nodes.size(); ++id) {
      if (fate_[id] == kPart) new_node_[id] = part++;
      if (fate_[id] == kRest) new_node_[id] = rest++;
    }
    part_value_.assign(old_.values.size(), kNone);
    rest_value_.assign(old_.values.size(), kNone);
    rest_root_.assign(old_.values.size(), kNone);
  }

  // The value with its numbers translated, appended to `tape`.
  ValueId append(ValueId id, Tape& tape, std::vector<ValueId>& numbers, ValueId base) {
    const auto to = static_cast<ValueId>(tape.values.size());
    numbers[id] = to;
    Value value = old_.values[id];
    value.base = base == id ? to : numbers[base];
    value.next_view = kNone;
    value.tensor = nullptr;
    if (value.node != kNone) value.node = new_node_[value.node];
    if (base == id) {
      value.parent = kNone;
    } else {
      value.parent = numbers[value.parent];
      value.next_view = std::exchange(tape.values[value.base].next_view, to);
      tape.take_aparts(to, old_, id, numbers);
    }
    tape.values.push_back(value);
    return to;
  }

  void copy_to_part(ValueId id) {
    const Value& old = old_.values[id];
    const ValueId to = append(id, split_.tape, part_value_, old.base);
    Value& value = split_.tape.values[to];
    if (old.is_outside()) value.index = copy_outside(old, value.base, split_.tape);
    if (is_made_by_part(id)) give_tensor(old, value, to);
  }

  void copy_to_rest(ValueId id) {
    const Value& old = old_.values[id];
    // What it is a view of, over there.
    ValueId root = old.base;
    if (is_export(id)) {
      root = id;
    } else if (old.parent != kNone) {
      root = rest_root_[old.parent];
    }
    rest_root_[id] = root;
    const ValueId to = append(id, rest_, rest_value_, root);
    Value& value = rest_.values[to];
    if (is_export(root)) {
      value.node = kNone;
      place_in_export(value, id, root);
      value.index = root == id ? add_export(id, to) : rest_.values[value.base].index;
    } else if (old.is_outside()) {
      value.index = copy_outside(old, value.base, rest_);
    }
    if (!is_made_by_part(id)) give_tensor(old, value, to);
  }

  void place_in_export(Value& value, ValueId id, ValueId root) const {
    if (id != root && old_.values[root].geometry->overlapping) {
      const ValueId of = old_.counted_in(root);
      const Apart& apart = *old_.find_apart(id, of);
      value.geometry = apart.geometry;
      value.offset = apart.offset - (of == root ? 0 : old_.find_apart(root, of)->offset);
    } else {
      value.offset -= old_.values[root].offset;
    }
  }

  static void give_tensor(const Value& old, Value& value, ValueId to) {
    value.tensor = old.tensor;
    if (old.tensor != nullptr) old.tensor->stand_for(to);
  }

  // Views share the outside tensor of their base.
  uint32_t copy_outside(const Value& old, ValueId base, Tape& tape) {
    if (old.parent != kNone) return tape.values[base].index;
    Outside& outside = graph_.tape_.outside[old.index];
    // Of many reads of one graph each would copy all that waits.
    if (&tape == &rest_ && !part_uses_[old.base]) {
      tape.outside.push_back(std::move(outside));
    } else {
      tape.outside.push_back(outside);
    }
    tape.outside.back().value = base;
    return static_cast<uint32_t>(tape.outside.size() - 1);
  }

  // A value of the part as an outside tensor of the rest; filled when it was computed.
  uint32_t add_export(ValueId id, ValueId to) {
    Outside outside;
    outside.value = to;
    // Each element has a gradient of its own, so it has memory of its own too.
    Value& value = rest_.values[to];
    outside.is_copy = value.geometry->overlapping;
    if (outside.is_copy) {
      outside.given = value.geometry;
      const Apart* apart = old_.find_apart(id, old_.counted_in(id));
      value.geometry = apart != nullptr
                           ? apart->geometry
                           : graph_.geometries_->intern_contiguous(value.geometry->sizes);
    }
    outside.serial = graph_.new_serial(false);
    rest_.outside.push_back(std::move(outside));
    const auto index = static_cast<uint32_t>(rest_.outside.size() - 1);
    split_.exports.push_back({part_value_[id], index});
    return index;
  }

  void copy_node(NodeId id, Tape& tape, const std::vector<ValueId>& numbers) {
    Node node = old_.nodes[id];
    const auto operands = old_.operands_of(node);
    node.first_operand = static_cast<uint32_t>(tape.operands.size());
    for (ValueId operand : operands) {
      tape.operands.push_back(operand == kNone ? kNone : numbers[operand]);
    }
    node.first_value = numbers[node.first_value];
    if (&tape == &rest_) node.signature = signature_in_rest(node, operands);
    tape.nodes.push_back(node);
  }

  // A view of a weight that is a tensor by now has a gradient of its own: what reads it is no batch
  // with what reads the weight.
  Signature* signature_in_rest(const Node& node, at::ArrayRef<ValueId> operands) {
    Signature* signature = node.signature;
    for (size_t slot = 0; node.signature->weight_slots >> slot != 0; ++slot) {
      if ((node.signature->weight_slots >> slot & 1) == 0) continue;
      const ValueId of = view_that_is_exported(operands[slot]);
      if (of == kNone || !old_.values[of].is_outside()) continue;
      const uint32_t index = rest_.values[rest_value_[of]].index;
      signature = signatures_.apart(*signature, rest_.outside[index].serial);
    }
    return signature;
  }

  ValueId view_that_is_exported(ValueId id) const {
    while (id != kNone && !is_export(id)) id = old_.values[id].parent;
    return id;
  }

  void copy_writes() {
    std::vector<NodeId> part_before{0}, rest_before{0};
    for (Fate fate : fate_) {
      part_before.push_back(part_before.back() + (fate == kPart ? 1 : 0));
      rest_before.push_back(rest_before.back() + (fate == kRest ? 1 : 0));
    }
    for (const auto& [content, when] : old_.written_at) {
      const ValueId part = part_value_[content];
      const ValueId rest = rest_value_[content];
      if (part != kNone) split_.tape.written_at[part] = part_before[when];
      if (rest != kNone) rest_.written_at[rest] = rest_before[when];
    }
    for (const auto& [content, version] : old_.versions) {
      if (part_value_[content] != kNone) split_.tape.versions[part_value_[content]] = version;
      if (rest_value_[content] != kNone) rest_.versions[rest_value_[content]] = version;
    }
  }

  void install() {
    ++graph_.numbering_;
    graph_.renumbered_ += old_.values.size();
    for (auto* index : {&graph_.outside_index_}) {
      for (auto at = index->begin(); at != index->end();) {
        const ValueId id = rest_value_[at->second];
        if (id == kNone) {
          at = index->erase(at);
        } else {
          at->second = id;
          ++at;
        }
      }
    }
    for (auto at = graph_.weight_index_.begin(); at != graph_.weight_index_.end();) {
      const ValueId id = rest_value_[at->second];
      if (id == kNone) {
        at = graph_.weight_index_.erase(at);
      } else {
        at->second = id;
        ++at;
      }
    }
    graph_.tape_ = std::move(rest_);
    graph_.forget_progress();
  }

  Graph& graph_;
  const Tape& old_;
  SignatureTable& signatures_;
  Split split_;
  Tape rest_;
  bool divides_ = false;
  std::unordered_set<ValueId> is_target_;
  std::vector<uint8_t> part_uses_, rest_uses_;  // by old value
  std::vector<uint8_t> blurred_;                // by old value
  std::vector<Fate> fate_;                      // by old node
  std::vector<NodeId> new_node_;                // on its side, by old node
  std::vector<ValueId> part_value_, rest_value_;
  std::vector<ValueId> rest_root_;  // old values: what a value of the rest is a view of there
};

Split Graph::split(at::ArrayRef<ValueId> targets, SignatureTable& signatures) {
  if (!targets.empty()) {
    Splitter splitter(*this, targets, signatures);
    if (splitter.divides()) {
      forget_memories();
      return splitter.run();
    }
  }
  Split all;
  all.tape = take();
  return all;
}

void Graph::fill_exports(const Split& split, at::ArrayRef<Computed> exports) {
  std::vector<const Computed*> lost(tape_.outside.size(), nullptr);
  bool any_lost = false;
  for (size_t i = 0; i < split.exports.size(); ++i) {
    Outside& outside = tape_.outside[split.exports[i].outside];
    const at::Tensor& tensor = exports[i].tensor;
    if (!tensor.defined()) {
      lost[split.exports[i].outside] = &exports[i];
      any_lost = true;
      continue;
    }
    outside.tensor = tensor;
    outside.data = detached_alias(tensor);
    if (outside.is_copy) {
      const Geometry& g = *tape_.values[outside.value].geometry;
      outside.data = at::empty_strided(g.sizes, g.strides, tensor.options()).copy_(outside.data);
    }
    if (tensor.requires_grad()) outside.edge = torch::autograd::impl::gradient_edge(tensor);
    outside_index_[tensor.unsafeGetTensorImpl()] = outside.value;
    if (!tensor.unsafeGetTensorImpl()->version_counter().enabled()) continue;
    outside.counter = tensor.unsafeGetTensorImpl()->version_counter();
    outside.version = outside.counter.current_version();
    outside.counted = true;
  }
  if (any_lost) lose_readers_of(lost);
}

void Graph::lose_readers_of(const std::vector<const Computed*>& outside) {
  std::vector<const Computed*> gone(tape_.nodes.size(), nullptr);
  const auto cause = [&](const Value& value) {
    return value.is_outside() ? outside[value.index] : gone[value.node];
  };
  for (NodeId id = 0; id < tape_.nodes.size(); ++id) {
    for (ValueId operand : tape_.operands_of(tape_.nodes[id])) {
      if (operand == kNone || gone[id] != nullptr) continue;
      gone[id] = cause(tape_.values[operand]);
    }
  }
  for (Value& value : tape_.values) {
    if (value.tensor == nullptr || cause(value) == nullptr) continue;
    std::exchange(value.tensor, nullptr)->lose(cause(value)->lost);
  }
}

}  // namespace autobatch
