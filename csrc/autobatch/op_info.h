// What capture does with each op: one table, and what follows from the op's schema where the
// table is silent.
#pragma once

#include "autobatch/views.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace autobatch {

class Rule;

enum class Action : uint8_t {
  kDefer,      // becomes a node
  kView,       // address arithmetic on a pending tensor
  kMetadata,   // reads sizes or types only: runs on the pending tensor as it is
  kFactory,    // `*_like`, `new_*`: runs at once on a stand-in of the same metadata
  kDecompose,  // composite that may return its argument: its parts are captured
  kAtOnce,     // needs values, or has effects: what it reads is computed, then it runs
  kMutate,     // writes to an argument: as kAtOnce, and what has read that memory runs first
};

struct OpInfo {
  OpInfo(const c10::OperatorHandle& op, std::string op_name)
      : handle(op), name(std::move(op_name)) {}

  c10::OperatorHandle handle;
  std::string name;  // "aten::add.Tensor"
  Action action = Action::kAtOnce;
  std::vector<const Rule*> rules;  // native ones, in the order to try them
  ViewFunction view = nullptr;     // for kView; null: through the op's Meta kernel
  uint64_t weight_arguments = 0;   // bit i: argument i is a weight by its name
  uint64_t written_arguments = 0;  // bit i: argument i is written to
  size_t num_arguments = 0;
  bool cuts_gradient = false;  // `detach`: the result requires no grad
  bool always_defer = false;   // worth batching even on ordinary tensors
  bool random = false;
  int dropout_argument = -1;  // of a random op: without dropout it is not
};

// The record of this op, made on first use and kept for the life of the process.
const OpInfo& op_info(const c10::OperatorHandle& op);

}  // namespace autobatch
