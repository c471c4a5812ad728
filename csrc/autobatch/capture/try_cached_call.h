// Captures a call in the same way as an earlier call, without the dispatcher. Python calls these
// functions directly, and not through PyTorch's bindings. In the bindings, parsing the arguments
// would take about as much time as the whole capture.
#pragma once

#include "autobatch/capture/record_call.h"

#include <c10/util/FunctionRef.h>

namespace autobatch {

// One argument of a call. The caller owns the memory that the pointers refer to.
struct Argument {
  enum class Kind : uint8_t {
    kNone,
    kTensor,
    kTensors,
    kInt,
    kInts,
    kBool,
    kDouble,
    kString,
    kIntTensor,  // a number in place of a tensor
    kDoubleTensor,
  };
  Kind kind = Kind::kNone;
  union {
    int64_t integer = 0;  // for kInt, kBool and kIntTensor
    double number;        // for kDouble and kDoubleTensor
    const at::Tensor* tensor;
    const at::Tensor* const* tensors;  // for kTensors: `size` tensors
    const int64_t* integers;           // for kInts: `size` integers
    const char* text;                  // for kString: `size` characters
  };
  size_t size = 0;
};

// Captures a call of the op in the same way as the earlier call with an equal CallKey. Passes the
// results to `take` before another thread can access them. `arguments` has one entry for each
// argument of the op's schema. `list` tells whether the results form one Tensor[]. Returns false,
// with nothing done, if no earlier call has an equal key or if the call has to go through the
// dispatcher. A call has to go through the dispatcher if a profiler or another dispatch key must
// handle it first, or if a cell is being traced.
using Take = c10::function_ref<void(Graph& graph, at::ArrayRef<ValueId> results, bool list)>;
AUTOBATCH_INTERNAL bool try_cached_call(const OpInfo& op, at::ArrayRef<Argument> arguments,
                                        Take take);

// Captures the call with this key in the same way as the earlier call with an equal key, and
// appends the results to `recorded`. Returns false, with nothing done, if there is no earlier call
// with an equal key. The caller must have checked that the call can be captured now.
bool try_cached_call(Scope& scope, const OpInfo& op, CallKey& key, Recorded& recorded);

// Whether calls of the op are cached. Calls of a factory are not cached, because the result of a
// factory depends on more than the arguments. Factories that are called on a pending tensor
// (`new_zeros`) are an exception.
bool can_be_cached(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch
