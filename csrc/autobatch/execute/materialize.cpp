#include "autobatch/execute/materialize.h"

#include "autobatch/backward/autograd_nodes.h"
#include "autobatch/backward/overwrites.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/execute/function_results.h"
#include "autobatch/execute/leaf_edges.h"
#include "autobatch/execute/reinterpreted_views.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/graph/view_roots.h"
#include "autobatch/kernels/region_kinds.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace autobatch {
namespace {

// If `base` shares the memory of another value, returns the other value. Returns kNone if the
// memory of the other value has been released, because no tensor referred to this value after its
// last reader had run.
ValueId shared_value(const FlushRecord& record, ValueId base) {
  const ValueId other = reinterpreted_value(record.tape, base);
  if (other == kNone) return kNone;
  const ValueId owner = record.tape.values[other].base;
  if (record.tape.values[owner].is_graph_input()) return other;
  const uint32_t slab = record.store.places[owner].slab;
  const bool exists = slab != kNone && record.store.slabs[slab].defined();
  return exists || shared_value(record, owner) != kNone ? other : kNone;
}

// Makes copies of whole results outside their slabs. Without a copy, an in-place write to a tensor
// would change other members of the batch or values kept for backward, and torch.save would write
// the whole slab. For results that are not in host memory, `finish` makes the copies, in one call
// for each dtype and device.
class OwnCopies {
 public:
  explicit OwnCopies(const FlushRecord& record) : record_(record) {}

  // Returns the copy of the result `base`. Each call returns the same tensor. For a graph input,
  // returns the memory of the graph input itself.
  const at::Tensor& of(ValueId base) {
    const Value& value = record_.tape.values[base];
    if (value.is_graph_input()) return record_.tape.graph_inputs[value.index].data;
    if (const auto found = copies_.find(base); found != copies_.end()) return found->second;
    const ValueId other = shared_value(record_, base);
    at::Tensor own = other != kNone ? alias(base, other) : make(base);
    return copies_.emplace(base, std::move(own)).first->second;
  }

  void finish() {
    if (waiting_.empty()) return;
    GeometryTable geometries;
    Regions from, to;
    for (const ValueId base : waiting_) {
      const Allocation& place = record_.store.places[base];
      const at::Tensor& copy = copies_.at(base);
      const Geometry* flat = geometries.intern_contiguous(copy.sizes());
      from.push_back({&record_.store.slabs[place.slab], place.offset, flat});
      to.push_back({&copy, 0, flat});
    }
    for_each_kind(from, to, copy_regions);
    waiting_.clear();
  }

  const std::unordered_map<ValueId, at::Tensor>& all() const { return copies_; }

 private:
  // Returns the version counter of the tensors that use the memory of `base`.
  const c10::VariableVersion& counter_of(ValueId base) {
    const Value& value = record_.tape.values[base];
    if (value.is_graph_input() && record_.tape.graph_inputs[value.index].counted) {
      return record_.tape.graph_inputs[value.index].counter;
    }
    return of(base).unsafeGetTensorImpl()->version_counter();
  }

  // Returns a tensor for the result `base` over the memory of `other`, which `base` reinterprets.
  at::Tensor alias(ValueId base, ValueId other) {
    const Value& value = record_.tape.values[base];
    const Value& from = record_.tape.values[other];
    const at::Tensor& memory = of(from.base);
    const Reading reading{value.dtype, is_conjugated(record_.tape, base)};
    at::Tensor own = reinterpreted(memory, reading, from.offset, value.geometry->extent);
    if (!memory.is_inference()) {
      own.unsafeGetTensorImpl()->set_version_counter(counter_of(from.base));
    }
    return own;
  }

  at::Tensor make(ValueId base) {
    const Value& value = record_.tape.values[base];
    const Allocation& place = record_.store.places[base];
    std::optional<c10::InferenceMode> inference;
    const bool is_inference = record_.tape.nodes[value.node].signature->context.inference_mode;
    if (is_inference) inference.emplace(true);
    at::Tensor copy = at::empty({value.geometry->extent}, value.options());
    const at::Tensor& slab = record_.store.slabs[place.slab];
    if (has_host_memory(value.device) && copy.numel() > 0) {
      const auto* from = static_cast<const char*>(slab.const_data_ptr());
      std::memcpy(copy.mutable_data_ptr(), from + place.offset * copy.element_size(),
                  copy.nbytes());
    } else if (is_inference) {
      copy.copy_(slab.narrow(0, place.offset, value.geometry->extent));
    } else {
      waiting_.push_back(base);
    }
    if (copy.is_inference()) return copy;
    const auto written = record_.tape.versions.find(base);
    const uint32_t version = written == record_.tape.versions.end() ? 0 : written->second;
    copy.unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(version));
    return copy;
  }

  const FlushRecord& record_;
  std::unordered_map<ValueId, at::Tensor> copies_;
  std::vector<ValueId> waiting_;
};

// Registers `tensor` with autograd as a view of `root`, whose memory it shares. In eager mode a
// view refers to its base, so that an in-place write to the view becomes part of the base's
// history. `root` may itself be a view, even of a base with another dtype (`z.imag`). Only the view
// function of `root` can make such a view again. `of_function`: whether a custom autograd.Function
// returned the view.
void link_view(const at::Tensor& tensor, const at::Tensor& root, ViewKind kind, bool of_function) {
  using torch::autograd::CreationMeta;
  using torch::autograd::DifferentiableViewMeta;
  using torch::autograd::ViewInfo;
  CreationMeta made = kind == ViewKind::kNoGrad         ? CreationMeta::NO_GRAD_MODE
                      : kind == ViewKind::kOneOfSeveral ? CreationMeta::MULTI_OUTPUT_NODE
                      : of_function                     ? CreationMeta::IN_CUSTOM_FUNCTION
                                                        : CreationMeta::DEFAULT;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto* of_root = torch::autograd::impl::get_view_autograd_meta(root);
  const bool chained = of_root != nullptr && of_root->has_bw_view();
  if (chained && made == CreationMeta::DEFAULT) made = of_root->get_creation_meta();
  const auto info_of = [&] {
    if (!chained) return ViewInfo(root, make_view_function(root, tensor), nullptr);
    const ViewInfo& first = of_root->get_backward_view();
    if (first.has_view_fn()) return first.chain(root, tensor, make_view_function(root, tensor));
    return ViewInfo(first.base_, make_view_function(first.base_, tensor), nullptr);
  };
  auto meta = std::make_unique<DifferentiableViewMeta>(impl, info_of(), std::nullopt,
                                                       /*shared_view_info=*/false, made);
  // `register_hook` sets the tensor's hooks before it reads the tensor's grad_fn.
  if (auto* before = torch::autograd::impl::get_autograd_meta(tensor)) {
    meta->hooks_ = std::move(before->hooks_);
  }
  impl->set_autograd_meta(std::move(meta));
}

// Returns a tensor that requires grad and has the memory of `view`. This tensor becomes the base of
// a view that was made under no_grad(), if the user has dropped the original base.
at::Tensor leaf_base_of(const at::Tensor& view) {
  at::Tensor base = at::Tensor(view.unsafeGetTensorImpl()->shallow_copy_and_detach(
      view.unsafeGetTensorImpl()->version_counter(), /*allow_tensor_metadata_change=*/true));
  return base.set_requires_grad(true);
}

bool was_computed(const FlushRecord& record, const std::vector<uint8_t>& ran, ValueId id) {
  const Value& value = record.tape.values[id];
  return value.is_graph_input() || ran[value.node];
}

// Whether a custom autograd.Function returned `base` as a view of one of its arguments.
bool is_of_function(const Tape& tape, const Value& base) {
  if (base.is_graph_input()) return false;
  const OpInfo* op = tape.nodes[base.node].signature->op;
  return op != nullptr && op->reinterprets && op->is_function;
}

// Returns the value whose tensor is the base of the view `id`, even if the view reinterprets the
// memory of the base (shared_memory.h).
ValueId shared_root_of(const FlushRecord& record, ValueId id) {
  const Tape& tape = record.tape;
  for (;;) {
    id = root_of(tape, id);
    const ValueId other = tape.values[id].base == id ? shared_value(record, id) : kNone;
    if (other == kNone) return id;
    // The operand of a custom function's node is the detached result of the function's forward.
    id = is_of_function(tape, tape.values[id]) ? tape.values[other].parent : other;
  }
}

// Finds the base tensors (roots) with which views share their autograd history. If the user does
// not hold a root, a hidden tensor is made for the root, because eager mode keeps the base alive. A
// root with only a single view gets a hidden tensor only if the root has a history.
class Roots {
  using Edge = torch::autograd::Edge;

 public:
  // `computed` must be in the order of the values, so that a view comes before its own views.
  Roots(const FlushRecord& record, const std::vector<PendingTensor*>& computed) : record_(record) {
    size_t held = 0;
    for (const PendingTensor* tensor : computed) {
      const bool recorded = is_recorded(record, *tensor);
      const size_t view = recorded ? held++ : 0;
      const ValueId root = shared_root_of(record, tensor->value());
      const Value& value = record.tape.values[tensor->value()];
      const bool follows = value.kind == ViewKind::kPlain || value.kind == ViewKind::kNoGrad;
      if (root == tensor->value() || !follows) continue;
      const Value& of = record.tape.values[root];
      if (of.tensor != nullptr || of.is_graph_input()) continue;
      const bool is_new = index_.emplace(root, kNoHistory).second;
      size_t& index = index_[root];
      if (!is_new && index == kNoHistory) several_.insert(root);
      if (!recorded || !of.requires_grad || index != kNoHistory) continue;
      index = hidden_.size();
      hidden_.push_back({root, view});
    }
  }

  const std::vector<HiddenRoot>& hidden() const { return hidden_; }

  // Returns the tensor of the root of the view `id`, or an undefined tensor if no root is needed.
  at::Tensor find(ValueId id, OwnCopies& memory, const std::vector<Edge>& edges) {
    const ValueId root = shared_root_of(record_, id);
    if (root == id) return {};
    const Value& value = record_.tape.values[root];
    if (value.is_graph_input() && root == value.base) {
      const GraphInput& graph_input = record_.tape.graph_inputs[value.index];
      return graph_input.is_copy ? at::Tensor() : graph_input.tensor;
    }
    if (value.tensor != nullptr) {
      return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(value.tensor));
    }
    const auto hidden = index_.find(root);
    const bool has_history = hidden != index_.end() && hidden->second != kNoHistory;
    if (!has_history && several_.count(root) == 0) {
      if (record_.tape.values[id].kind != ViewKind::kOneOfSeveral) return {};
      // Eager mode reads only the name (for an error) and requires_grad of this base.
      const at::Tensor& own = memory.of(record_.tape.values[id].base);
      const at::Tensor name = detached_alias(own);
      name.unsafeGetTensorImpl()->set_version_counter(own.unsafeGetTensorImpl()->version_counter());
      return name.set_requires_grad(record_.tape.values[id].requires_grad);
    }
    at::Tensor& made = made_[root];
    if (!made.defined()) {
      const at::Tensor& own = memory.of(value.base);
      made = detached_alias(
          own.as_strided(value.geometry->sizes, value.geometry->strides, value.offset));
      made.unsafeGetTensorImpl()->set_version_counter(own.unsafeGetTensorImpl()->version_counter());
      if (has_history) {
        torch::autograd::impl::set_gradient_edge(made, edges[record_.held.size() + hidden->second]);
      }
    }
    return made;
  }

 private:
  const FlushRecord& record_;
  std::vector<HiddenRoot> hidden_;
  static constexpr size_t kNoHistory = ~size_t{0};
  std::unordered_map<ValueId, size_t> index_;  // for each root: index in hidden_, or kNoHistory
  std::unordered_set<ValueId> several_;        // roots without history that have several views
  std::unordered_map<ValueId, at::Tensor> made_;
};

// Turns the tensors of computed values into real tensors. `edges`: gradient edges of the recorded
// tensors (is_recorded), in the order of these tensors. `differentiable`: whether any part of the
// record may be differentiated.
void give_memory(FlushRecord& record, const std::vector<PendingTensor*>& computed, Roots& roots,
                 const std::vector<torch::autograd::Edge>& edges, bool differentiable) {
  OwnCopies memory(record);
  // The version counters of tensors made by `x.data`, by the root of x.
  std::unordered_map<ValueId, c10::VariableVersion> data_counters;
  size_t next_edge = 0;
  for (PendingTensor* tensor : computed) {
    const ValueId id = tensor->value();
    const Value& value = record.tape.values[id];
    const Value& base = record.tape.values[value.base];
    const bool recorded = is_recorded(record, *tensor);
    const at::Tensor& own = memory.of(value.base);
    tensor->become(own, own.storage_offset() + value.offset);
    if (base.is_graph_input()) {
      const GraphInput& graph_input = record.tape.graph_inputs[base.index];
      if (graph_input.counted) tensor->set_version_counter(graph_input.counter);
    }
    const at::Tensor handle(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensor));
    if (value.kind == ViewKind::kData && !handle.is_inference()) {
      const ValueId root = root_of(record.tape, id);
      tensor->set_version_counter(data_counters.try_emplace(root, 0u).first->second);
      note_alias(handle);
    }
    const bool is_leaf = handle.requires_grad() && !recorded;
    // A leaf is a view only if it was made under no_grad(). Such a view requires grad only if its
    // base requires grad.
    if (!handle.is_inference() && (!is_leaf || value.kind == ViewKind::kNoGrad)) {
      at::Tensor root = roots.find(id, memory, edges);
      if (is_leaf && !(root.defined() && root.requires_grad())) root = leaf_base_of(handle);
      if (root.defined()) link_view(handle, root, value.kind, is_of_function(record.tape, base));
    }
    if (!recorded) continue;
    const size_t edge = next_edge++;
    if (is_new_leaf(record, *tensor)) continue;
    torch::autograd::impl::materialize_autograd_meta(handle)->requires_grad_ = false;
    torch::autograd::impl::set_gradient_edge(handle, edges[edge]);
  }
  memory.finish();
  for (PendingTensor* tensor : computed) {
    if (tensor->has_requests()) tensor->answer_requests();
  }
  if (!differentiable) return;
  std::vector<HeldMemory> memories;
  for (const auto& [base, own] : memory.all()) {
    if (own.is_inference()) continue;
    const c10::VariableVersion& counter = own.unsafeGetTensorImpl()->version_counter();
    memories.push_back({base, counter, counter.current_version(),
                        own.storage().getWeakStorageImpl(),
                        may_change_unseen(own) ? own.storage() : c10::Storage()});
  }
  record.memories.add(std::move(memories));
}

// Returns the message of a failure, for later uses of the lost tensors.
std::shared_ptr<const std::string> reason_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error& error) {
    return std::make_shared<const std::string>(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return std::make_shared<const std::string>(error.what());
  } catch (...) {
    return std::make_shared<const std::string>("an unknown error");
  }
}

}  // namespace

const OpFailure& Failures::of(NodeId node) const {
  const auto found = nodes_.find(node);
  return found == nodes_.end() ? first_ : found->second;
}

void Failures::add(NodeId node, std::exception_ptr error) {
  OpFailure loss{error, reason_of(error)};
  all_.push_back(loss);
  if (!first_.cause || node < first_node_) {
    first_ = loss;
    first_node_ = node;
  }
  nodes_[node] = std::move(loss);
}

void Failures::add(std::exception_ptr error) {
  first_ = {error, reason_of(error)};
  first_node_ = 0;
  stops_ = true;
  all_.push_back(first_);
}

void Failures::copy_to(std::vector<OpFailure>& losses) const {
  losses.insert(losses.end(), all_.begin(), all_.end());
}

HeldTensors::HeldTensors(Graph& graph, Split& part, const Store& computed) {
  PooledVector<Value>& values = part.tape.values;
  for (const Split::Export& e : part.exports) {
    Value& value = values[e.value];
    c10::intrusive_ptr<PendingTensor> tensor;
    if (value.tensor != nullptr) tensor = value.tensor->hold();
    if (tensor == nullptr) {  // there is no tensor, or another thread is destroying it
      tensor = c10::make_intrusive<PendingTensor>(&graph, e.value, value);
      value.tensor = tensor.get();
    }
    exports_.push_back(std::move(tensor));
    if (value.requires_grad) {
      const at::Tensor handle(c10::intrusive_ptr<c10::TensorImpl>(exports_.back()));
      torch::autograd::impl::materialize_autograd_meta(handle)->requires_grad_ = true;
    }
  }
  function_results_ = hold_function_results(graph, part.tape, computed);
  for (Value& value : values) {
    if (value.tensor == nullptr) continue;
    auto tensor = value.tensor->hold();
    if (tensor == nullptr) {  // another thread is destroying the tensor
      value.tensor = nullptr;
    } else {
      tensors_.push_back(std::move(tensor));
    }
  }
}

std::vector<ValueId> HeldTensors::results(const Tape& tape) const {
  std::vector<ValueId> bases;
  bases.reserve(tensors_.size());
  for (const auto& tensor : tensors_) {
    const Value& value = tape.values[tensor->value()];
    if (!value.is_graph_input()) bases.push_back(value.base);
    // A tensor that reinterprets another value gets the memory of that value.
    const ValueId owner = value.is_graph_input() ? value.base : memory_owner(tape, value.base);
    if (owner != value.base && !tape.values[owner].is_graph_input()) bases.push_back(owner);
  }
  return bases;
}

void HeldTensors::let_go(Tape& tape) {
  std::erase_if(tensors_, [&](c10::intrusive_ptr<PendingTensor>& tensor) {
    const ValueId id = tensor->value();
    const c10::weak_intrusive_ptr<PendingTensor> weak(tensor);
    PendingTensor::Absence absence(*tensor);
    tensor.reset();
    tensor = weak.lock();
    if (tensor != nullptr) {
      absence.end();
    } else {
      tape.values[id].tensor = nullptr;
    }
    return tensor == nullptr;
  });
}

std::vector<Computed> HeldTensors::materialize(const std::shared_ptr<FlushRecord>& record,
                                               const Failures& failures) {
  std::vector<uint8_t> ran(record->tape.nodes.size(), 0);
  for (NodeId node : record->order) ran[node] = 1;
  std::vector<PendingTensor*> computed;
  for (const auto& tensor : tensors_) {
    if (was_computed(*record, ran, tensor->value())) {
      computed.push_back(tensor.get());
      if (is_recorded(*record, *tensor)) record->held.push_back({tensor->value(), 0});
    } else {
      tensor->lose(failures.of(record->tape.values[tensor->value()].node).reason);
    }
  }
  Roots roots(*record, computed);
  const std::vector<torch::autograd::Edge> edges =
      make_autograd_nodes(record, roots.hidden(), leaf_edges(*record, computed));
  give_memory(*record, computed, roots, edges, !record->held.empty());
  function_results_.clear();
  // Releases the user's tensors. After a later in-place write, such a tensor may depend on this
  // record. A reference from the record to the tensor would then form a reference cycle.
  for (GraphInput& graph_input : record->tape.graph_inputs) graph_input.tensor = at::Tensor();
  tensors_.clear();
  return take_exports();
}

void materialize_results(FlushRecord& record, at::ArrayRef<ValueId> bases) {
  std::vector<c10::intrusive_ptr<PendingTensor>> held;
  std::vector<PendingTensor*> computed;
  for (ValueId base : bases) {
    for (ValueId id = base; id != kNone; id = record.tape.values[id].next_view) {
      PendingTensor* tensor = record.tape.values[id].tensor;
      if (tensor == nullptr) continue;
      held.push_back(tensor->hold());
      if (held.back() == nullptr) continue;  // another thread destroys the tensor
      computed.push_back(tensor);
    }
  }
  std::sort(computed.begin(), computed.end(),
            [](const auto* a, const auto* b) { return a->value() < b->value(); });
  Roots roots(record, computed);
  give_memory(record, computed, roots, {}, true);
  for (const PendingTensor* tensor : computed) {
    record.tape.values[tensor->value()].tensor = nullptr;
  }
}

std::vector<Computed> HeldTensors::lose_rest(const OpFailure& failure) {
  for (const auto& tensor : tensors_) {
    if (tensor->is_pending()) tensor->lose(failure.reason);
  }
  tensors_.clear();
  function_results_.clear();
  return take_exports();
}

std::vector<Computed> HeldTensors::take_exports() {
  std::vector<Computed> exported;
  for (auto& tensor : exports_) {
    if (tensor->is_lost()) {
      exported.push_back({at::Tensor(), tensor->reason()});
    } else {
      exported.push_back({at::Tensor(std::move(tensor)), nullptr});
    }
  }
  return exported;
}

}  // namespace autobatch
