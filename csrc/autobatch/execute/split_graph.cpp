// Graph::split moves the part of a graph that a read needs to a separate tape, so that the part can
// be flushed alone. The rest of the graph keeps the old tape and the old numbers. If the rest reads
// a value of the part, the value becomes a graph input of the rest and keeps its number.
#include "autobatch/backward/backward.h"
#include "autobatch/graph/flush_progress.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/graph/signature.h"

#include <algorithm>
#include <set>
#include <unordered_set>
#include <utility>

namespace autobatch {

class Splitter {
 public:
  Splitter(Graph& graph, at::ArrayRef<ValueId> targets, std::vector<NodeId> part,
           SignatureTable& signatures)
      : graph_(graph), tape_(graph.tape_), part_(std::move(part)), signatures_(signatures) {
    for (NodeId n = 0; n < part_.size(); ++n) tape_.nodes[part_[n]].number = n;
    find_values(targets);
    find_moved();
  }

  Split run() {
    for (ValueId id : values_) append(id);
    for (NodeId id : part_) copy_node(id);
    // The replacements are computed from the old values, so all replacements are computed before
    // any value changes.
    std::vector<Value> moved;
    for (ValueId id : moved_) moved.push_back(place_in_rest(id));
    put_in_rest(moved);
    for (ValueId id : values_) copy_graph_input(id);
    copy_writes();
    find_sharers(split_.tape, tape_);
    install();
    split_.is_renumbered = true;
    split_.nodes = std::move(part_);
    split_.values = std::move(values_);
    return std::move(split_);
  }

 private:
  bool is_in_part(const Value& value) const { return tape_.nodes[value.node].number != kNone; }

  // Whether the value's tensor (if any) becomes real when the part is flushed.
  bool is_made_by_part(ValueId id) const {
    const Value& value = tape_.values[id];
    return value.is_graph_input() ? is_target_.count(id) != 0 : is_in_part(value);
  }

  // --- the part ---

  // Finds the values that the part needs: results, operands, views of results that have tensors,
  // the targets, and all values that one of these values is a view of.
  void find_values(at::ArrayRef<ValueId> targets) {
    for (NodeId id : part_) {
      const Node& node = tape_.nodes[id];
      for (ValueId k = node.first_value; k < node.first_value + node.num_values; ++k) {
        add(k);
        for (ValueId view = tape_.values[k].next_view; view != kNone;
             view = tape_.values[view].next_view) {
          if (tape_.values[view].tensor != nullptr) add(view);
        }
      }
      for (ValueId operand : tape_.operands_of(node)) add(operand);
    }
    for (ValueId target : targets) add_target(target);
    if (!is_target_.empty()) {
      add_views_of_shared();
      add_siblings();
    }
    std::sort(values_.begin(), values_.end());
  }

  // Adds the value and the values that it is a view of. If one of these values is a view of a graph
  // input and has a tensor, the value becomes a target, so that its gradient passes through the
  // tensor.
  void add(ValueId id) {
    while (id != kNone && part_value_.emplace(id, kNone).second) {
      values_.push_back(id);
      const Value& value = tape_.values[id];
      if (value.parent != kNone && value.is_graph_input() && value.tensor != nullptr) {
        note_target(id);
      }
      id = value.parent;
    }
  }

  void add_target(ValueId id) {
    add(id);
    if (tape_.values[id].is_graph_input()) note_target(id);
  }

  void note_target(ValueId id) {
    is_target_.insert(id);
    target_bases_.insert(tape_.values[id].base);
  }

  // Visits the graph inputs that targets are views of, and all views of these graph inputs.
  template <class Function>
  void for_each_graph_input_view(const Function& function) const {
    for (ValueId base : target_bases_) {
      for (ValueId id = base; id != kNone; id = tape_.values[id].next_view) function(id);
    }
  }

  // If a target has overlapping elements, adds the views of that target. If these views stayed in
  // the rest, nothing would show which elements of the target the views contain.
  void add_views_of_shared() {
    const auto is_of_shared_target = [&](ValueId id) {
      for (ValueId of = tape_.values[id].parent; of != kNone; of = tape_.values[of].parent) {
        if (tape_.values[of].geometry->overlapping && is_target_.count(of) != 0) return true;
      }
      return false;
    };
    std::vector<ValueId> views;
    for_each_graph_input_view([&](ValueId id) {
      if (tape_.values[id].tensor != nullptr && is_of_shared_target(id)) views.push_back(id);
    });
    for (ValueId id : views) add_target(id);
  }

  // If a target is one of several pieces that one call made of a graph input, adds the other
  // pieces. For autograd, all pieces are results of one node.
  void add_siblings() {
    std::set<std::pair<ValueId, uint16_t>> calls;
    const auto call_of = [&](ValueId id) {
      return std::pair(tape_.values[id].parent, tape_.values[id].call);
    };
    for (ValueId target : is_target_) {
      if (tape_.values[target].call != 0) calls.insert(call_of(target));
    }
    if (calls.empty()) return;
    std::vector<ValueId> pieces;
    for_each_graph_input_view([&](ValueId id) {
      if (tape_.values[id].tensor != nullptr && calls.count(call_of(id)) != 0) pieces.push_back(id);
    });
    for (ValueId id : pieces) add_target(id);
  }

  // Appends the value to the part's tape and translates the numbers in the value. The appended
  // value keeps its tensor only if the tensor becomes real when the part is flushed.
  void append(ValueId id) {
    const auto to = static_cast<ValueId>(split_.tape.values.size());
    part_value_[id] = to;
    Value value = tape_.values[id];
    value.next_view = value.uses = kNone;
    if (value.node != kNone) value.node = tape_.nodes[value.node].number;
    if (value.base == id) {
      value.base = to;
    } else {
      value.base = part_value_.at(value.base);
      value.parent = part_value_.at(value.parent);
      value.next_view = std::exchange(split_.tape.values[value.base].next_view, to);
      split_.tape.take_element_maps(to, tape_, id, [&](ValueId of) { return number_in_part(of); });
    }
    if (!is_made_by_part(id)) value.tensor = nullptr;
    if (value.tensor != nullptr) value.tensor->stand_for(to);
    split_.tape.values.push_back(value);
  }

  ValueId number_in_part(ValueId id) const {
    const auto found = part_value_.find(id);
    return found == part_value_.end() ? kNone : found->second;
  }

  void copy_node(NodeId id) {
    Node node = tape_.nodes[id];
    node.number = kNone;
    const auto operands = tape_.operands_of(node);
    node.first_operand = static_cast<uint32_t>(split_.tape.operands.size());
    for (ValueId operand : operands) {
      split_.tape.operands.push_back(operand == kNone ? kNone : part_value_.at(operand));
    }
    node.first_value = part_value_.at(node.first_value);
    split_.tape.nodes.push_back(node);
  }

  // Copies a graph input to the part. A graph input also stays in the rest if the rest refers to
  // the graph input, or if the graph input is a weight.
  void copy_graph_input(ValueId id) {
    const ValueId to = part_value_.at(id);
    Value& value = split_.tape.values[to];
    if (!value.is_graph_input()) return;
    if (value.base != to) {  // a view, whose base was copied before
      value.index = split_.tape.values[value.base].index;
      return;
    }
    GraphInput& graph_input = tape_.graph_inputs[value.index];
    value.index = static_cast<uint32_t>(split_.tape.graph_inputs.size());
    const bool stays = graph_input.is_weight || tape_.is_read(id) || tape_.is_looked_at(id);
    if (!stays) graph_.forget_graph_input(graph_input);
    split_.tape.graph_inputs.push_back(stays ? graph_input
                                             : std::exchange(graph_input, GraphInput{}));
    if (!stays) graph_input.value = id;
    split_.tape.graph_inputs.back().value = to;
  }

  // --- the rest ---

  // Finds the values of the part that the rest reads, or whose tensors are in the rest. The rest
  // needs a replacement for each of these values.
  void find_moved() {
    for (NodeId id : part_) {
      const Node& node = tape_.nodes[id];
      for (uint32_t k = 0; k < node.num_values; ++k) find_reads(node.first_value + k);
    }
    for (ValueId base : target_bases_) find_reads(base);
    for_each_graph_input_view([&](ValueId id) {
      if (tape_.values[id].tensor != nullptr && !is_made_by_part(id)) move(id);
    });
    std::sort(moved_.begin(), moved_.end());
    for (ValueId id : moved_) {
      root_[id] = is_export(id) ? id : root_.at(tape_.values[id].parent);
    }
  }

  void find_reads(ValueId base) {
    if (!tape_.is_read(base)) return;
    reads_of_.push_back(base);
    for (uint32_t use = tape_.values[base].uses; use != kNone; use = tape_.uses[use].next) {
      if (is_waiting(use)) move(tape_.operands[use]);
    }
  }

  bool is_waiting(uint32_t use) const {
    return tape_.nodes[tape_.uses[use].reader].state == NodeState::kWaiting;
  }

  // Adds the value and its parents, up to the nearest parent (or the value itself) that becomes a
  // graph input of the rest. Does nothing if no parent becomes a graph input.
  void move(ValueId id) {
    ValueId root = id;
    while (root != kNone && !is_export(root)) root = tape_.values[root].parent;
    if (root == kNone) return;
    for (;; id = tape_.values[id].parent) {
      if (!root_.emplace(id, kNone).second) return;
      moved_.push_back(id);
      if (id == root) return;
    }
  }

  // Whether the value becomes a graph input of the rest. The value must be a result of the part, or
  // a view in the part whose tensor the user holds, so that the gradient passes through this
  // tensor. If a value is blurred (is_blurred), the rest reads a parent of the value instead.
  bool is_export(ValueId id) {
    const Value& value = tape_.values[id];
    if (value.geometry->overlapping && is_blurred(id)) return false;
    if (value.is_graph_input()) return is_target_.count(id) != 0;
    return is_in_part(value) && (value.parent == kNone || value.tensor != nullptr);
  }

  // Whether a value with overlapping elements cannot become a graph input of the rest. Either some
  // view of the value has unknown elements, or a view has a tensor that does not become real with
  // the part. The elements of such a tensor must overlap exactly as its strides say.
  bool is_blurred(ValueId id) {
    const ValueId base = tape_.values[id].base;
    if (asked_.insert(base).second) {
      for (ValueId view = base; view != kNone; view = tape_.values[view].next_view) {
        mark_blurred(view);
      }
    }
    return blurred_.count(id) != 0;
  }

  void mark_blurred(ValueId view) {
    const bool stays = tape_.values[view].tensor != nullptr && !is_made_by_part(view);
    for (ValueId of = tape_.values[view].parent; of != kNone; of = tape_.values[of].parent) {
      if (!shares_memory(of)) return;
      if (stays || !tape_.knows_elements(view, of)) blurred_.insert(of);
    }
  }

  // Whether the value, or a value that it is a view of, has overlapping elements.
  bool shares_memory(ValueId id) const {
    while (id != kNone && !tape_.values[id].geometry->overlapping) id = tape_.values[id].parent;
    return id != kNone;
  }

  Value place_in_rest(ValueId id) {
    const ValueId root = root_.at(id);
    Value value = tape_.values[id];
    if (is_made_by_part(id)) value.tensor = nullptr;
    place_in_export(value, id, root);
    value.node = kNone;
    value.base = root;
    value.next_view = value.uses = kNone;
    if (id == root) {
      value.parent = kNone;
      add_export(id, value);
    }
    return value;
  }

  void place_in_export(Value& value, ValueId id, ValueId root) const {
    if (id != root && tape_.values[root].geometry->overlapping) {
      const ValueId of = tape_.counted_in(root);
      const ElementMap& map = *tape_.find_element_map(id, of);
      value.geometry = map.geometry;
      value.offset = map.offset - (of == root ? 0 : tape_.find_element_map(root, of)->offset);
    } else {
      value.offset -= tape_.values[root].offset;
    }
  }

  // Adds a graph input of the rest for a value of the part. The graph input is filled when the part
  // has been computed.
  void add_export(ValueId id, Value& value) {
    GraphInput graph_input;
    graph_input.value = id;
    // Each element has its own gradient, and therefore needs its own memory.
    graph_input.is_copy = value.geometry->overlapping;
    if (graph_input.is_copy) {
      graph_input.given = value.geometry;
      const ElementMap* map = tape_.find_element_map(id, tape_.counted_in(id));
      value.geometry = map != nullptr
                           ? map->geometry
                           : graph_.geometries_->intern_contiguous(value.geometry->sizes);
    }
    graph_input.serial = graph_.new_serial(false);
    value.index = static_cast<uint32_t>(tape_.graph_inputs.size());
    tape_.graph_inputs.push_back(std::move(graph_input));
    split_.exports.push_back({part_value_.at(id), value.index});
  }

  void put_in_rest(const std::vector<Value>& moved) {
    // The tensors that become real with the part belong to the part.
    for (ValueId id : values_) {
      if (is_made_by_part(id)) tape_.values[id].tensor = nullptr;
    }
    std::vector<std::pair<ValueId, std::vector<uint32_t>>> uses;  // the uses of each base
    for (ValueId base : reads_of_) uses.emplace_back(base, uses_of(base));
    for (ValueId base : target_bases_) take_out_of_chain(base);
    for (size_t i = 0; i < moved_.size(); ++i) {
      const ValueId id = moved_[i];
      Value& value = tape_.values[id];
      value = moved[i];
      if (value.parent == kNone) continue;
      value.index = tape_.values[value.base].index;
      value.next_view = std::exchange(tape_.values[value.base].next_view, id);
    }
    for (ValueId id : moved_) keep_element_maps(id);
    for (const auto& [base, list] : uses) {
      tape_.values[base].uses = kNone;
      for (uint32_t use : list) hang_on(use);
    }
  }

  // Returns the reads of `base` by waiting nodes, in capture order.
  std::vector<uint32_t> uses_of(ValueId base) const {
    std::vector<uint32_t> list;
    for (uint32_t use = tape_.values[base].uses; use != kNone; use = tape_.uses[use].next) {
      if (is_waiting(use)) list.push_back(use);
    }
    std::reverse(list.begin(), list.end());
    return list;
  }

  // Removes from the chain of `base` the views that now belong to another graph input.
  void take_out_of_chain(ValueId base) {
    ValueId last = base;
    for (ValueId id = tape_.values[base].next_view; id != kNone; id = tape_.values[id].next_view) {
      if (root_.count(id) != 0) continue;
      tape_.values[last].next_view = id;
      last = id;
    }
    tape_.values[last].next_view = kNone;
  }

  // Drops the entries of Tape::element_maps for `id` that refer to values that were not moved. A
  // new graph input has no entries.
  void keep_element_maps(ValueId id) {
    const auto known = tape_.element_maps.find(id);
    if (known == tape_.element_maps.end()) return;
    ElementMaps kept;
    for (const ElementMap& map : known->second) {
      const auto root = root_.find(map.of);
      if (root_.at(id) != id && root != root_.end()) kept.push_back(map);
    }
    tape_.element_maps.erase(known);
    if (!kept.empty()) tape_.element_maps.emplace(id, std::move(kept));
  }

  // Adds the read to the uses of its operand's new base.
  void hang_on(uint32_t use) {
    const ValueId operand = tape_.operands[use];
    Value& base = tape_.values[tape_.values[operand].base];
    tape_.uses[use].next = std::exchange(base.uses, use);
    const auto root = root_.find(operand);
    if (root == root_.end()) return;
    if (is_target_.count(root->second) != 0) set_apart(tape_.uses[use].reader, use, base);
  }

  // If a view of a weight has become a tensor, the view has its own gradient. Nodes that read the
  // view must not be batched with nodes that read the weight, so the reader gets another signature.
  void set_apart(NodeId reader, uint32_t use, const Value& base) {
    Node& node = tape_.nodes[reader];
    const uint32_t slot = use - node.first_operand;
    if (slot >= 64 || (node.signature->weight_slots >> slot & 1) == 0) return;
    node.signature =
        signatures_.marked_copy(*node.signature, tape_.graph_inputs[base.index].serial);
    Graph::Progress& progress = *graph_.progress_;
    if (progress.missing[reader] == 0) progress.kinds[node.signature].ready.push_back(reader);
  }

  // --- the part and the rest ---

  void copy_writes() {
    Tape& part = split_.tape;
    for (ValueId id : values_) {
      const ValueId to = part_value_.at(id);
      const bool is_gone = !tape_.values[id].is_graph_input();
      if (const auto when = tape_.written_at.find(id); when != tape_.written_at.end()) {
        const auto before = std::lower_bound(part_.begin(), part_.end(), when->second);
        part.written_at[to] = static_cast<NodeId>(before - part_.begin());
        if (is_gone) tape_.written_at.erase(when);
      }
      if (const auto known = tape_.versions.find(id); known != tape_.versions.end()) {
        part.versions[to] = known->second;
        if (is_gone) tape_.versions.erase(known);
      }
    }
  }

  void install() {
    for (NodeId id : part_) {
      Node& node = tape_.nodes[id];
      node.number = kNone;
      if (node.state != NodeState::kComputed) ++graph_.num_finished_;
      node.state = NodeState::kGone;
    }
    ++graph_.numbering_;
    graph_.num_computed_ = 0;
    graph_.progress_->has_gradients = false;
    graph_.progress_->inputs.clear();
    graph_.open_record_.reset();
  }

  Graph& graph_;
  Tape& tape_;  // tape of the whole graph; after the split, tape of the rest
  std::vector<NodeId> part_;
  SignatureTable& signatures_;
  Split split_;
  std::vector<ValueId> values_;  // the values of the part, sorted
  ska::flat_hash_map<ValueId, ValueId> part_value_;
  std::unordered_set<ValueId> is_target_;  // views of graph inputs that become real
  std::set<ValueId> target_bases_;         // the bases of these views
  std::vector<ValueId> moved_;             // values that become (views of) graph inputs of the rest
  ska::flat_hash_map<ValueId, ValueId> root_;  // for each moved value: its graph input in the rest
  std::vector<ValueId> reads_of_;              // bases of the part that the rest reads
  std::unordered_set<ValueId> asked_, blurred_;
};

Split Graph::split(at::ArrayRef<ValueId> targets, at::ArrayRef<NodeId> chosen,
                   SignatureTable& signatures) {
  std::vector<NodeId> part;
  if (open_record_ != nullptr) part = open_record_->order;
  for (NodeId id : chosen) {
    if (tape_.nodes[id].is_to_run()) part.push_back(id);
  }
  const size_t left = num_waiting() - (part.size() - num_computed_);
  if (left == 0 && !looks_at_others(targets)) return split();
  std::sort(part.begin(), part.end());
  forget_memories();
  return Splitter(*this, targets, std::move(part), signatures).run();
}

Split Graph::split() {
  Split all;
  all.tape = take();
  return all;
}

// Whether some view of a graph input has a tensor and is not one of the targets.
bool Graph::looks_at_others(at::ArrayRef<ValueId> targets) const {
  return std::any_of(tape_.values.begin(), tape_.values.end(), [&](const Value& value) {
    if (!value.is_graph_input() || value.tensor == nullptr) return false;
    return std::find(targets.begin(), targets.end(), value.tensor->value()) == targets.end();
  });
}

}  // namespace autobatch
