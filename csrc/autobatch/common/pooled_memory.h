// The pool's memory (pool.h), for code that does not use tensors.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace autobatch {

// take_memory returns uninitialized memory. give_back_memory must get the same `bytes` as the call
// of take_memory.
void* take_memory(size_t bytes);
void give_back_memory(void* memory, size_t bytes) noexcept;

// An allocator for vectors in the pool's memory. The allocator is used for megabytes of data that
// every batch() block allocates.
template <class T>
struct PoolAllocator {
  using value_type = T;
  PoolAllocator() = default;
  template <class U>
  PoolAllocator(const PoolAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(take_memory(n * sizeof(T))); }
  void deallocate(T* memory, size_t n) noexcept { give_back_memory(memory, n * sizeof(T)); }
  bool operator==(const PoolAllocator&) const = default;
};
template <class T>
using PooledVector = std::vector<T, PoolAllocator<T>>;

// An uninitialized array in the pool's memory, for values that are written before they are read.
struct GiveBackMemory {
  size_t bytes = 0;
  void operator()(void* memory) const noexcept { give_back_memory(memory, bytes); }
};
template <class T>
using PooledArray = std::unique_ptr<T[], GiveBackMemory>;

template <class T>
PooledArray<T> pooled_array(size_t size) {
  static_assert(std::is_trivially_destructible_v<T>);
  const size_t bytes = size * sizeof(T);
  return {static_cast<T*>(take_memory(bytes)), {bytes}};
}

}  // namespace autobatch
