// Converts regions to a table for the CUDA kernels (region_layout.h).
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"
#include "autobatch/kernels/gather.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace autobatch::cuda {

// A table on the host, before its bytes are sent.
struct Plan {
  std::vector<Entry> entries;
  std::vector<Shape> shapes;
  std::vector<int64_t> contributions;
  int unit = 16;  // bytes
  int64_t uniform = 0, total = 0;

  Layout layout() const;
  // Writes the layout().num_bytes() bytes of the table.
  void write(char* to) const;
};

enum class Access : uint8_t { kRead, kWrite };

// Plans copies from the regions to `packed` (Access::kRead), or from `packed` to the regions
// (Access::kWrite). Returns nullopt if a region has too many dimensions.
std::optional<Plan> plan_copy(const Regions& regions, size_t item, const void* packed,
                              Access access);

enum class Order : uint8_t { kAny, kOfValues };

// Plans additions of `values`, whose elements have `item` bytes, to the regions. Regions without a
// buffer are skipped. A unit is 16 bytes or one element. A complex number counts as two elements of
// half the size. Returns nullopt if a region has too many dimensions. For Order::kOfValues, also
// returns nullopt if a region overlaps itself, or if two different regions overlap.
std::optional<Plan> plan_sums(const Regions& regions, size_t item, bool is_complex,
                              const void* values, Order order);

}  // namespace autobatch::cuda
