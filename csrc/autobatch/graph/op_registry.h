// Defines how each op is captured. A table lists the actions of the ops that need special
// treatment. For all other ops, the action follows from the schema.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/dispatch_context.h"
#include "autobatch/graph/view_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

namespace autobatch {

class Rule;
struct Decomposition;

enum class Action : uint8_t {
  kDefer,     // becomes a node
  kView,      // becomes a view, by address arithmetic on a pending tensor
  kMetadata,  // reads sizes or types only: runs on the pending tensor without a flush
  // Ops such as `zeros`, `full_like` and `new_ones`. The op becomes a node if the result is a plain
  // tensor. Otherwise the op runs eagerly, with a stand-in for each pending argument.
  kFactory,
  // A composite op that may return its argument, or that calls ops with native rules. The ops that
  // it calls are captured.
  kDecompose,
  kAtOnce,  // the op needs values or has effects, and runs once its arguments are computed
  // Writes to an argument. The write is deferred if `OpInfo::write` describes the written value
  // (deferred_writes.h). Any other write is handled like kAtOnce, but pending readers of the memory
  // run first.
  kMutate,
};

// The values that an op writes. Unless stated otherwise, the op writes to its argument 0.
enum class WriteKind : uint8_t {
  kNone,     // not deferred: writes to other memory too, or has no functional counterpart
  kZero,     // zeros
  kGiven,    // the value of argument 1 (`copy_`, `fill_`)
  kCompute,  // the result of its functional counterpart
  kOut,      // like kCompute, but writes to the last argument (out_variants.h)
};

// How autograd differentiates an in-place op, compared with its functional counterpart.
enum class InPlaceFormula : uint8_t {
  kSame,
  kNone,  // no formula: backward raises an error
  // The formula uses the result of the op, and is correct only if argument 1 is not negative.
  kOfPositiveSlope,
};

struct OpInfo {
  OpInfo(const c10::OperatorHandle& op, std::string op_name)
      : handle(op), name(std::move(op_name)) {}

  // Returns the action for a call. The action of a kMutate op is kDefer if the op writes nothing
  // with these arguments.
  Action action_on(at::ArrayRef<c10::IValue> arguments) const;
  // Whether autocast casts arguments of the op.
  bool casts(const DispatchContext& context) const {
    return (context.autocast_cpu && cast_on_cpu) || (context.autocast_cuda && cast_on_cuda);
  }
  // Whether autocast may cast arguments of ops that the op calls.
  bool may_cast_within(const DispatchContext& context) const {
    return context.autocast() && composite && !is_dropout;
  }

  c10::OperatorHandle handle;
  std::string name;  // "aten::add.Tensor"
  Action action = Action::kAtOnce;
  std::vector<const Rule*> rules;  // native rules, in the order in which they are tried
  std::vector<const Decomposition*> decompositions;  // used if no native rule covers a call
  ViewFunction view = nullptr;     // for kView; null: the Meta kernel computes the view
  uint64_t weight_arguments = 0;   // bit i: argument i has the name of a weight
  uint64_t written_arguments = 0;  // bit i: argument i is written to
  WriteKind write = WriteKind::kNone;
  // The functional counterpart, for WriteKind::kCompute and kOut and in-place view ops
  // (`unsqueeze_`).
  std::optional<c10::OperatorHandle> functional;
  InPlaceFormula in_place_formula = InPlaceFormula::kSame;
  size_t num_arguments = 0;
  bool cuts_gradient = false;   // `detach`: the result requires no grad
  bool reinterprets = false;    // copies memory that the result shares in eager (shared_memory.h)
  bool conjugates = false;      // `autobatch::conjugate`, which stands for `_conj`
  bool is_function = false;     // a custom autograd.Function (rules/captured_function.h)
  bool sees_conjugate = false;  // behaves differently if its argument is a result of `_conj`
  bool unsafe_split = false;    // `unsafe_split` etc.: autograd does not treat results as views
  bool integral_only = false;   // eager raises an error for floating-point tensors
  bool always_defer = false;    // worth batching even on ordinary tensors
  bool is_verdict = false;      // returns one bool; runs without a flush on the result of a factory
  bool fails_for_values = false;  // the op runs immediately if the program may catch its error
  bool random = false;
  bool composite = false;         // its kernel only calls other ops
  bool decomposes = false;        // the ops that it calls can be captured instead of the op
  bool is_dropout = false;        // dropout op with a native rule: autocast casts nothing in it
  bool cast_on_cpu = false;       // autocast on a CPU casts its arguments
  bool cast_on_cuda = false;      // autocast on the accelerator casts its arguments
  bool is_cast = false;           // `to.dtype`, which autocast calls
  int writes_if_argument = -1;    // if >= 0: flag argument that makes the op update its statistics
  bool keeps_statistics = false;  // writes to `running_mean`, which the schema does not declare
  int index_argument = -1;        // of the argument `indices` (Tensor?[]); -1: none
  int dropout_argument = -1;  // position of a dropout probability; if it is 0, the op is not random
};

// Returns the OpInfo of this op. The OpInfo is made on first use and kept until the process ends.
const OpInfo& op_info(const c10::OperatorHandle& op);
AUTOBATCH_INTERNAL const OpInfo& find_op(const char* name, const char* overload);

// --- implemented in rules/ ---

// Returns the native rules for the op ("aten::add.Tensor"), in the order in which they are tried.
std::vector<const Rule*> find_native_rules(std::string_view op);
// Returns the decompositions of the op, in the order in which they are tried
// (rules/decompositions.h).
std::vector<const Decomposition*> find_decompositions(std::string_view op);
// Returns the rule for any elementwise op. Operands of different instances may have different
// sizes.
const Rule& rule_of_tagged_ops();

}  // namespace autobatch
