// `batch(verify=True)`: every captured op also runs eagerly, and each flush compares its results
// with the eager values.
#pragma once

#include "autobatch/graph/op_registry.h"
#include "autobatch/rules/flush_record.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>

namespace autobatch {

// Stores, for every captured value, the value that the op returns in eager mode. Gradients are not
// compared. Results of random ops, and values that depend on random results, are not compared
// either.
class Verifier {
 public:
  // Runs the op on the eager values of its arguments. `results` are the captured values of its
  // results.
  void note(Graph& graph, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
            at::ArrayRef<ValueId> results);
  // Compares the results in capture order. Raises an error at the first result whose difference
  // from the eager value is larger than rounding. The error names the op, the difference, the rule
  // that ran the op, and the line that captured the op.
  void check(const FlushRecord& record) const;
  void clear() { expected_.clear(); }

 private:
  struct Expected {
    at::Tensor tensor;
    std::string site;
    double tolerance = 0;  // tolerance of the least exact dtype that `tensor` was computed from
  };
  std::unordered_map<ValueId, Expected> expected_;
};

// `before` is a result of an op, and `again` is the same result, computed again. Raises an error if
// their difference is larger than rounding.
void check_recomputed(const at::Tensor& again, const at::Tensor& before,
                      const Signature& signature);

}  // namespace autobatch
