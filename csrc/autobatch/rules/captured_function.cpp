#include "autobatch/rules/captured_function.h"

#include "autobatch/common/compat.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

using Calls = std::vector<std::shared_ptr<FunctionCall>>;

std::mutex calls_mutex;
std::unordered_map<int64_t, std::weak_ptr<FunctionCall>>& known_calls() {
  static auto* calls = new std::unordered_map<int64_t, std::weak_ptr<FunctionCall>>();
  return *calls;
}

FunctionHost& function_host() {
  static auto* host = new FunctionHost();
  return *host;
}

// --- the op ---

std::vector<at::Tensor> function_results(at::TensorList results, const at::Tensor& number,
                                         at::TensorList inputs) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const auto call = find_call(number.item<int64_t>());
  TORCH_CHECK(call != nullptr, "autobatch::function_results: there is no such call");
  return function_host().reapply(call, results, inputs);
}

const c10::OperatorHandle& results_op() {
  static const c10::OperatorHandle op = [] {
    auto* library =
        new torch::Library(torch::Library::FRAGMENT, "autobatch", std::nullopt, __FILE__, __LINE__);
    library->def("function_results(Tensor[] results, Tensor number, Tensor[] inputs) -> Tensor[]");
    library->impl("function_results",
                  torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &function_results));
    return c10::Dispatcher::singleton().findSchemaOrThrow("autobatch::function_results", "");
  }();
  return op;
}

// --- the rule ---

// The operands of a node are the results of forward, the number, and the tensor arguments.
class FunctionResultsRule final : public Rule {
 public:
  explicit FunctionResultsRule(FunctionTraits traits) : traits_(std::move(traits)) {}

  std::shared_ptr<FunctionCall> call_of(const Tape& tape, const Node& node) const {
    const ValueId number = tape.operands[node.first_operand + traits_.saved_results.size()];
    const at::Tensor& data = tape.graph_inputs[tape.values[number].index].data;
    auto call = find_call(*data.const_data_ptr<int64_t>());
    TORCH_INTERNAL_ASSERT(call != nullptr);
    return call;
  }

  bool saves() const override { return traits_.saves; }
  // Backward runs the user's code, which may use autograd.
  bool below_autograd() const override { return false; }
  bool reads(size_t slot) const override {
    // Backward with create_graph reads the results of forward, because forward does not run again.
    // A result that is a view of an argument is not read, because the view is created again.
    if (slot < traits_.saved_results.size()) return !traits_.shares_memory;
    return slot >= first_input() && traits_.saved_inputs[slot - first_input()] != 0;
  }
  bool reads_result(uint32_t k) const override { return traits_.saved_results[k] != 0; }

  bool capture(NodeBuilder& builder) const override {
    builder.do_not_cache();
    std::vector<Value> results;
    for (size_t k = 0; k < traits_.saved_results.size(); ++k) {
      results.push_back(builder.operand(0, k));
      builder.key(dtype_word(results.back()));
      if (!fits(builder, results.back())) {
        builder.leave_to_eager();
        return false;
      }
    }
    builder.operand(1);
    for (size_t i = 0; i < traits_.saved_inputs.size(); ++i) {
      const Value input = builder.operand(2, i);
      builder.key(dtype_word(input) << 1 | (input.requires_grad ? 1 : 0));
    }
    for (const Value& result : results) builder.result(result.geometry, result.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    for (size_t k = 0; k < traits_.saved_results.size(); ++k) copy_result(batch, k);
    if (!batch.needs_grad()) return;
    auto calls = std::make_shared<Calls>();
    for (int64_t m = 0; m < batch.size(); ++m) {
      calls->push_back(call_of(batch.tape(), batch.node(m)));
    }
    batch.record().kept = std::move(calls);
  }

  void backward(BackwardBatch& batch) const override {
    // Members are grouped by the set of results that gradients have reached.
    std::map<uint8_t, std::vector<NodeId>> alike;
    for (int64_t m = 0; m < batch.size(); ++m) alike[batch.reached(m)].push_back(batch.member(m));
    for (const auto& [reached, members] : alike) {
      BackwardBatch part = batch.part(members);
      run_backward(part);
    }
  }

 private:
  size_t first_input() const { return traits_.saved_results.size() + 1; }

  // Whether a slab can hold the result. If the result shares the memory of an argument, the graph
  // must also be able to describe the sharing (shared_memory.h).
  bool fits(NodeBuilder& builder, const Value& result) const {
    if (result.geometry->overlapping || result.geometry->extent != result.geometry->numel) {
      return false;
    }
    if (!traits_.shares_memory) return true;
    const Value& base = builder.graph().value(result.base);
    return traits_.saved_results.size() == 1 && !base.is_graph_input() &&
           result.geometry->numel > 0 && !builder.context().inference_mode &&
           !builder.graph().is_written(builder.operands()[0]);
  }

  static void copy_result(Batch& batch, size_t k) {
    bool contiguous = true;
    for (int64_t m = 0; m < batch.size(); ++m) {
      contiguous = contiguous && batch.result_value(m, k).geometry->contiguous;
    }
    if (contiguous) {
      batch.output(k).copy_(batch.flat(k));
      return;
    }
    for (int64_t m = 0; m < batch.size(); ++m) {
      region_view(batch.result_region(m, k)).copy_(region_view(batch.operand_region(m, k)));
    }
  }

  template <class ValueOf>
  static MemberTensors tensors_of(const BackwardBatch& batch, at::Tensor flat,
                                  const ValueOf& value_of) {
    MemberTensors tensors{std::move(flat), {}, value_of(0).requires_grad};
    for (int64_t m = 0; m < batch.size(); ++m) {
      tensors.sizes.emplace_back(value_of(m).geometry->sizes);
    }
    return tensors;
  }

  FunctionBackward calls_of(BackwardBatch& batch) const {
    FunctionBackward made;
    const auto& calls = *static_cast<const Calls*>(batch.record().kept.get());
    for (const int64_t at : batch.positions()) made.calls.push_back(calls[at]);
    for (size_t k = 0; k < traits_.saved_results.size(); ++k) {
      const auto value_of = [&](int64_t m) { return batch.result_value(m, k); };
      const bool reached = (batch.reached(0) >> std::min<size_t>(k, 7) & 1) != 0;
      made.gradients.push_back(
          tensors_of(batch, reached ? batch.grad_flat(k) : at::Tensor(), value_of));
      made.gradients.back().requires_grad = false;
      made.results.push_back(
          tensors_of(batch, reads_result(k) ? batch.result_flat(k) : at::Tensor(), value_of));
    }
    for (size_t i = 0; i < traits_.saved_inputs.size(); ++i) {
      const size_t slot = first_input() + i;
      made.wanted.push_back(batch.needs(slot) ? 1 : 0);
      made.shared.push_back(batch.size() > 1 && batch.shared(slot) ? 1 : 0);
      const bool is_needed = traits_.saved_inputs[i] == 1;
      made.inputs.push_back(tensors_of(batch, is_needed ? batch.flat(slot) : at::Tensor(),
                                       [&](int64_t m) { return batch.operand_value(m, slot); }));
    }
    return made;
  }

  void run_backward(BackwardBatch& batch) const {
    const FunctionBackward calls = calls_of(batch);
    const std::vector<InputGradient> gradients = function_host().backward(calls);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].members.empty()) continue;
      if (calls.shared[i] != 0) {
        batch.add_single(first_input() + i, gradients[i].flat.view(calls.inputs[i].sizes[0]));
        continue;
      }
      std::vector<NodeId> members;
      for (const size_t m : gradients[i].members) members.push_back(batch.member(m));
      batch.part(members).add(first_input() + i, gradients[i].flat);
    }
  }

  const FunctionTraits traits_;
};

}  // namespace

FunctionCall::FunctionCall() {
  static std::atomic<int64_t> made{int64_t{1} << 32};
  number_ = ++made;
}

FunctionCall::~FunctionCall() {
  const std::scoped_lock lock(calls_mutex);
  known_calls().erase(number_);
}

std::shared_ptr<FunctionCall> find_call(int64_t number) {
  const std::scoped_lock lock(calls_mutex);
  const auto found = known_calls().find(number);
  return found == known_calls().end() ? nullptr : found->second.lock();
}

void FunctionCall::add(const std::shared_ptr<FunctionCall>& call) {
  const std::scoped_lock lock(calls_mutex);
  known_calls()[call->number()] = call;
}

void set_function_host(FunctionHost host) { function_host() = std::move(host); }

const OpInfo& function_results_op(const FunctionTraits& traits) {
  static auto* known = new std::map<FunctionTraits, std::unique_ptr<OpInfo>>();
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  std::unique_ptr<OpInfo>& info = (*known)[traits];
  if (info == nullptr) {
    info = std::make_unique<OpInfo>(results_op(), traits.name);
    info->action = Action::kDefer;
    info->num_arguments = 3;
    info->rules = {new FunctionResultsRule(traits)};
    info->reinterprets = traits.shares_memory;
    info->is_function = true;
  }
  return *info;
}

}  // namespace autobatch
