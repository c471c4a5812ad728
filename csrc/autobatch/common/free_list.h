// Memory for small objects. Each batch() block creates and destroys tens of thousands of small
// objects. malloc caches only seven chunks for each thread and size. Once the cache is full, malloc
// has to search for free chunks and merge them.
#pragma once

#include <cstddef>
#include <new>

// Under a sanitizer, freed memory is not reused, because the sanitizer then detects every use of
// freed memory.
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

// The free memory blocks of kSize bytes of one thread. A freed block is added to the list of the
// thread that frees the block. The list needs no constructor call. So an access does not have to
// check whether the list is initialized.
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

  // Frees the blocks when the thread ends. Blocks that are freed later are passed to operator
  // delete.
  struct Closer {
    ~Closer() {
      FreeList& list = of_this_thread();
      while (list.first_ != nullptr) ::operator delete(list.take());
      list.room_ = 0;
    }
  };

  // At the first call, allows the list to hold kMost blocks. Returns false at later calls, or if
  // AUTOBATCH_KEEPS_MEMORY is false.
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

// A base class that allocates objects of Derived from a free list. Derived must be final.
template <class Derived>
class FromFreeList {
 public:
  static void* operator new(size_t) { return FreeList<sizeof(Derived)>::of_this_thread().take(); }
  static void operator delete(void* block) {
    FreeList<sizeof(Derived)>::of_this_thread().put(block);
  }
};

}  // namespace autobatch
