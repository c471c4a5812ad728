// Measures whether the blocks of one place are faster if they are deferred or if they run eagerly.
// By default blocks are deferred. If the estimated eager time of a block's ops is shorter than the
// time of the whole block, one block runs eagerly. If the eager block is faster, further blocks of
// both modes are timed. Later blocks run in the faster mode, and the other mode is tried again at
// intervals. The choice affects only the rounding of results. One place may open blocks of many
// models in any order, so the times of the last few models are kept.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/eager_estimate.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace autobatch {

class Trials {
 public:
  enum class Run : uint8_t {
    kDeferred,
    kSampled,  // deferred, and the time of eager execution is estimated
    kEager
  };
  using Clock = std::chrono::steady_clock;
  // Returns a number that identifies the code that a block can call. The number is needed because
  // one place may open blocks of many models.
  using Identity = std::function<uint64_t()>;

  // Begins a block. `grad_mode` tells whether the block records gradients. If a block records
  // gradients, its measured time includes backward and the rest of the step, until the next block
  // begins at the place (end_period). `identity` is called only if needed.
  Run begin(bool grad_mode, const Identity& identity, Clock::time_point now = Clock::now());
  // Ends the measured time of the last block, if the block recorded gradients. Called when any
  // block begins at the place.
  void end_period(Clock::time_point now = Clock::now());
  // Ends the block that began last. Called only if the block raised no error.
  void end(const EagerEstimate& estimate, Clock::time_point now = Clock::now());
  // Whether timing decides about the blocks of the current identity: a trial is under way, or
  // deferring has won the last trial.
  bool decides() const { return known_.phase != Phase::kWatch || known_.deferring_won; }
  // Called if the open block of this thread does work for later blocks (a trace of a dynamic cell).
  // The times of the first such blocks do not count, because later blocks are faster.
  AUTOBATCH_INTERNAL static void note_preparation();

 private:
  // The last times, in seconds.
  class Times {
   public:
    static constexpr size_t kMost = 8;

    void add(double time) { times_[count_++ % kMost] = time; }
    size_t size() const { return count_ < kMost ? count_ : kMost; }
    double least() const;
    double most() const;
    double median() const;

   private:
    std::array<double, kMost> times_{};
    size_t count_ = 0;
  };
  enum class Phase : uint8_t { kWatch, kTrial, kEagerWins };
  // The measurements of the blocks of one identity.
  struct Known {
    uint64_t identity = 0;
    Phase phase = Phase::kWatch;
    uint32_t wait = 1;  // blocks until the next estimate (kWatch) or deferred block (kEagerWins)
    uint32_t preparing = 0;  // blocks that did not count, because they did work for later blocks
    // The wait after an estimate in favour of deferring. One estimate may be wrong by chance, so
    // the first waits are short.
    uint32_t wait_if_deferred = 16;
    // The wait after a trial that deferring has won.
    uint32_t wait_if_lost = 64;
    // The wait after a deferred block that was slower than eager blocks. The wait grows from block
    // to block, because such a deferred block may take several times as long as an eager one.
    uint32_t wait_if_eager = 0;
    Times deferred, eager;
    bool deferring_won = false;  // in the last trial
    bool varies = false;         // whether the blocks' sizes vary, and eager mode was faster
    double eager_block = 0;  // average seconds of an eager block itself, without the code after it
  };

  bool needs_identity();
  void switch_to(uint64_t identity);
  void add(Run run, double seconds);
  void decide();
  void decide_if_times_vary();
  void start_watch(uint32_t wait);
  void start_trial();
  void start_eager();
  void keep_deferring();
  void keep_deferring(uint32_t wait);

  Known known_;                // measurements for the current identity
  std::vector<Known> others_;  // measurements for other identities, the most recent first
  uint32_t unchanged_ = 0;     // number of consecutive determinations with the same identity
  uint32_t unknown_ = 0;       // number of consecutive determinations with a new identity
  uint32_t unasked_ = 0;       // number of blocks since an identity was determined
  Clock::duration took_{};     // duration of the last block
  Run run_ = Run::kDeferred;
  bool is_open_ = false, by_period_ = false, has_period_ = false;
  uint64_t preparations_ =
      0;  // the thread's number of calls of note_preparation() at the beginning
  Clock::time_point began_;
};

}  // namespace autobatch
