// Memory of small objects that are made and dropped by the ten thousand in each block. malloc keeps
// seven of a size at hand for a thread; beyond these it searches and merges its chunks.
#pragma once

#include <cstddef>
#include <new>

// A sanitizer sees each use of freed memory only if freed memory is not used again.
#if defined(__SANITIZE_ADDRESS__)
#define AUTOBATCH_KEEPS_MEMORY false
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define AUTOBATCH_KEEPS_MEMORY false
#endif
#endif
#ifndef AUTOBATCH_KEEPS_MEMORY
#define AUTOBATCH_KEEPS_MEMORY true
#endif

namespace autobatch {

// A thread's blocks of kSize bytes. One freed by another thread joins that one's list.
template <size_t kSize>
class FreeList {
 public:
  ~FreeList() {
    while (first_ != nullptr) ::operator delete(pop());
    room_ = 0;  // objects that die after this go straight back
  }

  void* take() { return first_ != nullptr ? pop() : ::operator new(kSize); }

  void put(void* block) {
    if (room_ == 0) return ::operator delete(block);
    --room_;
    first_ = new (block) Block{first_};
  }

  static FreeList& of_this_thread() {
    static thread_local FreeList list;
    return list;
  }

 private:
  struct Block {
    Block* next;
  };

  void* pop() {
    Block* block = first_;
    first_ = block->next;
    ++room_;
    return block;
  }

  static constexpr size_t kMost = 1 << 14;

  Block* first_ = nullptr;
  size_t room_ = AUTOBATCH_KEEPS_MEMORY ? kMost : 0;
};

// A base class that gives Derived, which nothing derives from, such memory.
template <class Derived>
class FromFreeList {
 public:
  static void* operator new(size_t) { return FreeList<sizeof(Derived)>::of_this_thread().take(); }
  static void operator delete(void* block) {
    FreeList<sizeof(Derived)>::of_this_thread().put(block);
  }
};

}  // namespace autobatch
