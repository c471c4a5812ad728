// The tables of interned objects.
#pragma once

#include "autobatch/graph/graph.h"
#include "autobatch/graph/signature.h"
#include "autobatch/graph/varying_numbers.h"

#include <memory>

namespace autobatch {

// Tables that graphs and records share. Values point to geometries, and nodes point to signatures.
struct InternTables {
  std::shared_ptr<GeometryTable> geometries = std::make_shared<GeometryTable>();
  SignatureTable signatures;
  VaryingNumbers numbers;
};

}  // namespace autobatch
