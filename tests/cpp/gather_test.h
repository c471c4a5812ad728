// Helpers for the tests of gather.h.
#pragma once

#include "autobatch/kernels/gather.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "catch.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

namespace autobatch {

using at::Tensor;

constexpr at::ScalarType kTypes[] = {at::kFloat,    at::kDouble,        at::kHalf,
                                     at::kBFloat16, at::kComplexDouble, at::kComplexFloat};

// Small integers, so that sums are exact in every type and in any order.
inline Tensor integers(at::IntArrayRef sizes, at::ScalarType type) {
  return at::randint(-4, 5, sizes, at::kLong).to(type);
}

class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

// Buffers, and regions in these buffers.
class TestMemory {
 public:
  // A buffer is identified by the address of its Tensor, which must not move.
  const Tensor& buffer(Tensor tensor) { return buffers_.emplace_back(std::move(tensor)); }

  void add(const Tensor& buffer, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
    regions.push_back({&buffer, offset, geometries.intern(sizes, strides)});
  }
  void add(const Tensor& buffer, int64_t offset, at::IntArrayRef sizes) {
    regions.push_back({&buffer, offset, geometries.intern_contiguous(sizes)});
  }
  // Adds a region without a buffer: its part of the values is skipped.
  void add_skipped(at::IntArrayRef sizes) {
    regions.push_back({nullptr, 0, geometries.intern_contiguous(sizes)});
  }

  int64_t numel() const {
    int64_t total = 0;
    for (const Region& r : regions) total += r.geometry->numel;
    return total;
  }

  std::deque<Tensor>& buffers() { return buffers_; }

  Regions regions;
  GeometryTable geometries;

 private:
  std::deque<Tensor> buffers_;
};

inline Tensor view_of(const Region& r) {
  return r.buffer->as_strided(r.geometry->sizes, r.geometry->strides,
                              r.buffer->storage_offset() + r.offset);
}

inline Tensor gathered(const Regions& regions) {
  std::vector<Tensor> flat;
  for (const Region& r : regions) flat.push_back(view_of(r).reshape({-1}));
  return at::cat(flat);
}

// Returns a copy of the buffer after buffer[region] += values, element by element.
inline Tensor with_added(const Tensor& buffer, const Region& region, const Tensor& values) {
  const Tensor where =
      at::arange(buffer.numel())
          .as_strided(region.geometry->sizes, region.geometry->strides, region.offset)
          .reshape({-1});
  return buffer.reshape({-1}).index_add(0, where, values.reshape({-1})).view(buffer.sizes());
}

// Returns the expected contents of the buffers after scatter_add(values, regions).
inline std::vector<Tensor> scattered(TestMemory& memory, const Tensor& values) {
  std::vector<Tensor> expected;
  for (const Tensor& buffer : memory.buffers()) expected.push_back(buffer.clone());
  int64_t start = 0;
  for (const Region& r : memory.regions) {
    const Tensor part = values.narrow(0, start, r.geometry->numel);
    start += r.geometry->numel;
    for (size_t b = 0; b < expected.size(); ++b) {
      if (r.buffer == &memory.buffers()[b]) expected[b] = with_added(expected[b], r, part);
    }
  }
  return expected;
}

inline void check_buffers(TestMemory& memory, const std::vector<Tensor>& expected) {
  for (size_t b = 0; b < expected.size(); ++b) {
    CAPTURE(b);
    CHECK(at::equal(memory.buffers()[b], expected[b]));
  }
}

// Adds regions of every layout. `buffer` must have at least 60 elements.
inline void add_all_kinds(TestMemory& memory, const Tensor& buffer) {
  memory.add(buffer, 0, {4, 3});                 // dense
  memory.add(buffer, 12, {});                    // one element
  memory.add(buffer, 13, {5}, {2});              // stride 2
  memory.add(buffer, 2, {3, 2}, {6, 1});         // a chunk of rows
  memory.add(buffer, 30, {3, 4}, {1, 3});        // transposed
  memory.add(buffer, 42, {2, 2, 2}, {8, 4, 1});  // two runs of two in each half
  memory.add(buffer, 1, {0, 3});                 // empty
  memory.add(buffer, 5, {3, 0, 2}, {7, 9, 1});   // empty, with non-contiguous strides
  memory.add(buffer, 7, {1, 4}, {99, 1});        // a dimension of size 1
  memory.add(buffer, 20, {4, 1}, {3, 50});       // last dimension of size 1
  memory.add(buffer, 55, {5});                   // up to the 60th element
}

}  // namespace autobatch
