#include "autobatch/capture/deferred_writes.h"

#include "autobatch/capture/arguments.h"
#include "autobatch/capture/history_requests.h"
#include "autobatch/capture/record_call.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/rules/factories.h"
#include "autobatch/rules/rule.h"
#include "autobatch/scope/scope.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace autobatch {
namespace {

using Arguments = at::ArrayRef<c10::IValue>;

// --- regions of one memory ---

struct Span {
  const Geometry* geometry;
  int64_t offset;
};

bool same(const Span& a, const Span& b) { return a.geometry == b.geometry && a.offset == b.offset; }

// Whether `distance` is a sum of k * stride over the dimensions (in order of decreasing strides),
// with -below <= k <= above for each k. If so, two regions at this distance share an element.
struct Step {
  int64_t stride, below, above;
};
bool reaches(int64_t distance, at::ArrayRef<Step> steps) {
  if (steps.empty()) return distance == 0;
  const Step& step = steps.front();
  // The inner dimensions can compensate for at most about one stride in either direction.
  for (int64_t k = distance / step.stride - 1; k <= distance / step.stride + 1; ++k) {
    if (k < -step.below || k > step.above) continue;
    if (reaches(distance - k * step.stride, steps.slice(1))) return true;
  }
  return false;
}

// Whether the two regions may share an element. The result is exact for regions with the same
// strides, such as two columns.
bool may_overlap(const Span& a, const Span& b) {
  if (a.geometry->numel == 0 || b.geometry->numel == 0) return false;
  if (a.offset + a.geometry->extent <= b.offset || b.offset + b.geometry->extent <= a.offset) {
    return false;
  }
  const auto& strides = a.geometry->strides;
  if (strides != b.geometry->strides || a.geometry->overlapping || b.geometry->overlapping) {
    return true;
  }
  c10::SmallVector<Step, 6> steps;
  for (size_t d = 0; d < strides.size(); ++d) {
    const int64_t above = a.geometry->sizes[d] - 1;
    const int64_t below = b.geometry->sizes[d] - 1;
    if (above > 0 || below > 0) steps.push_back({strides[d], below, above});
  }
  std::sort(steps.begin(), steps.end(),
            [](const Step& x, const Step& y) { return x.stride > y.stride; });
  return reaches(b.offset - a.offset, steps);
}

Span span_of(const Value& value) { return {value.geometry, value.offset}; }

// Calls `visit` with each value in the base's memory that has a pending tensor.
template <class Visit>
void for_each_alias(const Graph& graph, ValueId base, const Visit& visit) {
  for (ValueId id = base; id != kNone; id = graph.value(id).next_view) {
    if (graph.value(id).tensor != nullptr) visit(id, graph.value(id));
  }
}

// --- combining written pieces ---

// Makes a pending tensor that stands for a view of `id`.
at::Tensor view_of(Graph& graph, ValueId id, const Geometry* geometry, int64_t offset) {
  return make_pending(graph, graph.add_view(id, geometry, offset, graph.value(id).requires_grad));
}

void set_content(Memory& memory, ValueId content) {
  memory.content = content;
  memory.contents.push_back(content);
  memory.writes.clear();
  memory.views.clear();
}

// Combines the old content of the memory and the written pieces into one value.
void assemble(Scope& scope, Memory& memory) {
  if (memory.writes.empty()) return;
  Graph& graph = scope.graph();
  const Graph::RawGuard raw(graph);
  c10::List<at::Tensor> places, pieces;
  for (const Write& write : memory.writes) {
    places.push_back(view_of(graph, memory.content, write.geometry, write.offset));
    const Value source = graph.value(write.source);
    pieces.push_back(view_of(graph, write.source, source.geometry, source.offset));
  }
  const Value content = graph.value(memory.content);
  const std::vector<c10::IValue> arguments{
      view_of(graph, memory.content, content.geometry, content.offset), places, pieces};
  DispatchContext context;  // context of the written values, not of the running code
  context.grad_mode = memory.requires_grad;
  context.inference_mode = !content.is_graph_input() &&
                           graph.tape().nodes[content.node].signature->context.inference_mode;
  Recorded recorded;
  const bool done =
      record_by(scope, assemble_op(), arguments, *assemble_op().rules.front(), context, recorded);
  TORCH_INTERNAL_ASSERT(done, "torch_autobatch: a written piece does not fit into its memory");
  set_content(memory, as_pending(recorded.tensors[0])->value());
}

// Whether a single value covers the region.
bool is_settled(const Graph& graph, const Memory& memory, const Span& span) {
  for (const Write& write : memory.writes) {
    const Span written{write.geometry, write.offset};
    if (!may_overlap(written, span)) continue;
    const Value& source = graph.value(write.source);
    return same(written, span) && source.geometry->canonical == span.geometry->canonical &&
           source.requires_grad == memory.requires_grad;
  }
  return true;
}

void settle(Scope& scope, const at::Tensor& tensor) {
  Graph& graph = scope.graph();
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr || pending->graph() != &graph) return;
  const Value& value = graph.value(pending->value());
  Memory* memory = graph.memory_of(value.base);
  if (memory != nullptr && !is_settled(graph, *memory, span_of(value))) assemble(scope, *memory);
}

// --- which writes may be deferred ---

// Whether autograd does not record the write, although the memory has a history. In eager, such a
// write changes the values and keeps the history.
bool keeps_history(const Graph& graph, const Value& to) {
  return !grad_mode() && graph.requires_grad_now(to.base);
}

bool is_whole(const Value& to, const Value& base) {
  return to.geometry == base.geometry && to.offset == 0;
}

// Whether all views of the memory also share its autograd history. If all views share the history,
// all views may refer to the written value, as in eager.
bool history_is_shared(const Graph& graph, const Value& to, bool needs_grad) {
  const Value& base = graph.value(to.base);
  if (keeps_history(graph, to) && !is_whole(to, base)) return false;
  if (!graph.requires_grad_now(to.base) && !needs_grad) return true;
  bool all = true;  // after the write, eager rejects views that one call made (unbind)
  for_each_alias(graph, to.base,
                 [&](ValueId, const Value& alias) { all = all && alias.kind == ViewKind::kPlain; });
  // In eager, even a write to zero elements gives the memory a history with a zero gradient.
  return all && base.geometry->numel > 0 && to.geometry->numel > 0;
}

// Called for an op that reads the region to which it writes. Returns whether the op reads each
// element right before it writes this element.
bool reads_as_it_writes(const OpInfo& op) {
  return op.write != WriteKind::kCompute || op.handle.hasTag(at::Tag::pointwise);
}

// Whether autograd differentiates the op like its functional counterpart.
bool has_formula_of_functional(const OpInfo& op, Arguments arguments) {
  if (op.in_place_formula == InPlaceFormula::kSame) return true;
  return op.in_place_formula == InPlaceFormula::kOfPositiveSlope && arguments[1].isScalar() &&
         arguments[1].toScalar().toDouble() >= 0;
}

bool may_defer(const Graph& graph, const OpInfo& op, Arguments arguments, const Value& to) {
  if (!has_formula_of_functional(op, arguments)) return false;
  const Value& base = graph.value(to.base);
  // Autograd does not notice a write through `x.data`, so autograd's formulas read the new content.
  if (to.kind == ViewKind::kData) return false;
  if (base.is_graph_input() || to.geometry->overlapping || base.geometry->overlapping) return false;
  if (must_flush_before_write(graph, to.base)) return false;
  const Node& maker = graph.tape().nodes[base.node];
  const Signature& origin = *maker.signature;
  if (origin.context.inference_mode != c10::InferenceMode::is_enabled()) return false;
  bool needs_grad = false;
  bool disjoint = true;  // each other argument is exactly the written region or does not overlap it
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      needs_grad = needs_grad || tensor.requires_grad();
      const PendingTensor* pending = as_pending(tensor);
      if (pending == nullptr) return;
      const Value& value = graph.value(pending->value());
      if (i == 0 || value.base != to.base) return;
      disjoint = disjoint &&
                 (same(span_of(value), span_of(to)) ? reads_as_it_writes(op)
                                                    : !may_overlap(span_of(value), span_of(to)));
    });
  }
  return disjoint && history_is_shared(graph, to, needs_grad && grad_mode());
}

// --- the written values ---

// Returns the tensor that `copy_`, `fill_` or `zero_` writes. Returns an undefined tensor if eager
// has to check the arguments.
at::Tensor given_source(const OpInfo& op, Arguments arguments, const at::Tensor& to) {
  at::Tensor source;
  if (op.write == WriteKind::kZero) {
    return at::full(to.sizes(), 0, to.options().requires_grad(false));
  }
  if (arguments[1].isScalar()) {
    return at::full(to.sizes(), arguments[1].toScalar(), to.options().requires_grad(false));
  }
  source = arguments[1].toTensor();
  if (op.name == "aten::fill_.Tensor" && source.dim() > 0) return {};
  if (source.is_complex() != to.is_complex() || source.device() != to.device()) return {};
  if (!at::is_expandable_to(source.sizes(), to.sizes())) return {};
  if (source.requires_grad() && !grad_mode()) source = source.detach();
  if (source.scalar_type() != to.scalar_type()) source = source.to(to.scalar_type());
  return source.sizes() == to.sizes() ? source : source.expand(to.sizes());
}

// Returns the result of the functional counterpart, in the dtype of `to`. Returns an undefined
// tensor if the result cannot be captured.
at::Tensor computed_source(Scope& scope, const OpInfo& op, Arguments arguments,
                           const at::Tensor& to) {
  const OpInfo& functional = op_info(*op.functional);
  if (functional.action != Action::kDefer) return {};
  settle(scope, arguments);
  Recorded recorded;
  if (!record_call(scope, functional, arguments, recorded)) return {};
  at::Tensor source = recorded.tensors[0];
  if (source.sizes() != to.sizes() || as_pending(source) == nullptr) return {};
  if (source.scalar_type() == to.scalar_type()) return source;
  if (!c10::canCast(source.scalar_type(), to.scalar_type())) return {};
  return source.to(to.scalar_type());
}

// Returns a tensor with the history of `to` and the values of `source`.
at::Tensor with_history_of(Scope& scope, const at::Tensor& to, const at::Tensor& source) {
  settle(scope, {c10::IValue(to), c10::IValue(source)});
  DispatchContext context;  // a context without autocast
  context.grad_mode = true;
  Recorded recorded;
  const std::vector<c10::IValue> arguments{to, source};
  const OpInfo& op = with_values_op();
  if (!record_by(scope, op, arguments, *op.rules.front(), context, recorded)) return {};
  return recorded.tensors[0];
}

// Whether a gradient of `id` certainly reaches `source` too. The search for a path to `source` is
// limited. Returns false if the search finds no path.
bool depends_on(const Graph& graph, ValueId id, ValueId source) {
  constexpr size_t kFar = 256;
  if (!graph.value(id).requires_grad) return false;
  const Tape& tape = graph.tape();
  const NodeId oldest = graph.value(source).node;
  std::vector<ValueId> found{id};
  for (size_t next = 0; next < found.size() && found.size() < kFar; ++next) {
    const Value& value = tape.values[found[next]];
    if (found[next] == source) return true;
    if (value.parent != kNone) {
      found.push_back(value.parent);
    } else if (!value.is_graph_input() && value.node >= oldest) {
      for (ValueId operand : tape.operands_of(tape.nodes[value.node])) {
        if (operand != kNone && tape.values[operand].requires_grad) found.push_back(operand);
      }
    }
  }
  return false;
}

// Whether a value that was written earlier would get no gradient after this write. In eager, the
// earlier value gets a zero gradient.
bool drops_history(const Graph& graph, const Memory& memory, const Span& place, bool whole,
                   ValueId source) {
  return std::any_of(memory.writes.begin(), memory.writes.end(), [&](const Write& w) {
    if (!whole && !same({w.geometry, w.offset}, place)) return false;
    return graph.value(w.source).requires_grad && !depends_on(graph, source, w.source);
  });
}

// Records that the region of `to` now holds `source`. `fresh` means that no tensor of the user
// stands for `source`.
void write(Scope& scope, ValueId to_id, ValueId source_id, bool fresh) {
  Graph& graph = scope.graph();
  const Value to = graph.value(to_id);
  const Value base = graph.value(to.base);
  const Value source = graph.value(source_id);
  Memory& memory = graph.make_memory(to.base);
  const Span place = span_of(to);
  const bool whole = is_whole(to, base);
  if (drops_history(graph, memory, place, whole, source_id)) assemble(scope, memory);
  memory.requires_grad = memory.requires_grad || source.requires_grad;
  memory.views.clear();
  ++memory.version;
  memory.writer = Fiber::current() == nullptr ? 0 : Fiber::current()->number();
  if (whole) memory.writes.clear();
  if (whole && fresh && source.base == source_id && source.geometry == base.geometry &&
      source.requires_grad == memory.requires_grad) {
    set_content(memory, source_id);
  } else {
    std::erase_if(memory.writes,
                  [&](const Write& w) { return same({w.geometry, w.offset}, place); });
    const bool clear =
        std::none_of(memory.writes.begin(), memory.writes.end(),
                     [&](const Write& w) { return may_overlap({w.geometry, w.offset}, place); });
    if (!clear) assemble(scope, memory);
    memory.writes.push_back({to.geometry, to.offset, source_id});
    // The gradient of later reads belongs to the whole memory, and not only to the written value.
    const bool covers = to.geometry->numel == base.geometry->numel;
    if (covers && memory.requires_grad) assemble(scope, memory);
  }
  memory.written = static_cast<ValueId>(graph.tape().values.size());
  if (!memory.requires_grad) return;
  for_each_alias(graph, to.base, [](ValueId, const Value& alias) {
    if (alias.kind >= ViewKind::kDetached) return;  // a detached tensor shares no history
    auto held = alias.tensor->hold();
    if (held == nullptr) return;  // another thread is dropping the tensor's last reference
    const at::Tensor tensor(std::move(held));
    torch::autograd::impl::materialize_autograd_meta(tensor)->requires_grad_ = true;
  });
}

}  // namespace

const OpInfo& assemble_op() {
  static const OpInfo& info = find_op("autobatch::assemble", "");
  return info;
}

const OpInfo& with_values_op() {
  static const OpInfo& info = find_op("autobatch::with_values", "");
  return info;
}

bool flush_shared_memory(Scope& scope, const OpInfo& op, Arguments arguments) {
  bool shared = false;
  const Graph& graph = scope.graph();
  for_each_written(op, arguments, [&](const at::Tensor& to) {
    const PendingTensor* pending = as_pending(to);
    if (pending == nullptr || pending->graph() != &graph) return;
    const ValueId base = graph.value(pending->value()).base;
    shared = shared || is_shared(graph.tape(), memory_owner(graph.tape(), base));
  });
  if (shared) scope.flush(op.name + " writes to memory that a tensor of another dtype shares");
  return shared;
}

bool record_write(Scope& scope, const OpInfo& op, Arguments arguments) {
  if (op.write == WriteKind::kNone || op.write == WriteKind::kOut) return false;
  if (!arguments[0].isTensor()) return false;
  const at::Tensor& to = arguments[0].toTensor();
  const PendingTensor* pending = as_pending(to);
  if (pending == nullptr) return false;
  Graph& graph = scope.graph();
  if (is_leaf(graph.tape(), graph.value(pending->value()).base)) return false;
  const std::shared_ptr<void> nobody_dies = host_hold();
  graph.settle_orphans();
  if (!may_defer(graph, op, arguments, graph.value(pending->value()))) return false;
  const auto when = static_cast<NodeId>(graph.tape().nodes.size());
  // progress() detects flushes. A flush without batches is not in the report, but it renumbers
  // values. A flush with batches is in the report, but it may keep the numbers.
  const auto progress = [&] { return std::pair(graph.numbering(), scope.report().num_flushes); };
  const auto before = progress();
  const bool computed = op.write == WriteKind::kCompute;
  const bool keeps = keeps_history(graph, graph.value(pending->value()));
  at::Tensor source =
      computed ? computed_source(scope, op, arguments, to) : given_source(op, arguments, to);
  if (source.defined() && keeps) source = with_history_of(scope, to, source);
  if (!source.defined()) return false;
  if (progress() != before) return false;
  settle(scope, source);
  // Finds the op's own node among the added nodes. The call of settle() may have added other nodes.
  for (NodeId node = when; computed && !keeps && node < graph.tape().nodes.size(); ++node) {
    if (graph.tape().nodes[node].signature->op->handle == *op.functional) graph.note_in_place(node);
  }
  write(scope, pending->value(), graph.value_of(source), computed || keeps);
  graph.note_written(*graph.memory_of(graph.value(pending->value()).base), when);
  return true;
}

void settle(Scope& scope, Arguments arguments) {
  if (!scope.graph().has_writes()) return;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) { settle(scope, tensor); });
  }
}

void settle_all(Scope& scope) {
  Graph& graph = scope.graph();
  if (!graph.has_writes()) return;
  const std::shared_ptr<void> nobody_dies = host_hold();
  graph.settle_orphans();
  for (auto& [base, memory] : graph.memories()) {
    std::vector<ValueId> aliases;
    for_each_alias(graph, base, [&](ValueId id, const Value&) { aliases.push_back(id); });
    if (aliases.empty()) continue;
    assemble(scope, memory);
    for (ValueId id : aliases) graph.move_tensor(id, graph.current(id));
    graph.note_version(memory.content, memory.version);
  }
}

}  // namespace autobatch
