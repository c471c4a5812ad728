#include "autobatch/cells/cell_template.h"

#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/graph/shared_memory.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/graph/view_roots.h"
#include "autobatch/scope/scope.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace autobatch {
namespace {

constexpr uint64_t kUnknown = ~uint64_t{0};  // an unknown identity or numbering

ValueId value_in(Graph& graph, const at::Tensor& tensor, bool is_weight) {
  if (const PendingTensor* pending = as_pending(tensor)) return pending->value();
  return is_weight ? graph.weight_value_of(tensor) : graph.value_of(tensor);
}

// Adds the weights to the graph as graph inputs, in the order in which the traced call used them.
// This order determines the identities of the weights, and may differ from that in `weights`.
template <class Weights>
void meet(Graph& graph, const Weights& weights) {
  std::vector<uint32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return weights[a].identity < weights[b].identity;
  });
  for (const uint32_t w : order) value_in(graph, weights[w].tensor, weights[w].is_weight);
}

// Whether both tensors have the same memory and sizes. For example, `x.data` has the memory and
// sizes of `x`, and is created without an op.
bool are_one_memory(const at::Tensor& a, const c10::TensorImpl& b) {
  if (as_pending(a) != nullptr || as_pending(&b) != nullptr) return false;
  if (!b.has_storage()) return false;
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.unsafeGetTensorImpl()->storage().is_alias_of(b.storage());
}

bool is_weight(const Graph& graph, const at::Tensor& tensor) {
  const ValueId id = as_pending(tensor) != nullptr ? kNone : graph.find_graph_input(tensor);
  return id != kNone && graph.tape().graph_inputs[graph.value(id).index].is_weight;
}

std::string at_site(const std::string& site) { return site.empty() ? "" : " at " + site; }

}  // namespace

CellFunction::CellFunction(bool compiles) : compiles_(compiles) {
  static std::atomic<uint64_t> next{1};
  id_ = next++ << 8 | 0x7F;  // odd, whereas keys of ops begin with an (even) address
}

std::shared_ptr<std::atomic<uint64_t>> CellFunction::waits(size_t inputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& found = waits_[inputs];
  if (found == nullptr) found = std::make_shared<std::atomic<uint64_t>>(0);
  return found;
}

bool CellTemplate::apply(Scope& scope, at::ArrayRef<at::Tensor> inputs,
                         c10::SmallVectorImpl<at::Tensor>& outputs,
                         at::ArrayRef<ValueId> known) const {
  const Scope::Lock lock(scope);
  Graph& graph = scope.graph();
  c10::SmallVector<ValueId, 8> weights;
  if (holds_varying_number(scope.tables().numbers) || !find_weights(graph, weights)) return false;
  c10::SmallVector<ValueId, 64> ids;
  ids.reserve(inputs.size() + num_results_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_known = i < known.size() && known[i] != kNone && input_is_weight_[i] == 0;
    ids.push_back(is_known ? known[i] : value_in(graph, inputs[i], input_is_weight_[i] != 0));
  }
  if (!(compact_ ? apply_subgraph(scope, weights, ids) : apply_steps(scope, weights, ids)))
    return false;
  for (const uint32_t number : outputs_) {
    const auto same = std::find(outputs_.begin(), outputs_.begin() + outputs.size(), number);
    if (number >= kFirstWeight) {
      outputs.push_back(weights_[number - kFirstWeight].tensor);
    } else if (number < inputs.size()) {
      outputs.push_back(inputs[number]);
    } else if (const auto k = static_cast<size_t>(same - outputs_.begin()); k < outputs.size()) {
      outputs.push_back(outputs[k]);  // an output that is returned twice is one tensor object
    } else {
      TORCH_INTERNAL_ASSERT(ids[number] != kNone,
                            "no step of the cell computes one of its results");
      outputs.push_back(make_pending(graph, ids[number]));
    }
  }
  return true;
}

bool CellTemplate::holds_varying_number(const VaryingNumbers& numbers) const {
  if (!passes_numbers_ || numbers_version_ == numbers.version()) return false;
  for (const Step& step : steps_) {
    if (step.cached.signature != nullptr && numbers.contains(*step.cached.signature)) return true;
  }
  numbers_version_ = numbers.version();
  return false;
}

// Whether the tensor still has the metadata that it had when the call was traced. The user may have
// changed the tensor's data or requires_grad since the trace.
bool CellTemplate::Weight::looks_the_same() const {
  return tensor.requires_grad() == requires_grad && tensor.scalar_type() == dtype &&
         tensor.sizes() == at::IntArrayRef(geometry->sizes) &&
         tensor.strides() == at::IntArrayRef(geometry->strides);
}

bool CellTemplate::find_weights(Graph& graph, c10::SmallVectorImpl<ValueId>& ids) const {
  const bool known = known_numbering_ == graph.numbering();
  if (!known) meet(graph, weights_);
  for (size_t w = 0; w < weights_.size(); ++w) {
    const Weight& weight = weights_[w];
    if (weight.is_detached()) return false;
    if (known && weight.is_weight && graph.still_is(known_weights_[w], weight.tensor)) {
      ids.push_back(known_weights_[w]);
      continue;
    }
    if (!weight.looks_the_same()) return false;
    ids.push_back(value_in(graph, weight.tensor, weight.is_weight));
    if (weight.in_signatures && graph.identity(graph.value(ids.back())) != weight.identity) {
      return false;
    }
    if (known && ids.back() != known_weights_[w]) asked_numbering_ = kUnknown;
  }
  if (!known) {
    known_weights_.assign(ids.begin(), ids.end());
    known_numbering_ = graph.numbering();
  }
  return true;
}

void CellTemplate::replace_traced(Scope& scope, at::ArrayRef<at::Tensor> traced) {
  Graph& graph = scope.graph();
  const size_t num_inputs = input_is_weight_.size();
  for (const uint32_t number : outputs_) {
    const bool made = number >= num_inputs && number < kFirstWeight;
    if (made && as_pending(traced[number]) == nullptr) return;
  }
  c10::SmallVector<ValueId, 8> weights;
  c10::SmallVector<ValueId, 64> ids;
  if (!find_weights(graph, weights)) return;
  for (size_t i = 0; i < num_inputs; ++i) {
    ids.push_back(value_in(graph, traced[i], input_is_weight_[i] != 0));
  }
  Report& report = scope.report();
  const uint64_t ops = report.ops, views = report.views;
  if (!apply_subgraph(scope, weights, ids)) return;
  report.ops = ops, report.views = views;  // the trace has already counted the ops
  for (const uint32_t number : outputs_) {
    if (number < num_inputs || number >= kFirstWeight) continue;
    TORCH_INTERNAL_ASSERT(ids[number] != kNone, "no step of the cell computes one of its results");
    const ValueId before = as_pending(traced[number])->value();
    if (before != ids[number]) graph.move_tensor(before, ids[number]);
  }
}

bool CellTemplate::apply_steps(Scope& scope, at::ArrayRef<ValueId> weights,
                               c10::SmallVectorImpl<ValueId>& ids) const {
  for (const Step& step : steps_) {
    const auto tensors = values_of(step.tensors, weights, ids);
    if (!apply_cached_call(scope, *step.op, step.cached, tensors, step.grad_mode, ids))
      return false;
  }
  return true;
}

// Adds one step to the graph. `ids` is indexed by tensor number.
bool CellTemplate::apply_step(Scope& scope, const Step& step, at::ArrayRef<ValueId> weights,
                              c10::SmallVectorImpl<ValueId>& ids) const {
  const auto tensors = values_of(step.tensors, weights, ids);
  c10::SmallVector<ValueId, 8> results;
  if (!apply_cached_call(scope, *step.op, step.cached, tensors, step.grad_mode, results))
    return false;
  for (size_t k = 0; k < results.size(); ++k) ids[step.first_result + k] = results[k];
  return true;
}

void CellTemplate::note_inputs(const Graph& graph, at::ArrayRef<ValueId> inputs) const {
  for (size_t i = 0; i < std::min<size_t>(inputs.size(), 64); ++i) {
    const Value& value = graph.value(inputs[i]);
    if (value.is_graph_input()) continue;
    const Signature& producer = *graph.tape().nodes[value.node].signature;
    if (producer.rule->subgraph() == nullptr) continue;
    const uint64_t bit = uint64_t{1} << i;
    if ((*compact_->waits & bit) == 0) *compact_->waits |= bit;
  }
}

void CellTemplate::apply_part(Scope& scope, const Part& part, at::ArrayRef<ValueId> weights,
                              c10::SmallVectorImpl<ValueId>& ids) const {
  const auto operands = values_of(part.operands, weights, ids);
  const bool weights_asked = asked_numbering_ == scope.graph().numbering();
  const uint64_t asks = weights_asked ? part.asks & part.of_call : part.asks;
  c10::SmallVector<ValueId, 8> results;
  apply_node(scope, part.cached, operands, asks, results);
  scope.report().ops += part.ops - 1;
  for (size_t k = 0; k < results.size(); ++k) ids[part.results[k]] = results[k];
}

bool CellTemplate::apply_subgraph(Scope& scope, at::ArrayRef<ValueId> weights,
                                  c10::SmallVectorImpl<ValueId>& ids) const {
  note_inputs(scope.graph(), ids);
  ids.resize(input_is_weight_.size() + num_results_, kNone);
  for (const uint32_t s : compact_->before) {
    if (!apply_step(scope, steps_[s], weights, ids)) return false;
  }
  if (compact_->front) apply_part(scope, *compact_->front, weights, ids);
  apply_part(scope, compact_->main, weights, ids);
  asked_numbering_ = scope.graph().numbering();
  for (const uint32_t s : compact_->views) {
    if (!apply_step(scope, steps_[s], weights, ids)) return false;
  }
  return true;
}

bool CellTemplate::differs_in_sizes(const CellTemplate& other) const {
  if (steps_.size() != other.steps_.size()) return false;
  bool differs = false;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step &a = steps_[i], &b = other.steps_[i];
    if (a.op != b.op || a.tensors != b.tensors) return false;
    if (a.cached.results.size() != b.cached.results.size()) return false;
    if (a.cached.views.size() != b.cached.views.size()) return false;
    for (size_t k = 0; k < a.cached.results.size(); ++k) {
      differs |= a.cached.results[k].geometry->sizes != b.cached.results[k].geometry->sizes;
    }
    for (size_t k = 0; k < a.cached.views.size(); ++k) {
      differs |= a.cached.views[k].geometry->sizes != b.cached.views[k].geometry->sizes;
    }
  }
  return differs;
}

std::string CellTemplate::difference(const CellTemplate& other) const {
  const auto views_as = [](const CachedCall::View& a, const CachedCall::View& b) {
    return a.geometry == b.geometry && a.offset == b.offset;
  };
  for (size_t i = 0; i < std::max(steps_.size(), other.steps_.size()); ++i) {
    if (i >= steps_.size()) return "an additional op, " + other.steps_[i].op->name;
    if (i >= other.steps_.size()) return "a missing op, " + steps_[i].op->name;
    const Step &a = steps_[i], &b = other.steps_[i];
    if (a.op != b.op) return b.op->name + " instead of " + a.op->name;
    const bool same = a.cached.signature == b.cached.signature && a.tensors == b.tensors &&
                      a.cached.operands == b.cached.operands && a.grad_mode == b.grad_mode &&
                      std::equal(a.cached.views.begin(), a.cached.views.end(),
                                 b.cached.views.begin(), b.cached.views.end(), views_as);
    if (!same) return a.op->name + " with different arguments";
  }
  for (size_t w = 0; w < std::min(weights_.size(), other.weights_.size()); ++w) {
    if (!weights_[w].tensor.is_same(other.weights_[w].tensor)) {
      return "a different tensor that is not an argument";
    }
  }
  return outputs_ == other.outputs_ ? "" : "different results";
}

std::vector<at::Tensor> CellTemplate::weights() const {
  std::vector<at::Tensor> out;
  for (const Weight& weight : weights_) out.push_back(weight.tensor);
  return out;
}

CellTrace::CellTrace(Scope& scope, at::ArrayRef<at::Tensor> inputs, bool may_have_subgraph)
    : scope_(scope), outer_(std::exchange(capture_state.trace, this)) {
  for (const at::Tensor& input : inputs) {
    numbers_.try_emplace(input.unsafeGetTensorImpl(), static_cast<uint32_t>(inputs_.size()));
    inputs_.push_back(input);
  }
  made_->input_is_weight_.resize(inputs.size());
  made_->passes_numbers_ = !may_have_subgraph;
}

CellTrace::~CellTrace() {
  if (capture_state.trace == this) capture_state.trace = outer_;
}

CellTrace* CellTrace::current() { return capture_state.trace; }

void CellTrace::break_off(const char* reason, const std::string& what) {
  CellTrace* trace = capture_state.trace;
  if (trace == nullptr || !trace->why_.empty()) return;
  trace->why_ = reason;
  trace->site_ = current_site();
  if (!what.empty()) trace->why_ += ": " + what;
}

void CellTrace::note_read(const std::string& what) {
  if (capture_state.trace == nullptr) return;
  // If a profiler records the arguments of ops, the value was read by the profiler, not by the
  // function.
  if (capture_state.trace->why_.empty())
    capture_state.trace->has_read_ = !profiler_records_arguments();
  break_off("it reads a value", what);
}

uint32_t CellTrace::number_of(c10::TensorImpl* tensor) {
  const auto [found, is_new] = numbers_.try_emplace(tensor, 0);
  if (!is_new) return found->second;
  if (as_pending(tensor) != nullptr) {
    break_off("it uses a tensor that was computed outside the cell and is not an argument", "");
  }
  const at::Tensor held(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensor));
  const at::Tensor base = base_without_autograd(held);
  for (const at::Tensor& input : inputs_) {
    if (are_one_memory(input, *tensor)) break_off("it takes the `.data` of an argument", "");
    const bool may_share = base.defined() && as_pending(input) == nullptr;
    if (may_share && input.is_alias_of(base)) break_off("it makes a view of an argument", "");
  }
  if (tensor->layout() != c10::kStrided) break_off("it uses a tensor that is not dense", "");
  auto& weights = made_->weights_;
  found->second = CellTemplate::kFirstWeight + static_cast<uint32_t>(weights.size());
  weights.push_back({.tensor = held, .identity = kUnknown, .is_weight = false, .base = base});
  return found->second;
}

void CellTrace::add(const OpInfo& op, const CallKey& key, const CachedCall& cached,
                    at::ArrayRef<at::Tensor> results) {
  if (!why_.empty()) return;
  CellTemplate::Step& step = made_->steps_.emplace_back();
  step.op = &op;
  step.cached = cached;
  step.cached.words.clear();
  step.grad_mode = grad_mode();
  for (const CallKey::Operand& operand : key.tensors()) {
    step.tensors.push_back(number_of(operand.tensor));
  }
  step.first_result = static_cast<uint32_t>(made_->input_is_weight_.size() + made_->num_results_);
  for (const at::Tensor& result : results) {
    // This result already has a number, and a tensor can have only one number.
    if (numbers_.count(result.unsafeGetTensorImpl()) != 0) {
      break_off("an op returned its argument", op.name);
    }
    numbers_[result.unsafeGetTensorImpl()] =
        static_cast<uint32_t>(made_->input_is_weight_.size() + made_->num_results_++);
    results_.emplace_back(result.getIntrusivePtr());
  }
}

// A signature identifies a view of a weight (`w.t()`) by the base of the view. The graph has no
// information about this base. So if a signature contains a view of an input, the input becomes a
// weight, because the identity of a weight is part of the key.
void CellTrace::note_viewed_weights() {
  std::unordered_map<uint32_t, uint32_t> viewed;  // for each view: number of its base
  for (const CellTemplate::Step& step : made_->steps_) {
    const auto root = [&](uint32_t number) {
      const auto found = viewed.find(number);
      return found == viewed.end() ? number : found->second;
    };
    if (step.cached.signature == nullptr) {
      for (uint32_t k = 0; k < step.num_results(); ++k) {
        viewed[step.first_result + k] = root(step.tensors[0]);
      }
      continue;
    }
    uint64_t slots = step.cached.signature->weight_slots;
    for (; slots != 0; slots &= slots - 1) {
      const uint32_t operand = step.cached.operands[static_cast<size_t>(std::countr_zero(slots))];
      if (operand == kNone) continue;
      const uint32_t tensor = step.tensors[operand];
      const uint32_t number = root(tensor);
      if (number == tensor) continue;
      if (number >= CellTemplate::kFirstWeight) {
        made_->weights_[number - CellTemplate::kFirstWeight].in_signatures = true;
      } else if (number < inputs_.size() && as_pending(inputs_[number]) == nullptr) {
        scope_.graph().value_of(inputs_[number], true);
      }
    }
  }
}

void CellTrace::check_no_read(const std::string& name) const {
  TORCH_CHECK(!has_read_, "torch_autobatch: the cell '", name, "' reads a tensor's value",
              at_site(site_), " (", why_,
              "), so its result may depend on more than its arguments. Return the tensor and read "
              "its value outside the cell, or do not make this function a cell.");
}

void raise_different(const std::string& name, const std::string& difference) {
  TORCH_CHECK(
      false, "torch_autobatch: the cell '", name, "'", at_site(current_site()),
      " behaves differently from its first call with arguments of the same kinds: ", difference,
      ". A cell's result must depend on its arguments, and on parameters and settings that "
      "stay the same while the scope is open.");
}

std::unique_ptr<CellTemplate> CellTrace::finish(at::ArrayRef<at::Tensor> outputs,
                                                CellFunction* function) {
  const Scope::Lock lock(scope_);
  Graph& graph = scope_.graph();
  for (const at::Tensor& output : outputs) {
    if (shares_memory(output)) break_off("it returns a complex view, which shares memory", "");
    made_->outputs_.push_back(number_of(output.unsafeGetTensorImpl()));
    if (made_->outputs_.back() >= CellTemplate::kFirstWeight && !output.requires_grad()) {
      // A template would return the same tensor object for all calls.
      break_off("it returns a tensor that is neither an argument nor the result of a captured op",
                "");
    }
  }
  capture_state.trace = outer_;
  if (!why_.empty()) return nullptr;
  note_viewed_weights();
  for (size_t i = 0; i < made_->input_is_weight_.size(); ++i) {
    made_->input_is_weight_[i] = is_weight(graph, inputs_[i]) ? 1 : 0;
  }
  for (CellTemplate::Weight& weight : made_->weights_) {
    weight.is_weight = is_weight(graph, weight.tensor);
    // Ops may read a tensor only through a view (C++'s Linear calls addmm with the transposed
    // weight). A tensor that is read in this way also becomes one graph input for all calls.
    // Otherwise each view would get a separate gradient.
    if (!weight.is_weight && weight.tensor.requires_grad() && !as_pending(weight.tensor)) {
      graph.weight_value_of(weight.tensor);
      weight.is_weight = is_weight(graph, weight.tensor);
    }
    weight.geometry = graph.geometries().intern(weight.tensor.sizes(), weight.tensor.strides());
    weight.requires_grad = weight.tensor.requires_grad();
    weight.dtype = weight.tensor.scalar_type();
    const ValueId id = as_pending(weight.tensor) ? kNone : graph.find_graph_input(weight.tensor);
    if (id == kNone) continue;
    weight.identity = graph.identity(graph.value(id));
    weight.in_signatures |= weight.is_weight;
  }
  if (function == nullptr || function->is_ragged) return std::move(made_);
  made_->make_compact(scope_, *function, inputs_);
  if (made_->has_subgraph()) {
    std::vector<at::Tensor> traced = inputs_;
    for (const auto& result : results_) traced.emplace_back(at::Tensor(result.lock()));
    made_->replace_traced(scope_, traced);
  }
  return std::move(made_);
}

bool CellTable::make_key(Scope& scope, uint64_t function, at::ArrayRef<at::Tensor> inputs,
                         at::ArrayRef<uint64_t> others, Key& key, Known* known) {
  const Scope::Lock lock(scope);
  CallKey call(function, scope.graph(), DispatchContext::current());
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.add(inputs[i]);
    for (size_t j = 0; j < i; ++j) {
      if (inputs[j].is_same(inputs[i])) call.add(static_cast<int64_t>(j));
    }
  }
  if (!call.valid()) return false;
  key = call.words();
  key.append(others.begin(), others.end());
  // If the numbers of tensors differ, some inputs are Python numbers, which call.tensors() does not
  // contain.
  if (known != nullptr && call.tensors().size() == inputs.size()) {
    for (const CallKey::Operand& operand : call.tensors()) known->push_back(operand.id);
  }
  return true;
}

CellTable::Entries::iterator CellTable::locate(const Key& key) {
  auto [at, end] = entries_.equal_range(hash_key(key));
  while (at != end && at->second.key != key) ++at;
  return at == end ? entries_.end() : at;
}

CellTemplate* CellTable::find(const Key& key) {
  Entry*& entry = recent(key);
  if (entry != nullptr && entry->key == key) return entry->made.get();
  const auto found = locate(key);
  if (found == entries_.end()) return nullptr;
  return (entry = &found->second)->made.get();
}

void CellTable::add(const Key& key, std::unique_ptr<CellTemplate> made, CellFunction& function) {
  remove(key);
  if (made->has_subgraph()) {
    std::vector<CellTemplate*>& others = of_function_[function.id()];
    for (const CellTemplate* other : others) {
      if (other->differs_in_sizes(*made)) function.is_ragged = true;
    }
    others.push_back(made.get());
    if (function.is_ragged) {
      for (CellTemplate* other : others) other->drop_subgraph();
      others.clear();
    }
  }
  entries_.emplace(hash_key(key), Entry{key, std::move(made)});
}

void CellTable::remove(const Key& key) {
  const auto found = locate(key);
  if (found == entries_.end()) return;
  recent(key) = nullptr;
  std::erase(of_function_[key[0]], found->second.made.get());
  entries_.erase(found);
}

}  // namespace autobatch
