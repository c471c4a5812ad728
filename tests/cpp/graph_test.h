// Helpers for the tests of hand-written graphs.
#pragma once

#include "autobatch/capture/record_call.h"
#include "scope_test.h"

namespace autobatch {

// A graph whose values are vectors of three doubles. Its signatures are empty and differ only in
// their address.
struct TestGraph {
  std::shared_ptr<GeometryTable> geometries = std::make_shared<GeometryTable>();
  Graph graph{geometries};
  SignatureTable signatures;
  const Geometry* vector = geometries->intern_contiguous({3});

  // Adds a node and returns its only result.
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
