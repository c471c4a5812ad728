// The tables of interned objects.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/signature.h"

#include <memory>

namespace autobatch {

// What graphs and records share: the objects that values and nodes point to.
struct InternTables {
  std::shared_ptr<GeometryTable> geometries = std::make_shared<GeometryTable>();
  SignatureTable signatures;
};

}  // namespace autobatch
