// Rows times a matrix, in float: on CPUs with AVX-512 by the microkernel that oneDNN has for blocks
// of a matrix (through ATen's cpublas::brgemm), on those with AVX2 by one of our own
// (small_gemm_kernel.h). Both read the matrix where it lies. A BLAS packs it first, and for the
// tens of rows of a batch that takes as long as the product. What no kernel is for goes to at::mm.
#pragma once

#include "autobatch/kernels/cpu_dispatch.h"

#include <ATen/core/Tensor.h>

namespace autobatch {

class WeightCopies;

// out = x matrix + bias; [n, M] = [n, K] [K, M] + [M], `bias` undefined for none. `copies`: where a
// matrix that lies column by column may be found row by row, or null.
void multiply_into(at::Tensor& out, const at::Tensor& x, const at::Tensor& matrix,
                   WeightCopies* copies, const at::Tensor& bias = {});
at::Tensor multiply(const at::Tensor& x, const at::Tensor& matrix, WeightCopies* copies,
                    const at::Tensor& bias = {});

// out += x matrix
void add_multiplied(at::Tensor& out, const at::Tensor& x, const at::Tensor& matrix,
                    WeightCopies* copies = nullptr);

// out = x y of each of n, [n, M, N] = [n, M, K] [n, K, N]; the kernel is for one x that all share.
void multiply_each(at::Tensor& out, const at::Tensor& x, const at::Tensor& y);
// The sum of all x y^T, [M, K] = [n, M, N] [n, K, N]^T.
at::Tensor sum_of_each(const at::Tensor& x, const at::Tensor& y);

// Many products of small matrices, in float, without a tensor of each, in order: several may add to
// the same memory. `apart`: only those that add do, to what the one before wrote, so that others
// may run on the caller's threads.
void run_small_products(c10::ArrayRef<MultiplyBlock> products, bool apart);
// Whether those of [m, k] and [k, n] are for a kernel.
bool suits_small_products(int64_t m, int64_t k, int64_t n);

// left^T right, and out += left^T right; [M, K] = [n, M]^T [n, K]: the gradient of a matrix.
at::Tensor multiply_transposed(const at::Tensor& left, const at::Tensor& right);
void add_transposed(at::Tensor& out, const at::Tensor& left, const at::Tensor& right);

}  // namespace autobatch
