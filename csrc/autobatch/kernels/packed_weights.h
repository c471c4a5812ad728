// Copies of weights that make many small products faster.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace autobatch {

struct GraphInput;
struct Signature;

// A flush uses two objects of this class. The first object holds copies of any tensors, and is
// dropped after the flush, or after a level of backward. The second object belongs to the scope,
// and holds copies of weights whose changes can be detected (keep()). In a scope with many flushes,
// such as a map with reads or an engine, each flush has few rows, and a copy pays off only over
// several flushes.
class WeightCopies {
 public:
  // The weights of several products of the same x (fuse_shared_input_linear.h), side by side in one
  // matrix.
  struct Joined {
    std::vector<const void*>
        from;           // addresses of the copied weights and biases; empty if there is no copy
    at::Tensor weight;  // [sum of N, K]
    at::Tensor bias;    // [sum of N]; undefined if the products have no bias
  };

  // Returns the entry of the product with this signature. Must not be called on the object of the
  // scope, because the signature may be freed before this object.
  Joined& joined(const Signature* product) { return joined_[product]; }

  // Returns a row-major copy of a column-major matrix [K, M] (`W.t()`), or an undefined tensor. The
  // copy is made when enough rows have been multiplied by the matrix. `rows`: number of rows of
  // this product.
  at::Tensor by_row(const at::Tensor& matrix, int64_t rows);

  // --- copies that are kept for later flushes ---

  // Whether copies of this weight may be kept. A write to the weight must change its version
  // counter, or must be reported by forget(). Therefore no other tensor may use the storage. For
  // example, a weight that is part of a flat buffer is excluded, because the buffer has its own
  // version counter. `num_views`: number of tensors over the storage that the caller has made.
  bool keep(const GraphInput& weight, size_t num_views);
  // Drops the copies if a weight was written to, or if the copies take too much memory. Must be
  // called at the beginning of a flush.
  void drop_changed();
  // Drops the copies if a copied weight has the storage of `written`, which the caller is about to
  // change.
  void forget(const at::Tensor& written);
  void clear();

 private:
  struct Turned {
    at::Tensor matrix, copy;
    int64_t rows = 0;
  };
  struct Source {
    at::Tensor data;  // also keeps the address from being used for another weight
    c10::VariableVersion counter;
    uint32_t version = 0;
  };

  std::unordered_map<const Signature*, Joined> joined_;
  std::unordered_map<const void*, Turned> turned_;   // by address of the matrix
  std::unordered_map<const void*, Source> sources_;  // the weights of kept copies, by address
  size_t bytes_ = 0;                                 // total size of the copies in turned_
};

}  // namespace autobatch
