// Multiplies rows by a matrix, in float. CPUs with AVX-512 use the microkernel that oneDNN has for
// blocks of a matrix (through ATen's cpublas::brgemm). CPUs with AVX2 use a kernel of this library
// (small_gemm_kernel.h). Both kernels read the matrix in place, but a BLAS packs the matrix first.
// If a batch has a few tens of rows, packing takes as long as the product. at::mm computes the
// products that no kernel supports.
#pragma once

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class WeightCopies;

// Computes out = x matrix + bias, with the sizes [n, M] = [n, K] [K, M] + [M]. `bias` may be
// undefined. `copies` may be null. If `copies` has a row-major copy of a column-major `matrix`, the
// copy is used.
void multiply_into(at::Tensor& out, const at::Tensor& x, const at::Tensor& matrix,
                   WeightCopies* copies, const at::Tensor& bias = {});
at::Tensor multiply(const at::Tensor& x, const at::Tensor& matrix, WeightCopies* copies,
                    const at::Tensor& bias = {});

// Computes out += x matrix.
void add_multiplied(at::Tensor& out, const at::Tensor& x, const at::Tensor& matrix,
                    WeightCopies* copies = nullptr);

// Computes out[i] = x[i] y[i], with the sizes [n, M, N] = [n, M, K] [n, K, N]. Uses the kernel for
// small matrices if all x[i] are the same matrix. Otherwise calls at::bmm_out.
void multiply_each(at::Tensor& out, const at::Tensor& x, const at::Tensor& y);
// Returns the sum over i of x[i] y[i]^T: [M, K] from [n, M, N] and [n, K, N].
at::Tensor sum_of_each(const at::Tensor& x, const at::Tensor& y);

// Runs many float products of small matrices in order, without creating tensors for them. Several
// products may add to the same memory. `disjoint`: whether each product with `adds` adds to the
// output of the product directly before it, and no other products share an output. If so, products
// with different outputs may run in parallel (at::parallel_for).
void run_small_products(c10::ArrayRef<MultiplyBlock> products, bool disjoint);
// Whether a kernel is suitable for products of [m, k] and [k, n].
bool suits_small_products(int64_t m, int64_t k, int64_t n);

// Return the product left^T right, or add it to `out`. The sizes are [M, K] = [n, M]^T [n, K]. The
// product is the gradient of a weight.
at::Tensor multiply_transposed(const at::Tensor& left, const at::Tensor& right);
void add_transposed(at::Tensor& out, const at::Tensor& left, const at::Tensor& right);

}  // namespace autobatch
