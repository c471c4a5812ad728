// The memory of the tensors that a flush has returned to the program.
#pragma once

#include "autobatch/graph/signature.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace autobatch {

// One tensor that the program holds: its memory, and its version at the end of the flush.
struct HeldMemory {
  ValueId base = kNone;  // the computed value that the tensor was made from
  c10::VariableVersion counter;
  uint32_t version = 0;
  // The data of the storage begins with the base's first element.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  // A reference to `storage` if a tensor with another version counter shares the storage, else
  // null. Eager's saved tensors keep the storage alive, so the record also keeps the storage alive.
  c10::Storage kept;
};

// The HeldMemory entries of one record.
class HeldMemories {
 public:
  HeldMemories() = default;
  ~HeldMemories();
  HeldMemories(const HeldMemories&) = delete;
  HeldMemories& operator=(const HeldMemories&) = delete;

  void add(std::vector<HeldMemory> more);
  // Replaces each base with `now(base)`, and drops the entry if the new base is kNone.
  void renumber(c10::function_ref<ValueId(ValueId)> now);
  std::vector<HeldMemory>::const_iterator begin() const { return all_.begin(); }
  std::vector<HeldMemory>::const_iterator end() const { return all_.end(); }

  // Drops every HeldMemory::kept permanently. Must be called when nothing will read the memories
  // any more.
  void release();
  // Sets HeldMemory::kept for this storage, in the records of all threads.
  static void keep(const c10::Storage& storage);

 private:
  HeldMemory* find(const c10::Storage& storage);

  std::vector<HeldMemory> all_;  // all entries have different storages
  // Indices into all_, sorted by storage. Empty if the list is not built yet.
  std::vector<std::pair<const c10::StorageImpl*, uint32_t>> by_storage_;
  bool released_ = false;
};

}  // namespace autobatch
