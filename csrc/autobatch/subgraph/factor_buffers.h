// Memory of the factors of weights' gradients in subgraphs. A weight's gradient is one product over
// the rows of all batches; these would have to be copied together if each batch's lay elsewhere. In
// a graph of ops they lie together by themselves: results of one signature have one slab.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace autobatch {

// Which of the rows of all batches of one signature in a flush are a batch's.
struct RowRange {
  int64_t total = 0;
  int64_t before = 0;
  int64_t count = 0;
};

// One for a subgraph; any thread may use it.
class FactorBuffers {
 public:
  // 1-D and uninitialized, `count * width` elements. Where batches come one after the other,
  // forward from the first one on or backward from the last, each one's lie beside those of the one
  // before it; else they have memory of their own. `flush`: tells flushes apart that run at the
  // same time.
  at::Tensor take(const void* flush, bool backward, uint32_t number, const RowRange& range,
                  int64_t width, const at::TensorOptions& options);

 private:
  struct Taken {
    // Those who took parts own the memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t edge = 0;  // the row that the next batch's must adjoin
    int64_t total = 0;
  };
  using Key = std::tuple<const void*, bool, uint32_t>;

  void forget_lost();

  std::mutex mutex_;
  std::map<Key, Taken> taken_;
};

}  // namespace autobatch
