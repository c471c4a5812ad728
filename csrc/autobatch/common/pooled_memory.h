// The pool's memory (pool.h), for those that know no tensors.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace autobatch {

// Uninitialized memory; `bytes` again when it is given back.
void* take_memory(size_t bytes);
void give_back_memory(void* memory, size_t bytes) noexcept;

// A vector in such memory, for what each block makes anew by the megabyte.
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

// An array of values that nobody has written, for what is written before it is read.
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
