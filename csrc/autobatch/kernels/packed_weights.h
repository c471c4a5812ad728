// Copies of weights that make many small products faster. A copy is made at most once for all
// batches of a flush, or of a level of backward. No copy is kept for the next flush or level,
// because the weight may change before then.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace autobatch {

struct Signature;

class WeightCopies {
 public:
  // The weights of several products of the same x (fuse_shared_input_linear.h), side by side in one
  // matrix.
  struct Joined {
    std::vector<const void*>
        from;           // addresses of the copied weights and biases; empty: none copied
    at::Tensor weight;  // [sum of N, K]
    at::Tensor bias;    // [sum of N], or undefined
  };

  // Returns the entry of a product, by the product's signature.
  Joined& joined(const Signature* product) { return joined_[product]; }

  // Returns a row-major copy of a column-major matrix [K, M] (`W.t()`), or an undefined tensor. The
  // copy is made when enough rows have been multiplied by the matrix. `rows`: number of rows of
  // this product.
  at::Tensor by_row(const at::Tensor& matrix, int64_t rows);

 private:
  struct Turned {
    at::Tensor matrix, copy;
    int64_t rows = 0;
  };

  std::unordered_map<const Signature*, Joined> joined_;
  std::unordered_map<const void*, Turned> turned_;  // by the address of the matrix
};

}  // namespace autobatch
