// A call like one captured before, for whoever has its arguments at hand and no dispatcher's call
// of them: Python, whose bindings take as long to read arguments as capturing the call does.
#pragma once

#include "autobatch/capture/node_builder.h"

#include <c10/util/FunctionRef.h>

namespace autobatch {

// One argument of a call. What it refers to is the caller's.
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
    kIntTensor,  // a number where the op wants a tensor
    kDoubleTensor,
  };
  Kind kind = Kind::kNone;
  union {
    int64_t integer = 0;  // kInt, kBool, kIntTensor
    double number;        // kDouble, kDoubleTensor
    const at::Tensor* tensor;
    const at::Tensor* const* tensors;  // so many
    const int64_t* integers;           // so many
    const char* text;                  // so many
  };
  size_t size = 0;
};

// Captures a call of the op, with an argument for each of its schema's, as the last one like it,
// and hands its results to `take`, before another thread can see them: one list of tensors, if
// `list`, rather than so many. False, with nothing done, where the dispatcher has to be asked:
// there was no call like it, somebody else sees the calls of this thread first, or a cell's call is
// traced.
using Take = c10::function_ref<void(Graph& graph, at::ArrayRef<ValueId> results, bool list)>;
AUTOBATCH_INTERNAL bool try_cached_call(const OpInfo& op, at::ArrayRef<Argument> arguments,
                                        Take take);

// The same of a call that the key is of, whoever else is there.
bool try_cached_call(Scope& scope, const OpInfo& op, CallKey& key, Recorded& recorded);

// Whether calls of the op are remembered. Factories decide by more than their arguments, but for
// those that are asked of a pending tensor (`new_zeros`).
bool is_recalled(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);

}  // namespace autobatch
