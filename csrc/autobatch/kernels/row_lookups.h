// Lookups of rows by index (`x[i]`, `index_add`, `gather`, `scatter`), for the members of a batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <cstdint>

namespace autobatch {

// The lookups of one member, in row-major order over `sizes`. The lookup at (i_0, i_1, ..) refers
// to the row
//
//   first + sum over d of i_d * steps[d] + sum over lists of index * step,
//
// where `index` is the element of the list's values at the offset (sum over d of i_d * strides[d]).
// An index that is not in [0, length) is an error. With RowQuery::from_end, the valid range is
// [-length, length).
struct RowLookups {
  struct List {
    const void* values = nullptr;  // memory on the device of the indices
    at::DimVector strides;
    int64_t length = 0;  // size of the indexed dimension
    int64_t step = 0;    // number of rows between consecutive indices
  };
  int64_t first = 0;
  at::DimVector sizes;
  at::DimVector steps;  // 0 in indexed dimensions
  c10::SmallVector<List, 2> lists;

  int64_t count() const { return c10::multiply_integers(sizes); }
};

struct RowQuery {
  at::ArrayRef<RowLookups> members;            // all members have the same number of lists
  c10::SmallVector<c10::ScalarType, 2> types;  // by list: dtype of its values, int32 or int64
  bool from_end = false;                       // whether negative indices count from the end
};

}  // namespace autobatch
