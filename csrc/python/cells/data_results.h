// Results that a dynamic cell's program computes only from ordinary data, such as masks, the
// indices of the true elements of a mask, and counts. The values of the data are the key of the
// results, so stored results are never used for changed data. Stored results are often used again,
// because all layers of a graph network use the same edges, and all epochs use the same graphs.
#pragma once

#include <torch/extension.h>

#include <optional>
#include <string>
#include <unordered_map>

namespace autobatch {

// This class is not thread-safe. Callers must hold the GIL.
class DataResults {
 public:
  // `values`: tensors and numbers. Returns the stored results for these values, or False if no
  // results are stored. Returns None if a tensor is pending, may be stale (memory_updates.h) or
  // requires a gradient, because the values of such a tensor are unknown or not constant.
  pybind11::object find(const pybind11::tuple& values) const;
  // Stores the results, and returns the results that callers should use: if a result is a view of a
  // given tensor, the stored result is a copy. Stores nothing if a value has more than 64 KiB.
  pybind11::object add(const pybind11::tuple& values, const pybind11::object& results);

 private:
  // If the total size exceeds this limit, all results are dropped.
  static constexpr size_t kMostBytes = size_t{32} << 20;

  std::unordered_map<std::string, pybind11::object> known_;
  size_t num_bytes_ = 0;
};

}  // namespace autobatch
