#include "autobatch/graph/held_memory.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <unordered_set>

namespace autobatch {
namespace {

// mutex() protects the entries of all HeldMemories objects. alive() contains each HeldMemories
// object that has entries and was not released.
std::mutex& mutex() {
  static auto* one = new std::mutex();
  return *one;
}
std::unordered_set<HeldMemories*>& alive() {
  static auto* all = new std::unordered_set<HeldMemories*>();
  return *all;
}

}  // namespace

HeldMemories::~HeldMemories() {
  if (all_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex());
  alive().erase(this);
}

void HeldMemories::add(std::vector<HeldMemory> more) {
  if (more.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex());
  all_.insert(all_.end(), std::make_move_iterator(more.begin()),
              std::make_move_iterator(more.end()));
  by_storage_.clear();
  if (!released_) alive().insert(this);
}

void HeldMemories::renumber(c10::function_ref<ValueId(ValueId)> now) {
  std::vector<HeldMemory> dropped;  // destroyed after the mutex is unlocked, as in release()
  const std::lock_guard<std::mutex> lock(mutex());
  for (HeldMemory& memory : all_) memory.base = now(memory.base);
  const auto first = std::stable_partition(
      all_.begin(), all_.end(), [](const HeldMemory& memory) { return memory.base != kNone; });
  if (first == all_.end()) return;
  dropped.assign(std::make_move_iterator(first), std::make_move_iterator(all_.end()));
  all_.erase(first, all_.end());
  by_storage_.clear();
  if (all_.empty()) alive().erase(this);
}

void HeldMemories::release() {
  // Destroying a storage may run Python code, which may call keep(). So the storages are destroyed
  // after the mutex is unlocked.
  std::vector<c10::Storage> kept;
  const std::lock_guard<std::mutex> lock(mutex());
  released_ = true;
  alive().erase(this);
  for (HeldMemory& memory : all_) {
    if (memory.kept) kept.push_back(std::move(memory.kept));
  }
}

void HeldMemories::keep(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> lock(mutex());
  for (HeldMemories* memories : alive()) {
    if (HeldMemory* memory = memories->find(storage)) memory->kept = storage;
  }
}

HeldMemory* HeldMemories::find(const c10::Storage& storage) {
  if (by_storage_.empty()) {
    for (uint32_t i = 0; i < all_.size(); ++i) {
      by_storage_.emplace_back(all_[i].storage._unsafe_get_target(), i);
    }
    std::sort(by_storage_.begin(), by_storage_.end());
  }
  const std::pair<const c10::StorageImpl*, uint32_t> first(storage.unsafeGetStorageImpl(), 0);
  const auto found = std::lower_bound(by_storage_.begin(), by_storage_.end(), first);
  if (found == by_storage_.end() || found->first != first.first) return nullptr;
  return &all_[found->second];
}

}  // namespace autobatch
