// Lookups of rows for tests, with the rows that they refer to, computed one by one.
#pragma once

#include "autobatch/kernels/cuda/row_table.h"
#include "autobatch/kernels/row_lookups.h"

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

namespace autobatch {

using at::Tensor;

// Lookups of several members: lists of int64 and int32, spread over dimensions, counted from the
// end, out of range; with the rows that they refer to.
struct TestLookups {
  std::vector<RowLookups> members;
  std::vector<int64_t> rows;
  std::vector<Tensor> alive;

  void add(at::DimVector sizes, at::DimVector steps, bool from_end,
           const std::vector<std::tuple<at::ScalarType, at::DimVector, int64_t, int64_t>>& lists) {
    RowLookups member{static_cast<int64_t>(100 * members.size()), sizes, steps, {}};
    std::vector<Tensor> values;
    for (const auto& [type, strides, length, step] : lists) {
      int64_t extent = 1;
      for (size_t d = 0; d < sizes.size(); ++d) extent += (sizes[d] - 1) * strides[d];
      // One of four members has an index out of range.
      const int64_t beyond = members.size() % 4 == 3 ? 1 : 0;
      alive.push_back(at::randint(from_end ? -length - beyond : -beyond, length + beyond, {extent},
                                  at::TensorOptions().dtype(type)));
      values.push_back(alive.back().to(at::kLong));
      member.lists.push_back({alive.back().const_data_ptr(), strides, length, step});
    }
    for (int64_t i = 0; i < member.count(); ++i) rows.push_back(row(member, values, from_end, i));
    members.push_back(std::move(member));
  }

  static int64_t row(const RowLookups& member, const std::vector<Tensor>& values, bool from_end,
                     int64_t i) {
    int64_t row = member.first;
    std::vector<int64_t> at(member.lists.size(), 0);
    for (size_t d = member.sizes.size(); d-- > 0; i /= member.sizes[d]) {
      row += i % member.sizes[d] * member.steps[d];
      for (size_t l = 0; l < at.size(); ++l) {
        at[l] += i % member.sizes[d] * member.lists[l].strides[d];
      }
    }
    for (size_t l = 0; l < at.size(); ++l) {
      int64_t index = values[l][at[l]].item<int64_t>();
      if (from_end && index < 0) index += member.lists[l].length;
      if (index < 0 || index >= member.lists[l].length) return cuda::kNoRow;
      row += index * member.lists[l].step;
    }
    return row;
  }
};

}  // namespace autobatch
