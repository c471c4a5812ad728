#include "autobatch/schedule/schedule_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

constexpr size_t kMostBytes = size_t{1} << 23;  // limit of all schedules, about 300,000 nodes

// Computes four independent chains, because each step of a chain has to wait for the previous step.
uint64_t hash_of(std::span<const uint32_t> words, uint64_t start) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15U;
  std::array<uint64_t, 4> chains{start, start + 1, start + 2, start + 3};
  const auto step = [](uint64_t chain, uint64_t word) {
    chain = (chain ^ word) * kFactor;
    return chain ^ (chain >> 32);
  };
  size_t i = 0;
  for (; i + 2 * chains.size() <= words.size(); i += 2 * chains.size()) {
    for (size_t k = 0; k < chains.size(); ++k) {
      uint64_t two = 0;
      std::memcpy(&two, &words[i + 2 * k], sizeof(two));
      chains[k] = step(chains[k], two);
    }
  }
  for (; i < words.size(); ++i) chains[0] = step(chains[0], words[i]);
  for (size_t k = 1; k < chains.size(); ++k) chains[0] = step(chains[0], chains[k]);
  return chains[0];
}

uint64_t hash_of(const ScheduleInput& graph) {
  uint64_t hash = hash_of(graph.signature, graph.num_signatures);
  hash = hash_of(graph.input_begin, hash);
  return hash_of(graph.inputs, hash);
}

template <class T>
bool are_equal(std::span<const T> view, const std::vector<T>& kept) {
  return std::equal(view.begin(), view.end(), kept.begin(), kept.end());
}

template <class T>
std::vector<T> copy(std::span<const T> view) {
  return {view.begin(), view.end()};
}

template <class T>
size_t bytes_of(const std::vector<T>& vector) {
  return vector.capacity() * sizeof(T);
}

class Kept {
 public:
  Kept(const ScheduleInput& graph, uint64_t hash, Schedule schedule)
      : hash_(hash),
        signature_(copy(graph.signature)),
        input_begin_(copy(graph.input_begin)),
        inputs_(copy(graph.inputs)),
        batchable_(copy(graph.batchable)),
        heavy_(copy(graph.heavy)),
        schedule_(std::move(schedule)) {}

  uint64_t hash() const { return hash_; }
  bool is_of(const ScheduleInput& graph) const {
    return are_equal(graph.signature, signature_) && are_equal(graph.input_begin, input_begin_) &&
           are_equal(graph.inputs, inputs_) && are_equal(graph.batchable, batchable_) &&
           are_equal(graph.heavy, heavy_);
  }
  const Schedule& schedule() const { return schedule_; }
  size_t bytes() const {
    return sizeof(*this) + bytes_of(signature_) + bytes_of(input_begin_) + bytes_of(inputs_) +
           bytes_of(batchable_) + bytes_of(heavy_) + bytes_of(schedule_.order) +
           bytes_of(schedule_.batch_begin);
  }

 private:
  uint64_t hash_;
  std::vector<uint32_t> signature_, input_begin_, inputs_;
  std::vector<uint8_t> batchable_, heavy_;
  Schedule schedule_;
};

class Schedules {
 public:
  static Schedules& get() {
    static auto* schedules = new Schedules();  // never destroyed: flushes may run at exit
    return *schedules;
  }

  // Sets `comes_again` to true if the table of hashes contains the graph's hash. In this case the
  // structure has probably occurred before.
  std::optional<Schedule> find(const ScheduleInput& graph, uint64_t hash, bool& comes_again) {
    const std::lock_guard lock(mutex_);
    comes_again = std::exchange(seen_[hash % seen_.size()], hash) == hash;
    const auto found = comes_again ? index_.find(hash) : index_.end();
    if (found == index_.end() || !found->second->is_of(graph)) return std::nullopt;
    return found->second->schedule();
  }

  void keep(Kept kept) {
    const std::lock_guard lock(mutex_);
    if (index_.count(kept.hash()) != 0) return;  // another thread was first, or the hashes collide
    bytes_ += kept.bytes();
    kept_.push_back(std::move(kept));
    index_.emplace(kept_.back().hash(), std::prev(kept_.end()));
    for (; bytes_ > kMostBytes; kept_.pop_front()) {
      bytes_ -= kept_.front().bytes();
      index_.erase(kept_.front().hash());
    }
  }

  size_t clear() {
    const std::lock_guard lock(mutex_);
    index_.clear();
    kept_.clear();
    return std::exchange(bytes_, 0);
  }

 private:
  std::mutex mutex_;
  std::array<uint64_t, 1024> seen_{};  // a hash h is stored at index h % size
  std::list<Kept> kept_;               // the oldest schedule is first
  std::unordered_map<uint64_t, std::list<Kept>::iterator> index_;  // key: hash
  size_t bytes_ = 0;
};

}  // namespace

Schedule reuse_schedule(const ScheduleInput& graph, const std::function<Schedule()>& schedule) {
  const uint64_t hash = hash_of(graph);
  bool comes_again = false;
  if (std::optional<Schedule> kept = Schedules::get().find(graph, hash, comes_again)) {
    return *std::move(kept);
  }
  Schedule made = schedule();
  if (comes_again) Schedules::get().keep({graph, hash, made});
  return made;
}

size_t forget_schedules() { return Schedules::get().clear(); }

}  // namespace autobatch
