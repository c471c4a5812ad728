// Regions as a table for the CUDA kernels (region_layout.h).
#pragma once

#include "autobatch/kernels/cuda/region_layout.h"
#include "autobatch/kernels/gather.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace autobatch::cuda {

// On the host, and as the bytes that are sent.
struct Plan {
  std::vector<Entry> entries;
  std::vector<Shape> shapes;
  std::vector<int64_t> contributions;
  int unit = 16;  // bytes
  int64_t uniform = 0, total = 0;

  Layout layout() const;
  // The table's bytes: as many as the layout says.
  void write(char* to) const;
};

enum class Access : uint8_t { kRead, kWrite };

// Of copies between the regions, which are read or written, and `packed`. None if a region has too
// many dimensions.
std::optional<Plan> plan_copy(const Regions& regions, size_t item, const void* packed,
                              Access access);

enum class Order : uint8_t { kAny, kOfValues };

// Of additions of `values`, with elements of `item` bytes, to the regions; those without a buffer
// are skipped. A unit is 16 bytes or one element. Complex numbers are two elements of half the
// size. In order: none if regions overlap, other than by being the same.
std::optional<Plan> plan_sums(const Regions& regions, size_t item, bool is_complex,
                              const void* values, Order order);

}  // namespace autobatch::cuda
