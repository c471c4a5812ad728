// Arrays in the pool's memory, for what each flush makes anew and writes before it reads.
#pragma once

#include "autobatch/pool.h"

#include <cstddef>
#include <memory>
#include <type_traits>

namespace autobatch {

struct GiveBackMemory {
  size_t bytes = 0;
  void operator()(void* memory) const noexcept { give_back_memory(memory, bytes); }
};

template <class T>
using PooledArray = std::unique_ptr<T[], GiveBackMemory>;

// Of values that nobody has written.
template <class T>
PooledArray<T> pooled_array(size_t size) {
  static_assert(std::is_trivially_destructible_v<T>);
  const size_t bytes = size * sizeof(T);
  return {static_cast<T*>(take_memory(bytes)), {bytes}};
}

}  // namespace autobatch
