// The arguments of one call that is captured.
#pragma once

#include "autobatch/graph.h"
#include "autobatch/op_info.h"

#include <ATen/core/ivalue.h>

namespace autobatch {

// What the arguments of one call are, found in one pass.
struct Scan {
  bool pending = false;  // some tensor is pending
  bool requires_grad = false;
  bool weight = false;   // some tensor in a weight position
  bool plain = true;     // every tensor is an ordinary dense one that the op may take
  bool foreign = false;  // some tensor is pending in another scope, lost, or a leaf
};

Scan scan(const OpInfo& info, const Graph& graph, at::ArrayRef<c10::IValue> arguments);

// Flushes what the pending arguments need. The report's reason is the op's name, then `separator`
// and `reason`.
void make_real(const OpInfo& info, at::ArrayRef<c10::IValue> arguments, const char* separator,
               const char* reason);

}  // namespace autobatch
