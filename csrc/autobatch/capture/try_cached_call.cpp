#include "autobatch/capture/try_cached_call.h"

#include "autobatch/capture/capture.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/scope/scope.h"

#include <ATen/record_function.h>

#include <bit>
#include <optional>
#include <string_view>

namespace autobatch {
namespace {

// Whether the dispatcher would call capture first, and no profiler records the dispatcher's calls.
bool comes_first(const CaptureState& state) {
  const c10::DispatchKeySet keys = state.keys->included() - state.keys->excluded();
  return keys.highestPriorityTypeId() == compat::kDeferKey &&
         !keys.has_any(compat::kBeforeCapture) &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

void add(CallKey& key, const Argument& argument) {
  using Kind = Argument::Kind;
  switch (argument.kind) {
    case Kind::kNone:
      return key.add(std::optional<int64_t>());
    case Kind::kTensor:
      return key.add(*argument.tensor);
    case Kind::kTensors:
      return key.add_list({argument.tensors, argument.size});
    case Kind::kInt:
      return key.add(argument.integer);
    case Kind::kInts:
      return key.add(at::IntArrayRef(argument.integers, argument.size));
    case Kind::kBool:
      return key.add(argument.integer != 0);
    case Kind::kDouble:
      return key.add(argument.number);
    case Kind::kString:
      return key.add(std::string_view(argument.text, argument.size));
    case Kind::kIntTensor:
      return key.add_number(at::kLong, static_cast<uint64_t>(argument.integer));
    case Kind::kDoubleTensor:
      return key.add_number(at::kDouble, std::bit_cast<uint64_t>(argument.number));
  }
}

}  // namespace

bool try_cached_call(Scope& scope, const OpInfo& op, CallKey& key, Recorded& recorded) {
  if (!key.valid()) return false;
  c10::SmallVector<ValueId, 8> results;
  const CachedCall* cached = record_known(scope, op, key, results);
  if (cached == nullptr) return false;
  for (const ValueId id : results) recorded.tensors.push_back(make_pending(scope.graph(), id));
  recorded.list = cached->returns_list();
  if (CellTrace* trace = CellTrace::current()) [[unlikely]] {
    trace->add(op, key, *cached, recorded.tensors);
  }
  return true;
}

bool can_be_cached(const OpInfo& op, at::ArrayRef<c10::IValue> arguments) {
  if (op.action == Action::kFactory) {
    return arguments[0].isTensor() && as_pending(arguments[0].toTensor()) != nullptr;
  }
  return op.action == Action::kDefer || op.action == Action::kView;
}

bool try_cached_call(const OpInfo& op, at::ArrayRef<Argument> arguments, Take take) {
  const CaptureState& state = CaptureState::current();
  if (state.trace != nullptr || !comes_first(state)) return false;
  Scope* scope = capturing_scope(state);
  if (scope == nullptr) return false;
  const Scope::Lock lock(*scope);
  if (!may_use_call_cache_first(*scope)) return false;
  CallKey key(op, scope->graph(), CallContext(state), scope->tables().calls.next());
  for (const Argument& argument : arguments) add(key, argument);
  if (!key.valid()) return false;
  c10::SmallVector<ValueId, 8> results;
  const CachedCall* cached = record_known(*scope, op, key, results);
  if (cached == nullptr) return false;
  take(scope->graph(), results, cached->returns_list());
  return true;
}

}  // namespace autobatch
