// Decompositions. Some ops have no native rule and are not composite, but can be computed by calls
// of ops that have native rules. (For composite ops, whose kernels call other ops, see
// Action::kDecompose.) A native rule batches instances of any size. The generic rules need one
// batch for each size.
#pragma once

#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unsafe_view.h>

#include <string_view>
#include <vector>

namespace autobatch {

// A decomposition is used instead of the generic rules if no native rule covers a call of the op.
struct Decomposition {
  using Arguments = at::ArrayRef<c10::IValue>;
  using Results = std::vector<at::Tensor>;
  // Whether `run` computes this call. Returns false for arguments that eager may reject. Eager then
  // raises the error.
  bool (*covers)(const OpInfo& op, Arguments arguments);
  // Computes the results by calls of other ops. These calls are captured.
  Results (*run)(const OpInfo& op, Arguments arguments);
};

// Returns the op's first decomposition that covers the arguments, or null.
inline const Decomposition* decomposition_of(const OpInfo& op,
                                             at::ArrayRef<c10::IValue> arguments) {
  for (const Decomposition* decomposition : op.decompositions) {
    if (decomposition->covers(op, arguments)) return decomposition;
  }
  return nullptr;
}

// The tables, one per family of ops.
struct DecompositionEntry {
  std::string_view op;
  Decomposition decomposition;
};
using DecompositionTable = at::ArrayRef<DecompositionEntry>;
DecompositionTable complex_decompositions();      // complex_views.cpp
DecompositionTable sparse_decompositions();       // sparse_products.cpp
DecompositionTable layout_decompositions();       // other_layouts.cpp
DecompositionTable packed_decompositions();       // packed_calls.cpp
DecompositionTable rearranging_decompositions();  // rearranging.cpp

// A decomposition with one result. Its functions do not depend on the op.
template <bool (*covers)(Decomposition::Arguments), at::Tensor (*compute)(Decomposition::Arguments)>
constexpr Decomposition one = {
    [](const OpInfo&, Decomposition::Arguments arguments) { return covers(arguments); },
    [](const OpInfo&, Decomposition::Arguments arguments) {
      return Decomposition::Results{compute(arguments)};
    }};

// Calls the op with other arguments, and returns its results.
Decomposition::Results call_with(const OpInfo& op, torch::jit::Stack arguments);

// --- helpers ---

inline bool is_given(const c10::IValue& tensor) {
  return tensor.isTensor() && tensor.toTensor().defined();
}
inline bool is_strided(const c10::IValue& value) {
  return is_given(value) && value.toTensor().layout() == c10::kStrided;
}
inline bool is_strided(const c10::IValue& value, int64_t dim) {
  return is_strided(value) && value.toTensor().dim() == dim;
}
// Returns a row-major copy of x with these sizes. The result is never a view, as in eager.
inline at::Tensor row_major_copy(const at::Tensor& x, at::IntArrayRef sizes) {
  return at::_unsafe_view(x.clone(at::MemoryFormat::Contiguous), sizes);
}
// Whether `matrix` is a sparse matrix, and sparse_decompositions() covers its product with `dense`.
bool is_sparse_product(const c10::IValue& matrix, const c10::IValue& dense);
// The op autobatch::sparse_product: the product of x [m, ...] and a sparse matrix [size, m] with
// these entries (indices [2, n], values [n]). Returns [size, ...].
at::Tensor sparse_product(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& x,
                          int64_t size);

}  // namespace autobatch
