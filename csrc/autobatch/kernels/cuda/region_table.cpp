#include "autobatch/kernels/cuda/region_table.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace autobatch::cuda {
namespace {

// Collects regions with lengths in bytes, then converts the lengths to the largest unit that
// divides all of them.
class Planner {
 public:
  explicit Planner(const void* packed) { bits_ |= reinterpret_cast<uintptr_t>(packed); }

  // Returns the index of the geometry's shape, whose lengths are in bytes. The index is negative if
  // the geometry has too many dimensions.
  int32_t shape_of(const Geometry& geometry, int64_t item) {
    const auto [known, is_new] = numbers_.try_emplace(&geometry, -1);
    if (!is_new) return known->second;
    Shape shape{item, 0, {}, {}};
    int64_t d = geometry.dim() - 1;
    for (; d >= 0; --d) {
      if (geometry.sizes[d] != 1 && geometry.strides[d] * item != shape.run) break;
      shape.run *= geometry.sizes[d];
    }
    for (int64_t outer = 0; outer <= d; ++outer) {
      if (geometry.sizes[outer] == 1) continue;
      if (shape.dims == kMostDims) return -1;
      shape.sizes[shape.dims] = geometry.sizes[outer];
      shape.strides[shape.dims++] = geometry.strides[outer] * item;
      bits_ |= static_cast<uint64_t>(geometry.strides[outer] * item);
    }
    bits_ |= static_cast<uint64_t>(shape.run);
    known->second = static_cast<int32_t>(plan_.shapes.size());
    plan_.shapes.push_back(shape);
    return known->second;
  }

  void add(const void* address, int32_t shape, int64_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    bits_ |= at;
    if (plan_.entries.empty()) plan_.uniform = bytes;
    if (plan_.uniform != bytes) plan_.uniform = 0;
    plan_.entries.push_back({at, plan_.total, shape, 0, 0});
    plan_.total += bytes;
  }
  void note_start(int64_t bytes) { bits_ |= static_cast<uint64_t>(bytes); }

  std::vector<Entry>& entries() { return plan_.entries; }
  std::vector<int64_t>& contributions() { return plan_.contributions; }

  // Converts all lengths to units. A unit has 16 bytes or `smallest` bytes (a power of two). If
  // `any` is true, the size may also be a power of two between these sizes.
  Plan finish(int64_t smallest, bool any) {
    int64_t unit = 16;
    while (unit > smallest && (bits_ & static_cast<uint64_t>(unit - 1)) != 0) unit /= 2;
    if (!any && unit != 16) unit = smallest;
    plan_.unit = static_cast<int>(unit);
    for (Shape& shape : plan_.shapes) {
      shape.run /= unit;
      for (int32_t d = 0; d < shape.dims; ++d) shape.strides[d] /= unit;
    }
    for (Entry& entry : plan_.entries) entry.start /= unit;
    for (int64_t& start : plan_.contributions) start /= unit;
    plan_.uniform /= unit;
    plan_.total /= unit;
    return std::move(plan_);
  }

 private:
  Plan plan_;
  uint64_t bits_ = 0;  // bitwise OR of all addresses and lengths that a unit must divide
  std::unordered_map<const Geometry*, int32_t> numbers_;
};

int64_t power_of_two_in(size_t item) { return static_cast<int64_t>(item & (~item + 1)); }

const char* address_of(const Region& region, bool writes) {
  const auto* buffer = static_cast<const char*>(writes ? region.buffer->mutable_data_ptr()
                                                       : region.buffer->const_data_ptr());
  return buffer + region.offset * static_cast<int64_t>(region.buffer->element_size());
}

// A part of the values that is added to one region.
struct Contribution {
  const char* address;
  const Geometry* geometry;
  int64_t start;  // number of bytes from the start of the values
};

bool is_same_place(const Contribution& a, const Contribution& b) {
  return a.address == b.address && a.geometry == b.geometry;
}

}  // namespace

Layout Plan::layout() const {
  const auto count = [](const auto& items) { return static_cast<int64_t>(items.size()); };
  return {count(entries), count(shapes), count(contributions), uniform, total};
}

void Plan::write(char* to) const {
  const auto put = [&](const auto& items) {
    const size_t bytes = items.size() * sizeof(items[0]);
    if (bytes > 0) std::memcpy(to, items.data(), bytes);
    to += bytes;
  };
  put(entries);
  put(shapes);
  put(contributions);
}

std::optional<Plan> plan_copy(const Regions& regions, size_t item, const void* packed,
                              Access access) {
  Planner planner(packed);
  planner.entries().reserve(regions.size());
  const auto bytes = static_cast<int64_t>(item);
  for (const Region& region : regions) {
    if (region.geometry->numel == 0) continue;
    const int32_t shape = planner.shape_of(*region.geometry, bytes);
    if (shape < 0) return std::nullopt;
    const char* address = address_of(region, access == Access::kWrite);
    planner.add(address, shape, region.geometry->numel * bytes);
  }
  return planner.finish(power_of_two_in(item), /*any=*/true);
}

std::optional<Plan> plan_sums(const Regions& regions, size_t item, bool is_complex,
                              const void* values, Order order) {
  const auto bytes = static_cast<int64_t>(item);
  std::vector<Contribution> all;
  all.reserve(regions.size());
  int64_t start = 0;
  for (const Region& region : regions) {
    const int64_t length = region.geometry->numel * bytes;
    if (region.buffer != nullptr && length > 0) {
      if (order == Order::kOfValues && region.geometry->overlapping) return std::nullopt;
      all.push_back({address_of(region, /*writes=*/true), region.geometry, start});
    }
    start += length;
  }
  if (order == Order::kOfValues) {
    std::stable_sort(all.begin(), all.end(), [](const Contribution& a, const Contribution& b) {
      return a.address < b.address;
    });
  }
  Planner planner(values);
  const char* end = nullptr;  // end of the regions that were visited
  for (size_t i = 0; i < all.size(); ++i) {
    const Contribution& c = all[i];
    planner.note_start(c.start);
    if (order == Order::kOfValues && i > 0 && is_same_place(all[i - 1], c)) {
      ++planner.entries().back().count;
      planner.contributions().push_back(c.start);
      continue;
    }
    if (order == Order::kOfValues && c.address < end) return std::nullopt;
    end = std::max(end, c.address + c.geometry->extent * bytes);
    const int32_t shape = planner.shape_of(*c.geometry, bytes);
    if (shape < 0) return std::nullopt;
    planner.add(c.address, shape, c.geometry->numel * bytes);
    planner.entries().back().count = 1;
    planner.entries().back().first = static_cast<int64_t>(planner.contributions().size());
    planner.contributions().push_back(c.start);
  }
  return planner.finish(is_complex ? bytes / 2 : bytes, /*any=*/false);
}

}  // namespace autobatch::cuda
