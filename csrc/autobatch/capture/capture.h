// The entry points of capture, for every op that is called while a scope is open.
#pragma once

#include "autobatch/common/compat.h"
#include "autobatch/export.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch {
class Library;
}

namespace autobatch {

class Scope;
struct CaptureState;
struct OpInfo;

inline constexpr c10::DispatchKeySet kBelowCapture(c10::DispatchKeySet::FULL_AFTER,
                                                   compat::kDeferKey);

// Registers the kernels of capture on compat::kDeferKey. Later calls do nothing, because a second
// registration would abort the process.
void register_capture();
void register_unboxed(torch::Library& library);  // defined in capture_unboxed.cpp

// The boxed fallback: pops the op's arguments from the stack and pushes its results.
void capture(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// Like capture(), for a caller that has the OpInfo (each custom function has its own OpInfo).
AUTOBATCH_INTERNAL void capture_as(const OpInfo& info, c10::DispatchKeySet keys,
                                   torch::jit::Stack* stack);

// Returns this thread's scope if ops are captured now, else null.
AUTOBATCH_INTERNAL Scope* capturing_scope();
Scope* capturing_scope(const CaptureState& state);
// Like capturing_scope(), but also returns null if calls of this thread bypass the kernels of
// capture. Used by code that handles a call before the dispatcher.
AUTOBATCH_INTERNAL Scope* reached_scope();
// Sets whether ops of this thread run eagerly although a scope is open. Has no effect without a
// scope. Returns the previous setting.
AUTOBATCH_INTERNAL bool set_eager(bool eager);
// Sets whether this thread also captures ops whose tensors all come from outside the scope
// (indices, masks). Used for code whose results are known to become operands of captured ops.
// Returns the previous setting.
AUTOBATCH_INTERNAL bool set_captures_data(bool captures);
AUTOBATCH_INTERNAL bool captures_data();
// Whether a tensor that the program makes from a Python number becomes pending. The tensor becomes
// pending if ops are captured, no cell is traced (a cell treats the tensor as a constant), and
// inference mode is off.
AUTOBATCH_INTERNAL bool captures_numbers();

// Returns this thread's dispatch context (dispatch_context.h) as one word. The dispatch context and
// the arguments of a call determine how the call is captured.
AUTOBATCH_INTERNAL uint64_t context_word();
// Returns this thread's scope if ops run eagerly because of `set_eager`, else null.
Scope* eager_scope(const CaptureState& state);
// A PyTorch feature that must observe each op when it runs and therefore prevents capture.
struct Watcher {
  std::string name;  // such as "anomaly mode"
  std::string ops = "ops under " + name;
};
// Returns the watcher of this thread. Returns null if there is no watcher besides autograd's
// engine.
const Watcher* watcher(const CaptureState& state);

// Reasons for running an op eagerly. The reasons are shared constants, because the report compares
// reasons by address.
inline constexpr const char* kNeedsValues = "needs values";
inline constexpr const char* kMayBeCaught = "the program may catch its error";

// Whether the tensor can be read without a flush. Returns true if the tensor is not pending, or if
// its value is known (known_values.h).
AUTOBATCH_INTERNAL bool is_known(const at::Tensor& tensor);

// Whether the tensor has a tangent of forward-mode AD.
bool has_tangent(const at::Tensor& tensor);

// Whether cached calls may be used. Cached calls may be used if the CallKey of a call is sufficient
// to determine how the call is captured (call_cache.h). Returns false with the options
// `max_pending` and `verify`.
bool may_use_call_cache(Scope& scope);
// Whether a cached call may even be used before Call::run has checked the memory of its arguments
// (memory_order.h).
bool may_use_call_cache_first(Scope& scope);
// Whether the templates of cells may be applied. In addition to the conditions for cached calls,
// the graph must have no captured writes, because templates do not account for captured writes.
AUTOBATCH_INTERNAL bool may_apply_cells(Scope& scope);

}  // namespace autobatch
