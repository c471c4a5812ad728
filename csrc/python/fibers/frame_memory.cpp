#include "python/fibers/frame_memory.h"

#include <Python.h>

#include <array>
#include <mutex>

namespace autobatch {

Switch frame_memory_switch(Switch::Kind::kFastPath, "frame_memory");

namespace {

constexpr size_t kChunk = size_t{16} << 10;  // DATA_STACK_CHUNK_SIZE of CPython
constexpr size_t kMostChunks = 512;

// CPython's allocator of arenas, which is also used for the chunks of frame stacks.
PyObjectArenaAllocator original{};

// The chunks that are kept for later frame stacks. A mutex guards the chunks, because a thread
// state may be deleted without the GIL.
struct Kept {
  std::mutex mutex;
  std::array<void*, kMostChunks> chunks{};
  size_t count = 0;

  void* take() {
    const std::lock_guard lock(mutex);
    return count == 0 ? nullptr : chunks[--count];
  }
  bool put(void* chunk) {
    const std::lock_guard lock(mutex);
    if (count == chunks.size()) return false;
    chunks[count++] = chunk;
    return true;
  }
};
Kept& kept() {
  static auto* chunks = new Kept();
  return *chunks;
}

void* allocate(void*, size_t size) {
  if (size == kChunk) {
    if (void* chunk = kept().take()) {
      frame_memory_switch.add_uses(1);
      return chunk;
    }
  }
  return original.alloc(original.ctx, size);
}

void release(void*, void* memory, size_t size) {
  if (size == kChunk && kept().put(memory)) return;
  original.free(original.ctx, memory, size);
}

PyObjectArenaAllocator current_allocator() {
  PyObjectArenaAllocator current;
  PyObject_GetArenaAllocator(&current);
  return current;
}

// Whether other code has installed an allocator that calls the allocator of this file.
bool is_wrapped = false;

}  // namespace

void install_frame_memory() {
  if (is_wrapped) return;
  original = current_allocator();
  PyObjectArenaAllocator keeping{nullptr, allocate, release};
  PyObject_SetArenaAllocator(&keeping);
}

void remove_frame_memory() {
  is_wrapped = current_allocator().alloc != allocate;
  if (!is_wrapped) PyObject_SetArenaAllocator(&original);
}

size_t free_frame_memory() {
  size_t freed = 0;
  while (void* chunk = kept().take()) {
    original.free(original.ctx, chunk, kChunk);
    freed += kChunk;
  }
  return freed;
}

}  // namespace autobatch
