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

// A thread's blocks of kSize bytes. One freed by another thread joins that one's list. It needs no
// constructor, so that to come by it is to come by its address.
template <size_t kSize>
class FreeList {
 public:
  void* take() {
    if (first_ == nullptr) return ::operator new(kSize);
    Block* block = first_;
    first_ = block->next;
    ++room_;
    return block;
  }

  void put(void* block) {
    if (room_ == 0 && !open()) return ::operator delete(block);
    --room_;
    first_ = new (block) Block{first_};
  }

  static FreeList& of_this_thread() {
    static constinit thread_local FreeList list;
    return list;
  }

 private:
  struct Block {
    Block* next;
  };

  // Frees the blocks when the thread ends; objects that die after this go straight back.
  struct Closer {
    ~Closer() {
      FreeList& list = of_this_thread();
      while (list.first_ != nullptr) ::operator delete(list.take());
      list.room_ = 0;
    }
  };

  // Makes room, once. False if there is none.
  bool open() {
    if (is_open_ || !AUTOBATCH_KEEPS_MEMORY) return false;
    static thread_local const Closer closer;
    (void)closer;
    is_open_ = true;
    room_ = kMost;
    return true;
  }

  static constexpr size_t kMost = 1 << 14;

  Block* first_ = nullptr;
  size_t room_ = 0;
  bool is_open_ = false;
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
