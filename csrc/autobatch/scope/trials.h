// Whether blocks of one place are faster deferred or eager, by the clock. To defer is the rule.
// Where it may be the slower way (what the ops alone would take eagerly is less than what the block
// takes) a block is run eagerly, and where that is faster some more are, in turn with deferred
// ones. The faster way is taken from then on, and the other one tried again now and then. No answer
// depends on it, but for rounding.
#pragma once

#include "autobatch/graph/eager_estimate.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace autobatch {

class Trials {
 public:
  enum class Run : uint8_t {
    kDeferred,
    kSampled,  // deferred, with an estimate
    kEager
  };
  using Clock = std::chrono::steady_clock;
  // What a block can call, as a number: one place may open blocks of many models.
  using Identity = std::function<uint64_t()>;

  // A block begins. `records`: gradients are, so that backward and what else a step does belong to
  // its time, which lasts until the next one begins. `identity` is called where it matters.
  Run begin(bool records, const Identity& identity, Clock::time_point now = Clock::now());
  // The same block has ended without an error.
  void end(const EagerEstimate& estimate, Clock::time_point now = Clock::now());

 private:
  // The least of the last three, in seconds: other processes only make times longer.
  class Times {
   public:
    void add(double time) { times_[count_++ % times_.size()] = time; }
    size_t size() const { return count_ < times_.size() ? count_ : times_.size(); }
    double least() const;

   private:
    std::array<double, 3> times_{};
    size_t count_ = 0;
  };
  enum class Phase : uint8_t { kWatch, kTrial, kEagerWins };

  void add(Run run, double seconds);
  void decide();
  void start_watch(uint32_t wait);
  void start_trial();

  Phase phase_ = Phase::kWatch;
  Run run_ = Run::kDeferred;
  bool is_open_ = false, by_period_ = false, has_period_ = false;
  uint64_t identity_ = 0;  // of the blocks that are compared
  uint32_t wait_ = 1;      // blocks until the next estimate, or the next deferred block
  Clock::time_point began_;
  Times deferred_, eager_;
  double eager_block_ = 0;  // seconds of an eager block itself, without what follows it
};

}  // namespace autobatch
