#include "autobatch/common/pool.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/common/free_list.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <new>
#include <vector>

namespace autobatch {
namespace {

constexpr size_t kSmallest = size_t{1} << 14;  // malloc itself caches smaller blocks
constexpr size_t kLargest = size_t{1} << 30;
constexpr size_t kMostKept = size_t{1} << 28;
constexpr size_t kHeader = c10::gAlignment;  // size of the header, which holds the size class
constexpr size_t kClasses = 8;  // size classes per power of two; at most 1/8 of a block is unused
constexpr size_t kLarger = 4;   // a block may be this many classes larger than requested
constexpr int kTrimEvery = 16;  // number of flushes between two trims

size_t class_of(size_t bytes) {
  const auto log = static_cast<size_t>(std::bit_width(bytes - 1)) - 1;  // 2^log < bytes
  const size_t step = (size_t{1} << log) / kClasses;
  return log * kClasses + (bytes - 1 - (size_t{1} << log)) / step;
}

size_t class_bytes(size_t size_class) {
  const size_t log = size_class / kClasses;
  return (size_t{1} << log) + (size_class % kClasses + 1) * ((size_t{1} << log) / kClasses);
}

class Pool {
 public:
  static Pool& get() {
    static auto* pool = new Pool();  // never destroyed: tensors may outlive static objects
    return *pool;
  }

  // Returns a block with room for `bytes` after its header. The block of a tensor is reported to
  // PyTorch's memory profiler. The reported size is `bytes`, without the unused rest of the block.
  // Other blocks are not reported.
  void* take(size_t bytes, bool is_tensor) {
    void* block = find_or_allocate(class_of(bytes));
    if (is_tensor) c10::profiledCPUMemoryReporter().New(block, bytes);
    return block;
  }

  void put(void* block, bool is_tensor) {
    // The profiler counts the memory of the pool as free.
    if (is_tensor) c10::profiledCPUMemoryReporter().Delete(block);
    const size_t size_class = *static_cast<size_t*>(block);
    const size_t bytes = class_bytes(size_class);
    // The block is freed if the mutex is not available. Another thread may hold the mutex, or a
    // thread may have held it when the process was forked.
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      if (kept_ + bytes <= kMostKept) {
        free_[size_class].push_back(block);
        kept_ += bytes;
        return;
      }
    }
    c10::free_cpu(block);
  }

  void trim() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || ++flushes_ < kTrimEvery) return;
    free_largest(least_kept_);
    flushes_ = 0;
    least_kept_ = kept_;
  }

  size_t clear() {
    const std::lock_guard lock(mutex_);
    const size_t kept = kept_;
    free_largest(kept);
    return kept;
  }

  size_t kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

 private:
  void* find_or_allocate(size_t size_class) {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) {
      for (size_t k = size_class; k <= size_class + kLarger; ++k) {
        if (free_[k].empty()) continue;
        void* block = free_[k].back();
        free_[k].pop_back();
        kept_ -= class_bytes(k);
        least_kept_ = std::min(least_kept_, kept_);
        return block;
      }
    }
    void* block = allocate(kHeader + class_bytes(size_class));
    *static_cast<size_t*>(block) = size_class;
    return block;
  }

  // Allocates like PyTorch's CPU allocator, but does not report to the profiler.
  void* allocate(size_t bytes) {
    try {
      return c10::alloc_cpu(bytes);
    } catch (const std::exception&) {  // out of memory: frees the kept blocks and tries again
      clear();
      return c10::alloc_cpu(bytes);
    }
  }

  void free_largest(size_t bytes) {
    for (size_t k = free_.size(); k-- > 0;) {
      while (!free_[k].empty() && class_bytes(k) <= bytes) {
        bytes -= class_bytes(k);
        kept_ -= class_bytes(k);
        c10::free_cpu(free_[k].back());
        free_[k].pop_back();
      }
    }
  }

  std::mutex mutex_;
  std::array<std::vector<void*>, kClasses * 32> free_;  // free blocks, by size class
  size_t kept_ = 0;                                     // total size of the free blocks
  size_t least_kept_ = 0;  // least value of kept_ since the last trim: these bytes were not needed
  int flushes_ = 0;
};

void give_back(void* block) { Pool::get().put(block, /*is_tensor=*/true); }

bool is_worth_keeping(size_t bytes) {
  return AUTOBATCH_KEEPS_MEMORY && bytes >= kSmallest && bytes <= kLargest;
}

}  // namespace

void* take_memory(size_t bytes) {
  if (!is_worth_keeping(bytes)) return ::operator new(bytes);
  return static_cast<char*>(Pool::get().take(bytes, /*is_tensor=*/false)) + kHeader;
}

void give_back_memory(void* memory, size_t bytes) noexcept {
  if (!is_worth_keeping(bytes)) return ::operator delete(memory);
  Pool::get().put(static_cast<char*>(memory) - kHeader, /*is_tensor=*/false);
}

at::Tensor pooled_empty(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  const bool pooled = is_worth_keeping(bytes) && has_host_memory(options.device()) &&
                      c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
  if (!pooled && has_host_memory(options.device())) return at::detail::empty_cpu({numel}, options);
  if (!pooled) return at::empty({numel}, options);
  void* block = Pool::get().take(bytes, /*is_tensor=*/true);
  c10::DataPtr data(static_cast<char*>(block) + kHeader, block, &give_back, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
  out.unsafeGetTensorImpl()->generic_set_sizes_contiguous(c10::IntArrayRef{numel});
  return out;
}

at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor out = pooled_empty(c10::multiply_integers(sizes), options);
  out.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);  // no other code holds the tensor yet
  return out;
}

at::Tensor pooled_zeros(int64_t numel, const at::TensorOptions& options) {
  return pooled_empty(numel, options).zero_();
}

bool is_pooled(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get_deleter() == &give_back;
}

void trim_pool() { Pool::get().trim(); }

size_t pooled_bytes() { return Pool::get().kept(); }

size_t empty_pool() { return Pool::get().clear(); }

}  // namespace autobatch
