// Capture: what every op that is called while a scope is open goes through.
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

// Registers all that follows on compat::kDeferKey, once a process (a second time would abort it).
void register_capture();
void register_unboxed(torch::Library& library);  // capture_unboxed.cpp

// The boxed fallback: takes the op's arguments from the stack and leaves its results.
void capture(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
// The same of an op by another name than its own.
AUTOBATCH_INTERNAL void capture_as(const OpInfo& info, c10::DispatchKeySet keys,
                                   torch::jit::Stack* stack);

// This thread's scope, if ops are to be captured now.
AUTOBATCH_INTERNAL Scope* capturing_scope();
Scope* capturing_scope(const CaptureState& state);
// From now on ops of this thread run at once although a scope is open, or are captured again.
// Without a scope it has no effect. Returns the setting before.
AUTOBATCH_INTERNAL bool set_eager(bool eager);
// From now on ops of this thread on tensors from outside the scope alone (indices, masks) are
// captured too: for code whose results are known to lead to captured ops. Returns the setting
// before.
AUTOBATCH_INTERNAL bool set_captures_data(bool captures);
AUTOBATCH_INTERNAL bool captures_data();
// Whether a tensor that the program makes from a Python number becomes pending: ops are captured,
// no cell is traced (to a cell it is a constant), and inference mode is off.
AUTOBATCH_INTERNAL bool captures_numbers();

// What calls of this thread depend on besides their arguments (dispatch_context.h), as one word.
AUTOBATCH_INTERNAL uint64_t context_word();
// This thread's scope, if its ops are to run at once by `set_eager`.
Scope* eager_scope(const CaptureState& state);
// Who must see each op run, and so keeps it from being captured.
struct Watcher {
  std::string name;  // "anomaly mode"
  std::string ops = "ops under " + name;
};
// Null if nobody does but autograd's own engine.
const Watcher* watcher(const CaptureState& state);

// Why an op runs at once: the report knows reasons by their addresses.
inline constexpr const char* kNeedsValues = "needs values";

// Whether reading the tensor flushes nothing: it is no pending one, or known (known_values.h).
AUTOBATCH_INTERNAL bool is_known(const at::Tensor& tensor);

// Whether it bears a tangent of forward-mode AD.
bool has_tangent(const at::Tensor& tensor);

// Whether what a call becomes follows from its CallKey alone (call_cache.h).
bool may_recall(Scope& scope);
// And whether cells' templates may be applied: these don't know of writes.
AUTOBATCH_INTERNAL bool may_apply_cells(Scope& scope);

}  // namespace autobatch
