// Memory for the factors of weights' gradients in subgraphs. A weight's gradient is one product
// over the rows of all batches. If the rows of the batches were not adjacent in memory, they would
// have to be copied first. In a graph of ops the rows are adjacent anyway: the results of one
// signature share one slab.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace autobatch {

// The rows of one batch among the rows of all batches of one signature in a flush.
struct RowRange {
  int64_t total = 0;
  int64_t before = 0;
  int64_t count = 0;
};

// One object for each subgraph. Thread-safe.
class FactorBuffers {
 public:
  // Returns 1-D uninitialized memory of `count * width` elements. If batches run one after the
  // other (forward from the first one on, backward from the last), the memory of consecutive
  // batches is adjacent. Otherwise the batch has memory of its own. `flush`: identifies the flush,
  // because several may run at the same time. `number`: the slab's number.
  at::Tensor take(const void* flush, bool backward, uint32_t number, const RowRange& range,
                  int64_t width, const at::TensorOptions& options);

 private:
  struct Taken {
    // Weak: the tensors that take() returned own the memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t edge = 0;  // the row that the next batch's rows must adjoin
    int64_t total = 0;
  };
  using Key = std::tuple<const void*, bool, uint32_t>;

  void forget_lost();

  std::mutex mutex_;
  std::map<Key, Taken> taken_;
};

}  // namespace autobatch
