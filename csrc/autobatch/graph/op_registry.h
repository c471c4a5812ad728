// What capture does with each op: one table, and what follows from the op's schema where the
// table is silent.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/dispatch_context.h"
#include "autobatch/graph/view_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

namespace autobatch {

class Rule;

enum class Action : uint8_t {
  kDefer,      // becomes a node
  kView,       // address arithmetic on a pending tensor
  kMetadata,   // reads sizes or types only: runs on the pending tensor as it is
  kFactory,    // `zeros`, `full_like`, `new_ones`: a node, where it is a plain tensor that is made;
               // else runs at once, on a stand-in for a pending argument
  kDecompose,  // composite that may return its argument: its parts are captured
  kAtOnce,     // needs values, or has effects: what it reads is computed, then it runs
  kMutate,     // writes to an argument: as kAtOnce, and what has read that memory runs first
};

// What an in-place op writes to its argument 0.
enum class WriteKind : uint8_t {
  kNone,     // not deferred: writes to something else as well, or has no functional counterpart
  kZero,     // zeros
  kGiven,    // its argument 1: `copy_`, `fill_`
  kCompute,  // what its functional counterpart returns
};

// How autograd differentiates an in-place op, next to its functional counterpart.
enum class InPlaceFormula : uint8_t {
  kSame,
  kNone,             // not at all: backward raises an error
  kOfPositiveSlope,  // from the result, which does only where argument 1 is not negative
};

struct OpInfo {
  OpInfo(const c10::OperatorHandle& op, std::string op_name)
      : handle(op), name(std::move(op_name)) {}

  // Its action for a call: one that writes nothing is no write.
  Action action_on(at::ArrayRef<c10::IValue> arguments) const;
  // Whether autocast casts its arguments; perhaps those of its parts.
  bool casts(const DispatchContext& context) const {
    return (context.autocast_cpu && cast_on_cpu) || (context.autocast_cuda && cast_on_cuda);
  }
  bool may_cast_within(const DispatchContext& context) const {
    return context.autocast() && composite && !is_dropout;
  }

  c10::OperatorHandle handle;
  std::string name;  // "aten::add.Tensor"
  Action action = Action::kAtOnce;
  std::vector<const Rule*> rules;  // native ones, in the order to try them
  ViewFunction view = nullptr;     // for kView; null: through the op's Meta kernel
  uint64_t weight_arguments = 0;   // bit i: argument i is a weight by its name
  uint64_t written_arguments = 0;  // bit i: argument i is written to
  WriteKind write = WriteKind::kNone;
  std::optional<c10::OperatorHandle> functional;  // for WriteKind::kCompute
  InPlaceFormula in_place_formula = InPlaceFormula::kSame;
  size_t num_arguments = 0;
  bool cuts_gradient = false;  // `detach`: the result requires no grad
  bool unsafe_split = false;   // its results are no views to autograd
  bool integral_only = false;  // of a tensor of another type eager raises an error
  bool always_defer = false;   // worth batching even on ordinary tensors
  bool is_verdict = false;     // one truth, which code asks for at once: not worth a flush
  bool random = false;
  bool composite = false;    // its kernel calls other ops and nothing else
  bool in_parts = false;     // where it can't be captured, they can
  bool is_dropout = false;   // autocast casts nothing in it
  bool cast_on_cpu = false;  // by autocast
  bool cast_on_cuda = false;
  bool is_cast = false;           // what autocast calls
  int writes_if_argument = -1;    // of a write that its schema does not say: only with this flag
  bool keeps_statistics = false;  // writes to `running_mean`, which its schema does not say
  int index_argument = -1;        // `Tensor?[] indices`, of argument 0
  int dropout_argument = -1;      // of a random op: without dropout it is not
};

// The record of this op, made on first use and kept for the life of the process.
const OpInfo& op_info(const c10::OperatorHandle& op);
AUTOBATCH_INTERNAL const OpInfo& find_op(const char* name, const char* overload);

// --- of the rules (rules/rule.cpp, rules/pointwise.cpp) ---

// The native ones for this op ("aten::add.Tensor"), in the order to try them.
std::vector<const Rule*> find_native_rules(std::string_view op);
// Any elementwise op, of instances of any length.
const Rule& pointwise_rule();

}  // namespace autobatch
