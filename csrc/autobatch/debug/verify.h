// `batch(verify=True)`: every captured op also runs eagerly, and the flush compares.
#pragma once

#include "autobatch/graph/op_registry.h"
#include "autobatch/rules/flush_record.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace autobatch {

// Holds the eager value of every captured one. Values only: gradients are not compared. Results of
// random ops, and what is computed from them, have no counterpart and are left out.
class Verifier {
 public:
  // Runs the op on the eager values of its arguments; `results` are the values it was captured as.
  void note(Graph& graph, const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
            at::ArrayRef<ValueId> results);
  // Raises on the first result, in the order of capture, that differs from eager's by more than
  // rounding, with the op, the difference, the rule that ran it and the line that captured it.
  void check(const FlushRecord& record) const;
  void clear() { expected_.clear(); }

 private:
  struct Expected {
    at::Tensor tensor;
    std::string site;
  };
  std::unordered_map<ValueId, Expected> expected_;
};

// Raises if what an op gives, computed again, is not what it gave, but for rounding.
void check_recomputed(const at::Tensor& again, const at::Tensor& before,
                      const Signature& signature);

}  // namespace autobatch
