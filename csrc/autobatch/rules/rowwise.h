// Rules that call an op once, on the concatenated rows of all instances.
#pragma once

#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/rules/local_autograd.h"
#include "autobatch/rules/rule.h"

namespace autobatch {

// Base class. Makes one call for the whole batch, and computes gradients through a local autograd
// graph. Derived rules define the operands of the call.
class RowsCall : public Rule {
 public:
  bool infers() const override { return true; }
  bool below_autograd() const override { return false; }
  void forward(Batch& batch) const override;
  void backward(BackwardBatch& batch) const override;

 protected:
  // Returns operand `slot` of all members as one tensor for the call.
  virtual at::Tensor operand(BatchView& batch, size_t slot) const = 0;
  // Adds the gradient of the tensor that `operand` returned.
  virtual void add_gradient(BackwardBatch& batch, size_t slot, const at::Tensor& grad) const = 0;
  // Changes arguments, such as a dimension, that have another meaning in the call for the whole
  // batch.
  virtual void adjust(const BatchView& batch, torch::jit::Stack& arguments) const {
    (void)batch, (void)arguments;
  }
  // Writes the results of the call to the outputs of the batch.
  virtual void put(Batch& batch, const LocalGraph& graph) const;
  // Returns the gradients of the call's results.
  virtual std::vector<at::Tensor> gradients(BackwardBatch& batch, const LocalGraph& graph) const;

 private:
  LocalGraph call(BatchView& batch, bool needs_grad) const;
};

// Whether broadcasting to `large` repeats `small` as a whole. This is true if the sizes of `small`,
// without leading sizes of 1, are the last sizes of `large`.
bool repeats_along(const Geometry& small, at::IntArrayRef large);

// The ways to run an elementwise op over instances of any sizes, in order of increasing cost.
enum class Spread : uint8_t {
  kElements,  // element by element, each operand repeated as a whole
  kRows,      // row by row, with broadcasting within a row; all rows have the same sizes
  kExpanded,  // element by element, each operand expanded to its result, in the result's order
};
// `sizes`: sizes of the result. `row_major`: whether the result is row-major in memory.
Spread spread_of(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes, bool row_major);
// Returns the spread of a batch. `operands` are the operands of the first member. The spread of the
// batch is the spread of the first member, or kExpanded if the members have rows of different
// sizes.
Spread spread_in(const BatchView& batch, at::ArrayRef<const Geometry*> operands, bool row_major);
// Appends to the key the properties that must be equal in all members of a batch with this spread.
void add_spread_key(NodeBuilder& builder, Spread spread, at::ArrayRef<const Geometry*> operands,
                    at::IntArrayRef sizes);

// Returns operand `slot` of all members as a 1-D tensor. The operand of each member is expanded to
// the sizes of the member's result 0. The elements are in the order of the result's memory.
at::Tensor expanded(BatchView& batch, size_t slot);
// Adds the gradient of the tensor that `expanded` returned.
void add_expanded(BackwardBatch& batch, size_t slot, const at::Tensor& gradient);
// Return result 0 of all members, and its gradients, in the order of `expanded`.
at::Tensor results_in_order(BackwardBatch& batch);
at::Tensor gradients_in_order(BackwardBatch& batch);

// Used for elementwise ops whose operand has the sizes of the result. Return the operands of all
// members, the results, or the gradients of the results. The returned tensor is [n, *sizes] if the
// results are uniform. Otherwise it is 1-D, in the order of the results' memory.
at::Tensor elements(BatchView& batch, size_t slot);
at::Tensor elements_of_results(BackwardBatch& batch);
at::Tensor elements_of_gradients(BackwardBatch& batch);
// Adds the gradient of the tensor that `elements` returned. `passed` is the tensor that
// elements_of_gradients returned; `gradient` may be this same tensor.
void add_elements(BackwardBatch& batch, size_t slot, const at::Tensor& passed, at::Tensor gradient);

// Returns operand `slot` as rows [R, ...] for Spread::kRows, or [1, ...] if all members have the
// same single row.
at::Tensor spread_rows(BatchView& batch, size_t slot);
// Returns the sizes of the tensor that spread_rows returns. Does not read values.
at::DimVector spread_sizes(const BatchView& batch, size_t slot);
// Adds the gradient of the tensor that spread_rows returned.
void add_spread_rows(BackwardBatch& batch, size_t slot, const at::Tensor& gradient);

// Whether operand `slot` is the same value in every member.
bool one_value(const BatchView& batch, size_t slot);
// Whether operand `slot` is the same value in every member and has one element. If so, the call
// takes the operand once for all members.
bool is_one_element(const BatchView& batch, size_t slot);

}  // namespace autobatch
