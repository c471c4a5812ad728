// Memory for the factors of weights' gradients in subgraphs. The gradient of a weight is computed
// by one matrix product over the rows of all batches. Rows that are not adjacent in memory would
// have to be copied before this product. In a graph of single ops the rows are always adjacent,
// because the results of one signature share one slab.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace autobatch {

// The position of one batch's rows among the rows of all batches that have the same signature in a
// flush.
struct RowRange {
  int64_t total = 0;
  int64_t before = 0;
  int64_t count = 0;
};

// Each subgraph has one object of this class. This class is thread-safe.
class FactorBuffers {
 public:
  // Returns a 1-D uninitialized tensor of `count * width` elements. The memory of consecutive
  // batches is adjacent if forward runs the batches from first to last, and backward runs them from
  // last to first. In any other order, a batch gets separate memory. `flush` identifies the flush,
  // because several flushes may run at the same time. `number` is the slab's number.
  at::Tensor take(const void* flush, bool backward, uint32_t number, const RowRange& range,
                  int64_t width, const at::TensorOptions& options);

 private:
  struct Taken {
    // A weak reference, because the tensors that take() has returned own the memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t edge = 0;  // the row at which the next batch's rows must begin or end
    int64_t total = 0;
  };
  using Key = std::tuple<const void*, bool, uint32_t>;

  void forget_lost();

  std::mutex mutex_;
  std::map<Key, Taken> taken_;
};

}  // namespace autobatch
