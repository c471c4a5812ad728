// An elementwise program runs several elementwise ops over the rows of a batch. It runs all ops for
// one block of rows before the next block, so an op reads the results of earlier ops from the
// cache. A result that only the program reads needs memory for only one block. On CPUs, programs
// run with AVX2 or AVX-512, for float and double. Programs use the same vector types and functions
// as ATen's own kernels and torch.compile. The functions are from Sleef, except for tanh of floats.
#pragma once

#include "autobatch/kernels/elementwise_op.h"

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// The place of a step's operand or result in memory. Each row has `mid` runs, and each run has
// `inner` contiguous elements (ElementwiseStep).
struct ElementwisePlace {
  void* data = nullptr;
  int64_t row = 0;  // elements from one row to the next; 0 if all rows use the same elements
  int64_t mid = 0;  // elements from one run to the next
  // The two fields below are for a temporary, which only the program reads (`data` is null).
  // `before`: elements per row of all temporaries before this one. `offset`: elements from the
  // start of the temporary's row to the first element of this place.
  int64_t before = 0;
  int64_t offset = 0;
};

struct ElementwiseStep {
  ElementwiseOp op;
  int64_t mid = 1;
  int64_t inner = 1;
  ElementwisePlace out, a, b;
};

struct ElementwiseProgram {
  c10::ArrayRef<ElementwiseStep> steps;
  c10::ScalarType dtype;
  int64_t rows = 0;
  int64_t width = 1;      // elements that all steps together write per row
  int64_t temporary = 0;  // elements of all temporaries per row
};

// Runs all steps, in order, for each row. Rows are independent, so blocks of rows run in parallel
// (at::parallel_for).
void run_elementwise(const ElementwiseProgram& program);

// Runs the program for the rows [first, last), in blocks of `block` rows. `scratch`: memory for the
// temporaries of one block (cpu_dispatch.h).
using ElementwiseKernel = void (*)(const ElementwiseProgram&, int64_t first, int64_t last,
                                   int64_t block, void* scratch);

}  // namespace autobatch
