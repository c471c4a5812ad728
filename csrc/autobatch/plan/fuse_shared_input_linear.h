// Sibling products: of one x with several weights, as of a cell whose gates are linear layers each.
// In a subgraph they are one product, with the weights side by side, and the gates are parts of its
// result: as in code whose author wrote one layer and `chunk`.
#pragma once

#include "autobatch/subgraph/subgraph.h"

#include <memory>
#include <vector>

namespace autobatch {

// One of the products.
struct Sibling {
  int64_t first = 0, width = 0;  // its part of the result
  size_t weight = 0, bias = 0;   // operands; 0: no bias
  bool by_row = true;            // the weight is [N, K], else [K, N]
  uint8_t results = 0;           // bit k: the gradient of the subgraph's result k comes to it
};

// Of a node with the operands x, then each one's weight and bias.
std::shared_ptr<const Rule> make_siblings_rule(std::vector<Sibling> siblings, int64_t k);

// Puts one node in the place of each such group. `captured` is then the tape as it was.
void join_siblings(Subgraph& subgraph, GeometryTable& geometries);

}  // namespace autobatch
