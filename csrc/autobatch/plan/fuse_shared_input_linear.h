// Fuses sibling products in a subgraph. Siblings are products of one x with several weights, as in
// a cell with a linear layer for each gate. One product with concatenated weights replaces the
// siblings. The gates become views of the fused result, as in code with a single layer and `chunk`.
#pragma once

#include "autobatch/subgraph/subgraph.h"

#include <memory>
#include <vector>

namespace autobatch {

// One of the fused products.
struct Sibling {
  int64_t first = 0, width = 0;  // the product's columns in the fused result
  size_t weight = 0, bias = 0;   // operand slots; `bias` is 0 without a bias
  bool by_row = true;            // true: the weight is [N, K]; false: [K, N]
  // Bit k is set if the gradient of the subgraph's result k flows to this product.
  uint8_t results = 0;
};

// Makes the rule of a fused node. The operands of the node are x, with `k` elements, followed by
// the weight and bias (if any) of each sibling.
std::shared_ptr<const Rule> make_siblings_rule(std::vector<Sibling> siblings, int64_t k);

// Replaces each group of sibling products with one node. Subgraph::captured then holds the original
// tape. Returns the number of groups.
size_t fuse_shared_input_linear(Subgraph& subgraph, GeometryTable& geometries);

}  // namespace autobatch
