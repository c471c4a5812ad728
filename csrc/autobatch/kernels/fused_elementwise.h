// Elementwise passes: several elementwise ops over the rows of a batch as one program, run a block
// of rows at a time. What one op computes for a block the next one reads from the cache; results
// that nobody else wants have no memory but a block's. On CPUs with AVX2 or AVX-512, in float and
// double, with the vectors and the functions (Sleef's) that ATen's own kernels and torch.compile
// use.
#pragma once

#include "autobatch/kernels/pointwise_op.h"

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace autobatch {

// Where a step's operand or its result lies: rows, and in each of them `mid` runs of `inner`
// elements without gaps.
struct PointwisePlace {
  void* data = nullptr;
  int64_t row = 0;  // elements from one row to the next; 0: all rows read the same
  int64_t mid = 0;  // elements from one run to the next
  // Of what only the program reads (data is null): the elements of a row of all such before it, and
  // of its own row.
  int64_t before = 0;
  int64_t offset = 0;
};

struct PointwiseStep {
  PointwiseOp op;
  int64_t mid = 1;
  int64_t inner = 1;
  PointwisePlace out, a, b;
};

struct PointwiseProgram {
  c10::ArrayRef<PointwiseStep> steps;
  c10::ScalarType dtype;
  int64_t rows = 0;
  int64_t width = 1;      // elements that all steps together write for a row
  int64_t temporary = 0;  // elements of a row that only the program reads
};

// Runs all steps, in order, for each row. Rows do not depend on each other: blocks of them run in
// parallel, on the caller's threads.
void run_pointwise(const PointwiseProgram& program);

// Its part for the rows from `first` to `last`, in blocks of `block`, with `scratch` for the
// temporaries of one (cpu_dispatch.h).
using PointwiseKernel = void (*)(const PointwiseProgram&, int64_t first, int64_t last,
                                 int64_t block, void* scratch);

}  // namespace autobatch
