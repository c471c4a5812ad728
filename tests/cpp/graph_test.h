// What the tests of graphs written by hand share.
#pragma once

#include "autobatch/capture/node_builder.h"
#include "scope_test.h"

namespace autobatch {

// A graph of vectors of three doubles; signatures are told apart by address and hold nothing.
struct TestGraph {
  std::shared_ptr<GeometryTable> geometries = std::make_shared<GeometryTable>();
  Graph graph{geometries};
  SignatureTable signatures;
  const Geometry* vector = geometries->intern_contiguous({3});

  // The one result of a new node.
  ValueId add(Signature& signature, at::ArrayRef<ValueId> operands = {}, bool requires_grad = false,
              const Geometry* geometry = nullptr) {
    const NodeId node = graph.add_node(&signature, operands);
    return graph.add_result(node, geometry == nullptr ? vector : geometry, at::kDouble, at::kCPU,
                            requires_grad);
  }
  Tensor hold(ValueId id) { return make_pending(graph, id); }
  ValueId view(ValueId of, int64_t size, int64_t offset) {
    return graph.add_view(of, geometries->intern_contiguous({size}), offset, false);
  }
};

inline ValueId number_of(const Tensor& pending) { return as_pending(pending)->value(); }

}  // namespace autobatch
