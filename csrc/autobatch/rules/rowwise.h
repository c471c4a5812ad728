// Rules that run an op as it is, once, over the rows of all instances one after the other.
#pragma once

#include "autobatch/kernels/segment_reduce.h"
#include "autobatch/rules/local_autograd.h"
#include "autobatch/rules/rule.h"

namespace autobatch {

// The call itself, and its gradient by a local autograd graph. Derived rules say what stands for
// the operands.
class RowsCall : public Rule {
 public:
  bool infers() const override { return true; }
  bool below_autograd() const override { return false; }
  void forward(Batch& batch) const override;
  void backward(BackwardBatch& batch) const override;

 protected:
  // Operand `slot` of all members, for the one call.
  virtual at::Tensor operand(BatchView& batch, size_t slot) const = 0;
  // Adds the gradient of what `operand` gave.
  virtual void add_gradient(BackwardBatch& batch, size_t slot, const at::Tensor& grad) const = 0;
  // Changes arguments that mean something else in the one call.
  virtual void adjust(const BatchView& batch, torch::jit::Stack& arguments) const {
    (void)batch, (void)arguments;
  }
  // Writes the results of the call to the batch's.
  virtual void put(Batch& batch, const LocalGraph& graph) const;
  // The gradients of the call's results.
  virtual std::vector<at::Tensor> gradients(BackwardBatch& batch, const LocalGraph& graph) const;

 private:
  LocalGraph call(BatchView& batch, bool record) const;
};

// Whether `small` broadcasts to `large` by repeating it as a whole: its sizes, leading ones left
// out, are the last sizes of `large`.
bool repeats_along(const Geometry& small, at::IntArrayRef large);

// How an elementwise op runs over instances of any sizes, cheapest first.
enum class Spread : uint8_t {
  kElements,  // element by element, each operand repeated as a whole
  kRows,      // row by row, with broadcasting within a row; rows have the same sizes
  kExpanded,  // element by element, each operand expanded to its result, in the result's order
};
// `sizes`: of the result; `row_major`: as it lies in memory.
Spread spread_of(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes, bool row_major);
// What of the operands' shapes stands in the key then.
void add_spread_key(NodeBuilder& builder, Spread spread, at::ArrayRef<const Geometry*> operands,
                    at::IntArrayRef sizes);

// Operand `slot` of all members, each expanded to its result 0, its elements in the order of the
// result's memory: [sum of the results' elements].
at::Tensor expanded(BatchView& batch, size_t slot);
// The reverse, for a gradient of what `expanded` gave.
void add_expanded(BackwardBatch& batch, size_t slot, const at::Tensor& gradient);
// Results 0, and their gradients, in that order.
at::Tensor results_in_order(BackwardBatch& batch);
at::Tensor gradients_in_order(BackwardBatch& batch);

// For elementwise ops whose operand is as large as the result: [n, *sizes] where results are
// uniform, else in the order of the results' memory.
at::Tensor elements(BatchView& batch, size_t slot);
at::Tensor elements_of_results(BackwardBatch& batch);
at::Tensor elements_of_gradients(BackwardBatch& batch);
// The reverse. `passed` is what elements_of_gradients gave.
void add_elements(BackwardBatch& batch, size_t slot, const at::Tensor& passed, at::Tensor gradient);

// Operand `slot` as rows [R, ...] of the spread kRows; [1, ...] if all members have the same one.
at::Tensor spread_rows(BatchView& batch, size_t slot);
// The sizes of that, without looking at values.
at::DimVector spread_sizes(const BatchView& batch, size_t slot);
// The reverse, for a gradient of what spread_rows gave.
void add_spread_rows(BackwardBatch& batch, size_t slot, const at::Tensor& gradient);

// Whether every member has the very same value there.
bool one_value(const BatchView& batch, size_t slot);
// Whether that is one element, which the call then has once for all members.
bool is_one_element(const BatchView& batch, size_t slot);

}  // namespace autobatch
