// The weights of products of one x (siblings.h), side by side in one matrix: copied once for all
// batches of a flush, or of a level of backward. None is kept from one to another, so that what is
// written to a weight in between is seen, as it is where weights are read in place.
#pragma once

#include "autobatch/batch.h"

#include <unordered_map>
#include <vector>

namespace autobatch {

class JoinedWeights {
 public:
  struct Entry {
    std::vector<const void*> from;  // where the weights lie that were copied; empty: none were
    at::Tensor weight;              // [sum of N, K]
    at::Tensor bias;                // [sum of N], or undefined
  };

  // Of a product, by its signature.
  Entry& of(const Signature* product) { return entries_[product]; }

  // While one lives, those who run batches on the store find the weights.
  class Lent {
   public:
    Lent(Store& store, JoinedWeights* weights) : store_(store) { store_.joined = weights; }
    ~Lent() { store_.joined = nullptr; }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

   private:
    Store& store_;
  };

 private:
  std::unordered_map<const Signature*, Entry> entries_;
};

}  // namespace autobatch
