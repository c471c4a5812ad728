// Copies of weights that make many small products faster: made at most once for all batches of a
// flush, or of a level of backward. None is kept from one to another, so that what is written to a
// weight in between is seen, as it is where weights are read in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace autobatch {

struct Signature;

class WeightCopies {
 public:
  // The weights of products of one x (fuse_shared_input_linear.h), side by side in one matrix.
  struct Joined {
    std::vector<const void*> from;  // where the weights lie that were copied; empty: none were
    at::Tensor weight;              // [sum of N, K]
    at::Tensor bias;                // [sum of N], or undefined
  };

  // Of a product, by its signature.
  Joined& joined(const Signature* product) { return joined_[product]; }

  // A matrix [K, M] that lies column by column (`W.t()`), row by row: once enough rows are
  // multiplied with it. Undefined before; `rows` are those of this product.
  at::Tensor by_row(const at::Tensor& matrix, int64_t rows);

 private:
  struct Turned {
    at::Tensor matrix, copy;
    int64_t rows = 0;
  };

  std::unordered_map<const Signature*, Joined> joined_;
  std::unordered_map<const void*, Turned> turned_;  // by where the matrix lies
};

}  // namespace autobatch
