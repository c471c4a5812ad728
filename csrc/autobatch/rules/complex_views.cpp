// view_as_complex(), view_as_real() and conj() each run three ops. The first op makes a view of the
// argument's memory, [n]. The second op copies this memory. The third op makes a view of the copy
// with the sizes and strides of eager's result. shared_memory.h describes how the copy and the
// argument share memory after the flush.
#include "autobatch/rules/complex_views.h"

#include "autobatch/common/overlap.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/rules/decompositions.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = Decomposition::Arguments;

// Base class of the rules that copy a dense tensor [n].
class ReinterpretingRule : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (!row_major(x) || x.geometry->dim() != 1) return false;
    add_result(builder, x);
    builder.key(dtype_word(x));
    return true;
  }

  void forward(Batch& batch) const override { copy(batch.flat(0), batch.output(0)); }
  void backward(BackwardBatch& batch) const override { batch.add(0, gradient(batch.grad_flat(0))); }

 private:
  virtual void add_result(NodeBuilder& builder, const Value& x) const = 0;
  virtual void copy(const Tensor& from, const Tensor& to) const = 0;
  virtual Tensor gradient(const Tensor& g) const = 0;
};

// The rule of as_complex(x [2m]) -> [m].
class AsComplexRule final : public ReinterpretingRule {
  void add_result(NodeBuilder& builder, const Value& x) const override {
    builder.result({x.geometry->numel / 2}, c10::toComplexType(x.dtype));
  }
  void copy(const Tensor& from, const Tensor& to) const override {
    at::view_as_real(to).view({-1}).copy_(from);
  }
  Tensor gradient(const Tensor& g) const override { return at::view_as_real(g).view({-1}); }
};

// The rule of as_real(x [m]) -> [2m].
class AsRealRule final : public ReinterpretingRule {
  void add_result(NodeBuilder& builder, const Value& x) const override {
    builder.result({2 * x.geometry->numel}, c10::toRealValueType(x.dtype));
  }
  void copy(const Tensor& from, const Tensor& to) const override {
    to.view({-1, 2}).copy_(at::view_as_real(from));
  }
  Tensor gradient(const Tensor& g) const override { return at::view_as_complex(g.view({-1, 2})); }
};

// The rule of conjugate(x [n]) -> [n].
class ConjugateRule final : public ReinterpretingRule {
  void add_result(NodeBuilder& builder, const Value& x) const override {
    builder.result({x.geometry->numel}, x.dtype);
  }
  void copy(const Tensor& from, const Tensor& to) const override { to.copy_(from.conj()); }
  Tensor gradient(const Tensor& g) const override { return at::conj_physical(g); }
};

// Returns a view of the memory of x that begins at the first element of x.
Tensor view_memory(const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (x.is_contiguous() && strides == c10::contiguous_strides(sizes)) return x.view(sizes);
  using View = Tensor(const Tensor&, at::IntArrayRef, at::IntArrayRef);
  return find_op("autobatch::memory_view", "").handle.typed<View>().call(x, sizes, strides);
}

// Copies the memory of x with this op, and returns a view of the copy.
Tensor copied(const char* op, const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t last = 0;
  for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
  const Tensor memory = view_memory(x, {last + 1}, {1});
  const Tensor copy = find_op(op, "").handle.typed<Tensor(const Tensor&)>().call(memory);
  return view_memory(copy, sizes, strides);
}

// Whether x is pending and its memory can be copied. The memory can be copied if no write to x is
// pending and the elements of x do not share memory.
bool covers_memory(const c10::IValue& argument) {
  if (!is_strided(argument)) return false;
  const Tensor& x = argument.toTensor();
  const PendingTensor* pending = as_pending(x);
  if (pending == nullptr || !pending->is_pending() || x.numel() == 0) return false;
  if (overlaps(x.sizes(), x.strides())) return false;
  const Graph& graph = *pending->graph();
  const Value& value = graph.value(pending->value());
  const Value& base = graph.value(value.base);
  // Views of a tensor that was detached from a graph input are not captured, because the detached
  // tensor must be created before its views.
  if (base.is_graph_input() &&
      (graph.tape().graph_inputs[base.index].is_copy || value.kind >= ViewKind::kDetached)) {
    return false;
  }
  return !graph.is_written(pending->value()) &&
         (at::GradMode::is_enabled() || !x.requires_grad()) && !x.is_conj() && !x.is_neg() &&
         x.is_inference() == c10::InferenceMode::is_enabled();
}

// --- view_as_complex(x [.., 2]) -> [..] ---

bool covers_pairs(Arguments arguments) {
  if (!covers_memory(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kDouble) return false;
  if (x.dim() == 0 || x.size(-1) != 2 || x.stride(-1) != 1 || x.storage_offset() % 2 != 0) {
    return false;
  }
  const auto strides = x.strides().slice(0, static_cast<size_t>(x.dim()) - 1);
  return std::ranges::all_of(strides, [](int64_t stride) { return stride % 2 == 0; });
}

Tensor complex_view(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  at::DimVector sizes(x.sizes()), strides(x.strides());
  sizes.pop_back();
  strides.pop_back();
  for (int64_t& stride : strides) stride /= 2;
  return copied("autobatch::as_complex", x, sizes, strides);
}

// --- view_as_real(x [..]) -> [.., 2] ---

bool covers_complex_tensor(Arguments arguments) {
  if (!covers_memory(arguments[0])) return false;
  const auto dtype = arguments[0].toTensor().scalar_type();
  return dtype == at::kComplexFloat || dtype == at::kComplexDouble;
}

Tensor real_view(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  at::DimVector sizes(x.sizes()), strides(x.strides());
  for (int64_t& stride : strides) stride *= 2;
  sizes.push_back(2);
  strides.push_back(1);
  return copied("autobatch::as_real", x, sizes, strides);
}

// --- _conj(x) and resolve_conj(x) ---

Tensor conjugate_view(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  return copied("autobatch::conjugate", x, x.sizes(), x.strides());
}

bool covers_resolve(Arguments arguments) { return is_conjugated(arguments[0].toTensor()); }

Tensor resolved(Arguments arguments) { return arguments[0].toTensor().clone(); }

constexpr DecompositionEntry kEntries[] = {
    {"aten::view_as_complex", one<covers_pairs, complex_view>},
    {"aten::view_as_real", one<covers_complex_tensor, real_view>},
    {"aten::_conj", one<covers_complex_tensor, conjugate_view>},
    {"aten::resolve_conj", one<covers_resolve, resolved>},
};

}  // namespace

Tensor as_complex(const Tensor& x) { return at::view_as_complex(x.view({-1, 2})); }
Tensor as_real(const Tensor& x) { return at::view_as_real(x).view({-1}); }
Tensor conjugate(const Tensor& x) { return at::_conj(x); }

Tensor memory_view(const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return x.as_strided(sizes, strides, x.storage_offset());
}

DecompositionTable complex_decompositions() { return kEntries; }
RuleTable complex_rules() {
  return {{"autobatch::as_complex", new AsComplexRule()},
          {"autobatch::as_real", new AsRealRule()},
          {"autobatch::conjugate", new ConjugateRule()}};
}

}  // namespace autobatch
