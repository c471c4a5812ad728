// Builds the subgraph of a cell's template.
#include "autobatch/cells/cell_template.h"
#include "autobatch/plan/fuse_shared_input_linear.h"
#include "autobatch/scope/scope.h"
#include "autobatch/subgraph/compiled_subgraph.h"
#include "autobatch/subgraph/subgraph.h"

#include <algorithm>
#include <unordered_map>

namespace autobatch {
// Builds the compact form of a template. All ops in a part must have native rules and the same
// dispatch context, and no op may be random. The results of the ops must have no gaps in memory.
class SubgraphBuilder {
 public:
  SubgraphBuilder(Scope& scope, const CellTemplate& cell, at::ArrayRef<at::Tensor> inputs,
                  CellFunction& function)
      : scope_(scope), cell_(cell), inputs_(inputs), compiles_(function.compiles()) {
    compact_.waits = function.waits(inputs.size());
  }
  // Builds the subgraph of the steps that run before the subgraph of `of`. `results`: the tensors
  // that must be results of these steps.
  explicit SubgraphBuilder(const SubgraphBuilder& of, at::ArrayRef<uint32_t> results)
      : scope_(of.scope_),
        cell_(of.cell_),
        inputs_(of.inputs_),
        maker_(of.maker_),
        live_(of.before_),
        before_(of.before_.size(), 0) {
    for (const uint32_t number : results) is_result_[number] = 1;
  }

  std::optional<CellTemplate::Compact> run() {
    find_live();
    if (returns_read_view()) return {};
    find_before();
    if (!build()) return {};
    compact_.main = std::move(part_);
    join_before();
    return std::move(compact_);
  }

 private:
  using Step = CellTemplate::Step;

  // Builds `part_` from the live steps, without the steps that run before the subgraph. Returns
  // false if the steps cannot run as one node.
  bool build() {
    for (const Step& step : cell_.steps_) {
      if (!live_[number_of(step)] || before_[number_of(step)]) continue;
      if (!(step.cached.signature != nullptr ? add_node(step) : add_views(step))) return false;
    }
    if (part_.ops < 2 || subgraph_.results.empty()) return false;
    if (subgraph_.results.size() > kMostResults) return false;
    if (subgraph_.tape.graph_inputs.size() > kMostOperands) return false;
    part_.cached.signature = intern();
    for (uint32_t i = 0; i < part_.operands.size(); ++i) note_operand(i);
    part_.cached.visible = part_.cached.results.size();
    return true;
  }

  void note_operand(uint32_t i) {
    part_.cached.operands.push_back(i);
    const uint64_t bit = uint64_t{1} << i;
    if (part_.operands[i] < CellTemplate::kFirstWeight) part_.of_call |= bit;
    for (uint32_t k = 0; k < part_.cached.results.size(); ++k) {
      const bool needs_grad = part_.cached.results[k].requires_grad;
      if (needs_grad && part_.cached.signature->own_rule->depends(k, i)) part_.asks |= bit;
    }
  }

  // Builds `front` from the steps before the subgraph, if possible. The results of `front` are
  // operands of `main`, or results of the call.
  void join_before() {
    std::vector<uint32_t> results;
    for (const uint32_t number : compact_.main.operands) {
      if (maker_.count(number) != 0) results.push_back(number);
    }
    for (const auto& [number, is_result] : is_result_) {
      if (before_[maker_.at(number)] != 0) results.push_back(number);
    }
    SubgraphBuilder front(*this, results);
    if (!front.build()) return;
    compact_.front = std::move(front.part_);
    compact_.before.clear();
  }

  size_t number_of(const Step& step) const {
    return static_cast<size_t>(&step - cell_.steps_.data());
  }

  bool is_heavy(const Step& step) const {
    return step.cached.signature != nullptr && step.cached.signature->rule->heavy();
  }

  // If some inputs are results of other cells, marks the matrix products that depend only on the
  // other inputs, and the steps that compute the operands of these products. In a recurrent
  // network, one product then covers the inputs of all time steps, as in code written by hand. Only
  // the products of the states have to wait for other cells.
  void find_before() {
    before_.assign(cell_.steps_.size(), 0);
    const uint64_t waiting = *compact_.waits;
    if (waiting == 0) return;
    // For each tensor number: bit mask of the inputs that the tensor depends on.
    std::unordered_map<uint32_t, uint64_t> needs;
    for (uint32_t i = 0; i < std::min<size_t>(inputs_.size(), 64); ++i) needs[i] = uint64_t{1} << i;
    for (const Step& step : cell_.steps_) {
      uint64_t inputs = 0;
      for (const uint32_t tensor : step.tensors) inputs |= needs[tensor];
      for (uint32_t k = 0; k < step.num_results(); ++k) needs[step.first_result + k] = inputs;
      const bool waits = (inputs & waiting) != 0;
      if (live_[number_of(step)] && !waits && is_heavy(step)) before_[number_of(step)] = 1;
    }
    for (size_t s = cell_.steps_.size(); s-- > 0;) {  // marks the steps that compute operands
      if (!before_[s]) continue;
      for (const uint32_t tensor : cell_.steps_[s].tensors) {
        const auto made = maker_.find(tensor);
        if (made != maker_.end()) before_[made->second] = 1;
      }
    }
    for (uint32_t s = 0; s < before_.size(); ++s) {
      if (before_[s] != 0) compact_.before.push_back(s);
    }
  }

  // Whether an output is a view that an op of the cell also reads. In eager mode, both the op and
  // the user of the output contribute to the gradient of this view. A subgraph would read a
  // separate view, which has a separate gradient.
  bool returns_read_view() const {
    return std::any_of(cell_.outputs_.begin(), cell_.outputs_.end(), [&](uint32_t number) {
      const auto made = maker_.find(number);
      return made != maker_.end() && live_[made->second] != 0 &&
             cell_.steps_[made->second].cached.signature == nullptr;
    });
  }

  // Marks the steps whose results the outputs need. Outputs that are views stay outside the
  // subgraph. The bases of these views become results of the subgraph.
  void find_live() {
    auto& maker = maker_;
    for (size_t s = 0; s < cell_.steps_.size(); ++s) {
      const Step& step = cell_.steps_[s];
      for (uint32_t k = 0; k < step.num_results(); ++k) maker[step.first_result + k] = s;
    }
    const auto is_made = [&](uint32_t number) {
      return number < CellTemplate::kFirstWeight && maker.count(number) != 0;
    };
    live_.assign(cell_.steps_.size(), 0);
    std::vector<uint8_t> is_outer(cell_.steps_.size(), 0);
    std::vector<uint32_t> needed;
    for (uint32_t number : cell_.outputs_) {
      while (is_made(number) && cell_.steps_[maker[number]].cached.signature == nullptr) {
        is_outer[maker[number]] = 1;
        number = cell_.steps_[maker[number]].tensors[0];
      }
      if (!is_made(number)) continue;
      is_result_[number] = 1;
      needed.push_back(number);
    }
    for (uint32_t s = 0; s < is_outer.size(); ++s) {
      if (is_outer[s] != 0) compact_.views.push_back(s);
    }
    while (!needed.empty()) {
      const uint32_t number = needed.back();
      needed.pop_back();
      if (!is_made(number) || std::exchange(live_[maker[number]], 1) != 0) continue;
      for (const uint32_t tensor : cell_.steps_[maker[number]].tensors) needed.push_back(tensor);
    }
  }

  // Returns the value of the cell's tensor `number`. If the tensor has no value yet, the tensor
  // becomes an operand of the subgraph. Returns kNone if the tensor cannot be an operand of a
  // subgraph.
  ValueId value_of(uint32_t number) {
    const auto found = values_.find(number);
    if (found != values_.end()) return found->second;
    if (const auto made = maker_.find(number); made != maker_.end()) {
      return value_from_before(cell_.steps_[made->second], number);
    }
    const bool outer = number >= CellTemplate::kFirstWeight;
    const uint32_t w = number - CellTemplate::kFirstWeight;
    const bool weight = outer ? cell_.weights_[w].is_weight : cell_.input_is_weight_[number] != 0;
    const at::Tensor& tensor = outer ? cell_.weights_[w].tensor : inputs_[number];
    GeometryTable& geometries = scope_.graph().geometries();
    const Geometry* geometry = geometries.intern(tensor.sizes(), tensor.strides());
    if (geometry->overlapping && (weight || !geometry->canonical->contiguous)) return kNone;
    if (!weight) {  // inputs with gaps are gathered into memory without gaps
      if (!geometry->canonical->contiguous) return kNone;
      if (!geometry->contiguous) has_gaps_[number] = 1;
      geometry = geometries.intern_contiguous(tensor.sizes());
    }
    return add_operand(number, weight,
                       {geometry, tensor.scalar_type(), tensor.device(), tensor.requires_grad()});
  }

  // Returns the value of a tensor that a step before the subgraph computes. The tensor becomes an
  // operand of the subgraph. If the tensor is a view, the subgraph makes the view itself.
  ValueId value_from_before(const Step& step, uint32_t number) {
    if (step.cached.signature == nullptr) return add_views(step) ? values_[number] : kNone;
    const ResultMeta& result = step.cached.results[number - step.first_result];
    if (!result.geometry->contiguous) return kNone;
    return add_operand(number, false, result);
  }

  ValueId add_operand(uint32_t number, bool weight, const ResultMeta& meta) {
    GraphInput graph_input;
    graph_input.is_weight = weight;
    Value value;
    value.index = static_cast<uint32_t>(subgraph_.tape.graph_inputs.size());
    value.geometry = meta.geometry;
    value.dtype = meta.dtype;
    value.device = meta.device;
    value.requires_grad = meta.requires_grad;
    graph_input.value = append(value);
    subgraph_.tape.graph_inputs.push_back(std::move(graph_input));
    subgraph_.is_weight.push_back(weight ? 1 : 0);
    part_.operands.push_back(number);
    return values_[number] = subgraph_.tape.graph_inputs.back().value;
  }

  ValueId append(Value value) {
    const auto id = static_cast<ValueId>(subgraph_.tape.values.size());
    if (value.parent == kNone) value.base = id;
    subgraph_.tape.values.push_back(value);
    return id;
  }

  bool add_views(const Step& step) {
    const ValueId parent = value_of(step.tensors[0]);
    if (parent == kNone || has_gaps_.count(step.tensors[0]) != 0) return false;
    for (size_t k = 0; k < step.cached.views.size(); ++k) {
      Value value = subgraph_.tape.values[parent];
      value.parent = parent;
      value.geometry = step.cached.views[k].geometry;
      value.offset += step.cached.views[k].offset;
      value.requires_grad = value.requires_grad && !step.op->cuts_gradient && step.grad_mode;
      if (step.op->cuts_gradient) value.kind = ViewKind::kDetached;
      values_[step.first_result + static_cast<uint32_t>(k)] = append(value);
    }
    return true;
  }

  bool add_node(const Step& step) {
    const Signature& signature = *step.cached.signature;
    const Rule& rule = *signature.rule;
    if (rule.report_name() != "native" || !rule.batchable() || signature.op->random) return false;
    if (context_ == nullptr) context_ = &signature.context;
    if (signature.context.word() != context_->word()) return false;
    c10::SmallVector<ValueId, 8> operands;
    for (const uint32_t i : step.cached.operands) {
      operands.push_back(i == kNone ? kNone : value_of(step.tensors[i]));
      if (i != kNone && operands.back() == kNone) return false;
    }
    Node node;
    node.signature = step.cached.signature;
    node.first_operand = static_cast<uint32_t>(subgraph_.tape.operands.size());
    node.num_operands = static_cast<uint32_t>(operands.size());
    node.first_value = static_cast<ValueId>(subgraph_.tape.values.size());
    node.num_values = static_cast<uint32_t>(step.cached.results.size());
    subgraph_.tape.operands.insert(subgraph_.tape.operands.end(), operands.begin(), operands.end());
    const auto id = static_cast<NodeId>(subgraph_.tape.nodes.size());
    for (uint32_t k = 0; k < node.num_values; ++k) {
      if (!add_result(step, id, k)) return false;
    }
    subgraph_.tape.nodes.push_back(node);
    ++part_.ops;
    return true;
  }

  bool add_result(const Step& step, NodeId node, uint32_t k) {
    const ResultMeta& result = step.cached.results[k];
    if (!result.geometry->contiguous || result.geometry->extent != result.geometry->numel) {
      return false;
    }
    Value value;
    value.node = node;
    value.index = k;
    value.geometry = result.geometry;
    value.dtype = result.dtype;
    value.device = result.device;
    value.requires_grad = result.requires_grad;
    const ValueId id = append(value);
    if (k >= step.cached.visible) return true;
    const uint32_t number = step.first_result + k;
    values_[number] = id;
    if (is_result_.count(number) == 0) return true;
    subgraph_.results.push_back(id);
    part_.results.push_back(number);
    part_.cached.results.push_back(result);
    return true;
  }

  // Returns the signature of the subgraph. Templates with the same content share one signature,
  // even across blocks.
  Signature* intern() {
    static const OpInfo& op = find_op("autobatch::cell", "");
    const Tape& tape = subgraph_.tape;
    Key key;
    key.push_back(reinterpret_cast<uint64_t>(&op));
    key.push_back(context_->word());
    key.push_back(compiles_ ? 1 : 0);
    for (const Value& value : tape.values) {
      key.push_back(uint64_t{value.node} << 32 | value.index);
      key.push_back(uint64_t{value.base} << 32 | value.parent);
      key.push_back(reinterpret_cast<uint64_t>(value.geometry));
      key.push_back(static_cast<uint64_t>(value.offset));
      key.push_back(static_cast<uint64_t>(value.dtype) << 32 |
                    static_cast<uint64_t>(value.device.type()) << 16 |
                    static_cast<uint64_t>(static_cast<uint8_t>(value.device.index())) << 8 |
                    static_cast<uint64_t>(value.requires_grad));
    }
    for (const uint8_t weight : subgraph_.is_weight) key.push_back(weight);
    for (size_t w = 0; w < subgraph_.is_weight.size(); ++w) {
      if (subgraph_.is_weight[w] != 0) key.push_back(identity_of(part_.operands[w]));
    }
    for (const Node& node : tape.nodes) {
      key.push_back(reinterpret_cast<uint64_t>(node.signature));
      key.push_back(node.num_operands);
      for (const ValueId id : tape.operands_of(node)) key.push_back(id);
    }
    for (const ValueId id : subgraph_.results) key.push_back(id);
    SignatureTable& table = scope_.tables().signatures;
    Signature* signature = table.find(key);
    if (signature != nullptr) return signature;
    signature = table.add(key);
    signature->op = &op;
    signature->context = *context_;
    signature->note = std::to_string(tape.nodes.size()) + " ops as one";
    for (size_t w = 0; w < subgraph_.is_weight.size(); ++w) {
      signature->weight_slots |= uint64_t{subgraph_.is_weight[w]} << w;
    }
    const bool compiled = compiles_ && !context_->autocast();
    if (!compiled) fuse_shared_input_linear(subgraph_, scope_.graph().geometries());
    signature->own_rule = compiled ? make_compiled_subgraph_rule(std::move(subgraph_))
                                   : make_subgraph_rule(std::move(subgraph_));
    signature->rule = signature->own_rule.get();
    return signature;
  }

  // Returns the identity of a weight. All members of a batch have the same weight.
  uint64_t identity_of(uint32_t number) const {
    if (number >= CellTemplate::kFirstWeight) {
      return cell_.weights_[number - CellTemplate::kFirstWeight].identity;
    }
    const Graph& graph = scope_.graph();
    return graph.identity(graph.value(graph.find_graph_input(inputs_[number])));
  }

  Scope& scope_;
  const CellTemplate& cell_;
  at::ArrayRef<at::Tensor> inputs_;
  bool compiles_ = false;
  Subgraph subgraph_;
  CellTemplate::Part part_;
  CellTemplate::Compact compact_;
  const DispatchContext* context_ = nullptr;
  std::unordered_map<uint32_t, size_t> maker_;  // for each tensor number: the step that computes it
  std::vector<uint8_t> live_, before_;          // indexed by step
  std::unordered_map<uint32_t, uint8_t> is_result_;  // 1 for each tensor number of a result
  std::unordered_map<uint32_t, uint8_t> has_gaps_;   // 1 for each input with gaps
  std::unordered_map<uint32_t, ValueId> values_;     // for each tensor number: its value
};

void CellTemplate::make_compact(Scope& scope, CellFunction& function,
                                at::ArrayRef<at::Tensor> inputs) {
  compact_ = SubgraphBuilder(scope, *this, inputs, function).run();
}

}  // namespace autobatch
