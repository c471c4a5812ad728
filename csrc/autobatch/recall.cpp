#include "autobatch/recall.h"

#include "autobatch/capture.h"
#include "autobatch/cell.h"
#include "autobatch/compat.h"
#include "autobatch/scope.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <bit>
#include <optional>

namespace autobatch {
namespace {

// Whether the dispatcher would come to us first, and nobody (a profiler) hears of its calls.
bool comes_first() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return (keys.included_ - keys.excluded_).highestPriorityTypeId() == compat::kDeferKey &&
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
    case Kind::kIntTensor:
      return key.add_number(at::kLong, static_cast<uint64_t>(argument.integer));
    case Kind::kDoubleTensor:
      return key.add_number(at::kDouble, std::bit_cast<uint64_t>(argument.number));
  }
}

}  // namespace

const OpInfo& find_op(const std::string& name, const std::string& overload) {
  return op_info(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
}

bool recall(Scope& scope, const OpInfo& op, const CallKey& key, Recorded& recorded) {
  const Recipe* recipe = key.valid() ? record_known(scope, op, key, recorded) : nullptr;
  if (recipe == nullptr) return false;
  if (CellTrace* trace = CellTrace::current()) [[unlikely]] {
    trace->add(op, key, *recipe, recorded.tensors);
  }
  return true;
}

bool recall(const OpInfo& op, at::ArrayRef<Argument> arguments, Recorded& recorded) {
  Scope* scope = comes_first() ? capturing_scope() : nullptr;
  if (scope == nullptr) return false;
  const Scope::Lock lock(*scope);
  if (!may_recall(*scope)) return false;
  CallKey key(op, scope->graph(), DispatchContext::current());
  for (const Argument& argument : arguments) add(key, argument);
  return recall(*scope, op, key, recorded);
}

}  // namespace autobatch
