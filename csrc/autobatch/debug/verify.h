// `batch(verify=True)`: every captured op also runs eagerly, and each flush compares the values.
#pragma once

#include "autobatch/graph/op_registry.h"
#include "autobatch/rules/flush_record.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace autobatch {

// Holds the eager value of every captured value. Gradients are not compared. Results of random ops,
// and values computed from them, have no eager counterpart and are left out.
class Verifier {
 public:
  // Runs the op on the eager values of its arguments. `results` are the captured values of its
  // results.
  void note(Graph& graph, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
            at::ArrayRef<ValueId> results);
  // Raises an error for the first result, in capture order, that differs from the eager one by more
  // than rounding. The error names the op, the difference, the rule that ran it and the line that
  // captured it.
  void check(const FlushRecord& record) const;
  void clear() { expected_.clear(); }

 private:
  struct Expected {
    at::Tensor tensor;
    std::string site;
  };
  std::unordered_map<ValueId, Expected> expected_;
};

// Raises an error if `again`, a recomputed result of an op, differs from `before` by more than
// rounding.
void check_recomputed(const at::Tensor& again, const at::Tensor& before,
                      const Signature& signature);

}  // namespace autobatch
