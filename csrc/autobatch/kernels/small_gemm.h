// Rows times a matrix, in float. CPUs with AVX-512 use the microkernel that oneDNN has for blocks
// of a matrix (through ATen's cpublas::brgemm). CPUs with AVX2 use a kernel of this library
// (small_gemm_kernel.h). Both read the matrix in place. A BLAS packs the matrix first. With the
// tens of rows of a batch, packing takes as long as the product. Products that no kernel supports
// go to at::mm.
#pragma once

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class WeightCopies;

// out = x matrix + bias; [n, M] = [n, K] [K, M] + [M]. `bias`: undefined for none. `copies`: may
// have a row-major copy of a column-major matrix; may be null.
void multiply_into(at::Tensor& out, const at::Tensor& x, const at::Tensor& matrix,
                   WeightCopies* copies, const at::Tensor& bias = {});
at::Tensor multiply(const at::Tensor& x, const at::Tensor& matrix, WeightCopies* copies,
                    const at::Tensor& bias = {});

// out += x matrix
void add_multiplied(at::Tensor& out, const at::Tensor& x, const at::Tensor& matrix,
                    WeightCopies* copies = nullptr);

// out[i] = x[i] y[i], [n, M, N] = [n, M, K] [n, K, N]. The kernel requires that all products share
// one x; other calls go to at::bmm.
void multiply_each(at::Tensor& out, const at::Tensor& x, const at::Tensor& y);
// Returns the sum over i of x[i] y[i]^T: [M, K] from [n, M, N] and [n, K, N].
at::Tensor sum_of_each(const at::Tensor& x, const at::Tensor& y);

// Runs many products of small matrices, in float, in order, without making tensors for them.
// Several products may add to the same memory. `disjoint`: a product with `adds` adds to the output
// of the product directly before it, and otherwise no two products share an output. Products may
// then run in parallel (at::parallel_for).
void run_small_products(c10::ArrayRef<MultiplyBlock> products, bool disjoint);
// Whether a kernel is suitable for products of [m, k] and [k, n].
bool suits_small_products(int64_t m, int64_t k, int64_t n);

// left^T right, and out += left^T right; [M, K] = [n, M]^T [n, K]. This is the gradient of a
// weight.
at::Tensor multiply_transposed(const at::Tensor& left, const at::Tensor& right);
void add_transposed(at::Tensor& out, const at::Tensor& left, const at::Tensor& right);

}  // namespace autobatch
