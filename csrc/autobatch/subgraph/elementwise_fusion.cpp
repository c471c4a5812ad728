#include "autobatch/subgraph/elementwise_fusion.h"

#include "autobatch/common/switches.h"
#include "autobatch/kernels/elementwise_device.h"

namespace autobatch {
namespace {

Switch elementwise_fusion_switch(Switch::Kind::kPass, "elementwise_fusion");

constexpr size_t kResult = 0;  // index of the result in FusedNode::run; operand i has index i + 1

// --- selecting nodes ---

// A dimension of the tensors, or several merged dimensions. Dimensions are merged into one if no
// tensor has gaps between them.
struct Dimension {
  int64_t size;
  std::array<int64_t, 3> strides;
};

// Returns the merged dimensions, innermost first.
std::vector<Dimension> merged(const Geometry& result, c10::ArrayRef<const Geometry*> all) {
  std::vector<Dimension> out;
  for (int64_t d = result.dim() - 1; d >= 0; --d) {
    Dimension next{result.sizes[d], {}};
    if (next.size == 1) continue;
    for (size_t t = 0; t < all.size(); ++t) {
      const int64_t own = d - (result.dim() - all[t]->dim());
      next.strides[t] = own < 0 || all[t]->sizes[own] == 1 ? 0 : all[t]->strides[own];
    }
    bool dense = !out.empty();
    for (size_t t = 0; t < all.size() && dense; ++t) {
      dense = next.strides[t] == out.back().strides[t] * out.back().size;
    }
    dense ? void(out.back().size *= next.size) : out.push_back(next);
  }
  return out;
}

// Sets the sizes of the node's loops. Returns false if the node needs more than two loops, or if
// the inner loop is not dense.
bool set_loops(FusedNode& node, const Geometry& result, c10::ArrayRef<const Geometry*> all) {
  const std::vector<Dimension> dimensions = merged(result, all);
  if (dimensions.size() > 2) return false;
  if (dimensions.empty()) return true;
  for (size_t t = 0; t < all.size(); ++t) {
    if (dimensions[0].strides[t] != 1) return false;
  }
  node.inner = dimensions[0].size;
  node.mid = dimensions.size() == 2 ? dimensions[1].size : 1;
  if (dimensions.size() == 2) node.run = dimensions[1].strides;
  return true;
}

bool fits(const Subgraph& subgraph, const Value& operand, const Value& result) {
  const Value& base = subgraph.tape.values[operand.base];
  const bool weight = base.is_graph_input() && subgraph.is_weight[base.index] != 0;
  if (operand.requires_grad && (weight || operand.geometry->overlapping)) return false;
  constexpr int64_t kMost = int64_t{1} << 30;  // kernels of accelerators use 32-bit indices
  return operand.dtype == result.dtype && operand.device == result.device &&
         base.geometry->extent < kMost && result.geometry->numel < kMost;
}

// --- gradients ---

// One step in the computation of an operand's gradient. The first step reads the gradient of the
// op's result. Each later step reads the result of the previous step. A step also reads at most one
// operand or result of the op.
struct GradientStep {
  enum class With : uint8_t { kNothing, kOperand, kOtherOperand, kResult };
  ElementwiseOp op;
  With with = With::kNothing;
};
using Derivative = c10::SmallVector<GradientStep, 4>;

Derivative scaled(double scale) {
  if (scale == 1) return {{{ElementwiseCode::kCopy}}};
  if (scale == -1) return {{{ElementwiseCode::kNeg}}};
  return {{{ElementwiseCode::kMulNumber, scale}}};
}

Derivative derivative(const ElementwiseOp& op, size_t slot) {
  using With = GradientStep::With;
  switch (op.code) {
    case ElementwiseCode::kNeg:
      return scaled(-1);
    case ElementwiseCode::kAddNumber:
      return scaled(op.scale);
    case ElementwiseCode::kMulNumber:
      return scaled(op.number);
    case ElementwiseCode::kDivNumber:
      return {{op}};
    case ElementwiseCode::kAdd:
      return scaled(slot == 0 ? 1 : op.scale);
    case ElementwiseCode::kMul:
      return {{{ElementwiseCode::kMul}, With::kOtherOperand}};
    case ElementwiseCode::kDiv:
      if (slot == 0) return {{{ElementwiseCode::kDiv}, With::kOtherOperand}};
      return {{{ElementwiseCode::kDiv}, With::kOperand},  // -(g / b) * (a / b)
              {{ElementwiseCode::kMul}, With::kOtherOperand},
              {{ElementwiseCode::kDiv}, With::kOperand},
              {{ElementwiseCode::kNeg}}};
    case ElementwiseCode::kCopy:
      return scaled(1);
#define FUSED_ELEMENTWISE_OP(Name, op, reads, ...)                \
  case ElementwiseCode::k##Name:                                  \
    return {{{ElementwiseCode::k##Name##Backward}, With::reads}}; \
  case ElementwiseCode::k##Name##Backward:                        \
    break;  // an op that only backward uses
#include "autobatch/kernels/elementwise_ops.inc"
  }
  TORCH_INTERNAL_ASSERT(false, "no derivative is defined for elementwise op ",
                        static_cast<int>(op.code));
}

// --- programs ---

ElementwisePlace place_in(const Region& region, int64_t row, int64_t run) {
  return {const_cast<char*>(region.address()), row, run};
}

// An elementwise program under construction, for consecutive members of a batch.
class Program {
 public:
  Program(const Tape& tape, const Store& store, MemberRange members)
      : tape_(tape), store_(store), first_(members.first) {
    program_.rows = members.count;
  }

  ElementwisePlace temporary(int64_t width, int64_t run) {
    const int64_t before = program_.temporary;
    program_.temporary += width;
    return {nullptr, width, run, before};
  }

  // Returns the place of the node's result (t == 0) or of operand t - 1.
  ElementwisePlace value(const FusedNode& part, size_t t) const {
    return value(id_of(part, t), part.run[t]);
  }
  // Returns the place of the part of a value that starts at element `first`.
  ElementwisePlace value(ValueId id, int64_t run, int64_t first = 0) const {
    const int64_t step = store_.steps[tape_.values[id].base];
    Region region = store_.region(tape_, id);
    region.offset += first_ * step + first;
    return place_in(region, step, run);
  }

  ValueId id_of(const FusedNode& part, size_t t) const {
    const Node& node = tape_.nodes[part.node];
    return t == kResult ? node.first_value : tape_.operands[node.first_operand + t - 1];
  }

  void add(const ElementwiseOp& op, const FusedNode& loops, const ElementwisePlace& out,
           const ElementwisePlace& a, const ElementwisePlace& b) {
    steps_.push_back({op, loops.mid, loops.inner, out, a, b});
    program_.width += loops.mid * loops.inner;
  }

  // `like`: any value of the program. All values of a program have the same dtype and device.
  void run(const Value& like) {
    if (steps_.empty()) return;
    program_.steps = steps_;
    program_.dtype = like.dtype;
    run_elementwise(program_, like.device);
  }

 private:
  const Tape& tape_;
  const Store& store_;
  int64_t first_;
  ElementwiseProgram program_;
  std::vector<ElementwiseStep> steps_;
};

const Value& first_result(const Tape& tape, const SubgraphStep& step) {
  return tape.values[tape.nodes[step.fused[0].node].first_value];
}

class Forward {
 public:
  Forward(const Subgraph& subgraph, const FlushRecord& record, int64_t count)
      : subgraph_(subgraph),
        tape_(record.tape),
        program_(record.tape, record.store, {0, count}),
        passing_(record.tape.values.size()) {}

  void run(const SubgraphStep& step) {
    for (const FusedAddend& addend : step.addends) add(addend);
    for (const FusedNode& part : step.fused) {
      const size_t operands = tape_.nodes[part.node].num_operands;
      const ElementwisePlace a = place(part, 1), b = operands == 2 ? place(part, 2) : a;
      const ElementwisePlace out = place(part, kResult);
      program_.add(part.op, part, out, a, b);
    }
    program_.run(first_result(tape_, step));
  }

 private:
  void add(const FusedAddend& addend) {
    const auto& [slot, first, width, row] = addend.where;
    FusedNode loops;
    loops.mid = tape_.values[addend.product].geometry->numel / row;
    loops.inner = width;
    const ElementwisePlace to = program_.value(addend.product, row, first);
    program_.add({ElementwiseCode::kAdd}, loops, to, to, program_.value(addend.addend, 0));
  }

  ElementwisePlace place(const FusedNode& part, size_t t) {
    const ValueId id = program_.id_of(part, t);
    const Value& value = tape_.values[id];
    const Value& base = tape_.values[value.base];
    if (base.is_graph_input() || !subgraph_.passing[subgraph_.store.places[value.base].slab]) {
      return program_.value(part, t);
    }
    std::optional<ElementwisePlace>& known = passing_[value.base];
    if (!known) known = program_.temporary(base.geometry->extent, 0);
    ElementwisePlace out = *known;
    out.offset += value.offset;
    out.mid = part.run[t];
    return out;
  }

  const Subgraph& subgraph_;
  const Tape& tape_;
  Program program_;
  std::vector<std::optional<ElementwisePlace>> passing_;  // indexed by base
};

class Backward {
 public:
  Backward(FlushRecord& record, GradAccumulator& accumulator, MemberRange members)
      : record_(record),
        tape_(record.tape),
        accumulator_(accumulator),
        program_(record.tape, record.store, members),
        kinds_(record.tape.values.size(), Kind::kElsewhere),
        passing_(record.tape.values.size()) {}

  void run(const SubgraphStep& step) {
    find_kinds(step);
    for (auto part = step.fused.rbegin(); part != step.fused.rend(); ++part) {
      if (record_.batches[part->node].needs_grad) differentiate(*part);
    }
    program_.run(first_result(tape_, step));
    step.each_node([&](NodeId n) { accumulator_.gradient_of_base(result_of(n)) = at::Tensor(); });
  }

 private:
  // Where a value's gradient is stored. kElsewhere: the value is not a result of the step. kBuffer:
  // the gradient has a buffer. kPassing: the gradient exists only inside the elementwise program.
  enum class Kind : uint8_t { kElsewhere, kBuffer, kPassing };

  // Chooses kPassing for the gradient of a result if two conditions hold: no part of the gradient
  // has arrived yet, and the program reads the result only as a whole.
  void find_kinds(const SubgraphStep& step) {
    step.each_node([&](NodeId n) {
      const bool came = accumulator_.gradient_of_base(result_of(n)).defined();
      kinds_[result_of(n)] = came ? Kind::kBuffer : Kind::kPassing;
    });
    for (const FusedNode& part : step.fused) {
      for (const ValueId id : tape_.operands_of(tape_.nodes[part.node])) {
        const ValueId base = tape_.values[id].base;
        if (kinds_[base] != Kind::kPassing) continue;
        if (id != base || is_spread(part, id)) kinds_[base] = Kind::kBuffer;
      }
    }
  }

  void differentiate(const FusedNode& part) {
    const std::optional<ElementwisePlace> gradient = gradient_of(part);
    if (!gradient) return;
    const size_t operands = tape_.nodes[part.node].num_operands;
    for (size_t slot = 0; slot < operands; ++slot) {
      const ValueId id = program_.id_of(part, slot + 1);
      if (!accumulator_.wanted(id)) continue;
      const Derivative steps = derivative(part.op, slot);
      ElementwisePlace so_far = *gradient;
      for (size_t i = 0; i + 1 < steps.size(); ++i) {
        const GradientStep& step = steps[i];
        const ElementwisePlace out = program_.temporary(part.mid * part.inner, part.run[kResult]);
        program_.add(step.op, part, out, so_far, read_with(step, part, slot, so_far));
        so_far = out;
      }
      const GradientStep& last = steps.back();
      const ElementwisePlace with = read_with(last, part, slot, so_far);
      if (kinds_[tape_.values[id].base] == Kind::kPassing) {
        add_passing(part, id, last.op, so_far, with);
      } else if (!passes_buffer_on(part, id, last.op)) {
        add_to_buffer(part, slot, last.op, so_far, with);
      }
    }
  }

  // Returns the place of the second value that the step reads. The first value that the step reads
  // is `so_far`.
  ElementwisePlace read_with(const GradientStep& step, const FusedNode& part, size_t slot,
                             const ElementwisePlace& so_far) const {
    switch (step.with) {
      case GradientStep::With::kNothing:
        return so_far;
      case GradientStep::With::kOperand:
        return program_.value(part, slot + 1);
      case GradientStep::With::kOtherOperand:
        return program_.value(part, 2 - slot);
      case GradientStep::With::kResult:
        return program_.value(part, kResult);
    }
    TORCH_INTERNAL_ASSERT(false, "not reached");
  }

  // Returns the place of the gradient of the node's result. The gradient must be complete. Returns
  // nothing if no gradient has arrived.
  std::optional<ElementwisePlace> gradient_of(const FusedNode& part) {
    const ValueId id = result_of(part.node);
    if (kinds_[id] == Kind::kPassing) {
      if (passing_[id]) passing_[id]->mid = part.run[kResult];
      return passing_[id];
    }
    const at::Tensor& buffer = accumulator_.gradient_of_base(id);
    if (!buffer.defined()) return {};
    accumulator_.fill_rest(id);
    const Geometry* geometry = tape_.values[id].geometry;
    return place_in({&buffer, 0, geometry}, geometry->extent, part.run[kResult]);
  }

  void add_passing(const FusedNode& part, ValueId id, const ElementwiseOp& op,
                   const ElementwisePlace& gradient, const ElementwisePlace& with) {
    std::optional<ElementwisePlace>& known = passing_[id];
    if (!known && op.code == ElementwiseCode::kCopy) {
      known = gradient;
      return;
    }
    const ElementwisePlace out = program_.temporary(part.mid * part.inner, part.run[kResult]);
    program_.add(op, part, out, gradient, with);
    if (known) {
      known->mid = part.run[kResult];
      program_.add({ElementwiseCode::kAdd}, part, out, *known, out);
    }
    known = out;
  }

  // Lets the operand's gradient share the buffer of the result's gradient, if possible. The op must
  // pass the gradient on unchanged, and no other gradient may be added to the operand's gradient.
  // Returns whether the buffer is shared.
  bool passes_buffer_on(const FusedNode& part, ValueId id, const ElementwiseOp& op) {
    const ValueId result = result_of(part.node);
    if (op.code != ElementwiseCode::kCopy || kinds_[result] != Kind::kBuffer) return false;
    if (is_spread(part, id) || !accumulator_.is_alone(id)) return false;
    at::Tensor* buffer = accumulator_.untouched(id);
    if (buffer == nullptr) return false;
    *buffer = accumulator_.gradient_of_base(result);
    return true;
  }

  void add_to_buffer(const FusedNode& part, size_t slot, const ElementwiseOp& op,
                     const ElementwisePlace& gradient, const ElementwisePlace& with) {
    const ValueId id = program_.id_of(part, slot + 1);
    const int64_t run = part.run[slot + 1];
    if (!is_spread(part, id)) {
      const Region first = accumulator_.fresh(id);
      if (first.buffer != nullptr) {
        program_.add(op, part, place_in(first, accumulator_.step(id), run), gradient, with);
        return;
      }
    }
    const ElementwisePlace to = place_in(accumulator_.target(id), accumulator_.step(id), run);
    ElementwisePlace own = gradient;
    if (op.code != ElementwiseCode::kCopy) {
      own = program_.temporary(part.mid * part.inner, part.run[kResult]);
      program_.add(op, part, own, gradient, with);
    }
    program_.add({ElementwiseCode::kAdd}, part, to, to, own);
  }

  // Whether the operand is broadcast.
  bool is_spread(const FusedNode& part, ValueId id) const {
    return tape_.values[id].geometry->numel != part.mid * part.inner;
  }

  ValueId result_of(NodeId n) const { return tape_.nodes[n].first_value; }

  FlushRecord& record_;
  const Tape& tape_;
  GradAccumulator& accumulator_;
  Program program_;
  std::vector<Kind> kinds_;                               // indexed by base
  std::vector<std::optional<ElementwisePlace>> passing_;  // for each base: the gradient so far
};

}  // namespace

std::optional<FusedNode> as_fused_node(const Subgraph& subgraph, NodeId n) {
  if (!elementwise_fusion_switch.is_on()) return {};
  const Tape& tape = subgraph.tape;
  const Node& node = tape.nodes[n];
  const std::optional<ElementwiseOp> op = node.signature->rule->elementwise(*node.signature);
  const Value& result = tape.values[node.first_value];
  if (!op || node.num_values != 1 || !result.geometry->contiguous || result.geometry->numel == 0) {
    return {};
  }
  if (!has_elementwise_kernel(result.device, result.dtype)) return {};
  std::vector<const Geometry*> all{result.geometry};
  for (const ValueId id : tape.operands_of(node)) {
    if (id == kNone || !fits(subgraph, tape.values[id], result)) return {};
    all.push_back(tape.values[id].geometry);
  }
  FusedNode out{n, *op};
  if (!set_loops(out, *result.geometry, all)) return {};
  elementwise_fusion_switch.add_uses(1);
  return out;
}

void run_fused(const Subgraph& subgraph, const SubgraphStep& step, const FlushRecord& record,
               int64_t count) {
  Forward(subgraph, record, count).run(step);
}

void run_fused_backward(const SubgraphStep& step, FlushRecord& record, GradAccumulator& accumulator,
                        MemberRange members) {
  Backward(record, accumulator, members).run(step);
}

std::string name_of_fused(const Tape& tape, const SubgraphStep& step, int64_t count) {
  std::string out = "torch_autobatch::elementwise(";
  for (const FusedNode& part : step.fused) {
    if (&part != step.fused.data()) out += ", ";
    out += tape.nodes[part.node].signature->op->name;
  }
  return out + ") x " + std::to_string(count);
}

}  // namespace autobatch
