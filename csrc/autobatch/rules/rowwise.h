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

// Row-major, some dimensions perhaps expanded: eager's elementwise kernels give a row-major result.
bool row_major_or_expanded(const Geometry& geometry);

// Whether `small` broadcasts to `large` by repeating it as a whole: its sizes, leading ones left
// out, are the last sizes of `large`.
bool repeats_along(const Geometry& small, at::IntArrayRef large);

// How an elementwise op runs over instances of any length: element by element, each operand
// repeated as a whole; or row by row along the first dimension, with broadcasting within a row.
enum class Spread : uint8_t { kNone, kElements, kRows };
// `sizes`: of the result.
Spread spread_of(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes);
// What of the operands' shapes stands in the key then.
void add_spread_key(Draft& draft, Spread spread, at::ArrayRef<const Geometry*> operands,
                    at::IntArrayRef sizes);

// Operand `slot` as rows [R, ...] of the spread kRows; [1, ...] if all members have the same one.
at::Tensor spread_rows(BatchView& batch, size_t slot);
// The sizes of that, without looking at values.
at::DimVector spread_sizes(const BatchView& batch, size_t slot);
// The reverse, for a gradient of what spread_rows gave.
void add_spread_rows(BackwardBatch& batch, size_t slot, const at::Tensor& gradient);

// Whether every member has the very same value there.
bool one_value(const BatchView& batch, size_t slot);

}  // namespace autobatch
