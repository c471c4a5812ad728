// Converts lookups of rows (row_lookups.h) to a table for the CUDA kernel (row_table.h).
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/cuda/row_table.h"
#include "autobatch/kernels/row_lookups.h"

#include <optional>
#include <vector>

namespace autobatch::cuda {

struct RowPlan {
  RowLayout layout{};
  std::vector<RowEntry> entries;
};

// Returns the table for `query`, or nullopt if the lookups have more dimensions or lists than the
// kernel supports.
AUTOBATCH_INTERNAL std::optional<RowPlan> plan_rows(const RowQuery& query);

}  // namespace autobatch::cuda
