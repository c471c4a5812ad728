#include "autobatch/scope/trials.h"

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr uint32_t kRetry = 16;   // eager blocks between two deferred ones, if eager is faster
constexpr uint32_t kRare = 1024;  // blocks until the next estimate, if deferring is clearly faster
constexpr double kMargin = 0.97;  // above this ratio of eager to deferred time, deferring is kept
constexpr double kClear = 0.85;   // up to this ratio, two blocks of each kind are enough
constexpr double kLost = 1.15;    // above this ratio, one eager block is enough
constexpr double kOther = 2;      // a block whose time differs by this factor does other work
constexpr double kSure = 0.5;     // share of a block's time; if its ops take longer, it is deferred
constexpr Seconds kShortest{1e-3};  // a shorter block is not worth a trial

}  // namespace

double Trials::Times::least() const {
  return *std::min_element(times_.begin(), times_.begin() + static_cast<ptrdiff_t>(size()));
}

Trials::Run Trials::begin(bool grad_mode, const Identity& identity, Clock::time_point now) {
  if (has_period_ && by_period_) add(run_, Seconds(now - began_).count());
  has_period_ = false;
  is_open_ = true;
  by_period_ = grad_mode;
  began_ = now;
  if (phase_ != Phase::kWatch || wait_ == 0) {
    const uint64_t other = identity();
    if (std::exchange(identity_, other) != other) start_watch(0);
  }
  switch (phase_) {
    case Phase::kWatch:
      run_ = wait_ == 0 ? Run::kSampled : Run::kDeferred;
      break;
    case Phase::kTrial:  // a deferred block first: an earlier one may have been slow by chance
      run_ = eager_.size() < deferred_.size() ? Run::kEager : Run::kDeferred;
      break;
    case Phase::kEagerWins:
      run_ = wait_ == 0 ? Run::kDeferred : Run::kEager;
      break;
  }
  return run_;
}

void Trials::end(const EagerEstimate& estimate, Clock::time_point now) {
  if (!is_open_) return;
  is_open_ = false;
  const Seconds took = now - began_;
  if (run_ == Run::kSampled) {
    const Seconds itself = took - Seconds(estimate.sampling);
    const bool may_lose = itself > kShortest && Seconds(estimate.eager) < kSure * itself;
    return may_lose ? start_trial() : start_watch(kRare);
  }
  has_period_ = true;
  if (wait_ > 0) --wait_;
  if (run_ == Run::kEager) {
    const bool is_other = eager_block_ > 0 && (took.count() > kOther * eager_block_ ||
                                               took.count() * kOther < eager_block_);
    eager_block_ += (took.count() - eager_block_) / (eager_block_ == 0 ? 1 : 4);
    if (is_other && phase_ == Phase::kEagerWins) return start_watch(0);
  }
  if (!by_period_) add(run_, took.count());
}

void Trials::add(Run run, double seconds) {
  if (run == Run::kEager) eager_.add(seconds);
  if (run == Run::kDeferred) deferred_.add(seconds);
  if (phase_ == Phase::kTrial) return decide();
  if (phase_ != Phase::kEagerWins || run != Run::kDeferred) return;
  wait_ = kRetry;
  if (seconds < eager_.least()) start_trial();
}

void Trials::decide() {
  if (eager_.size() == 0 || deferred_.size() == 0) return;
  const double ratio = eager_.least() / deferred_.least();
  // A long time between blocks may be due to an evaluation or a checkpoint. A second eager block is
  // then measured.
  const bool may_be_other_work =
      by_period_ && eager_.size() == 1 && eager_.least() - eager_block_ > deferred_.least();
  if (ratio > kLost && !may_be_other_work) return start_watch(kRare);
  const size_t fewest = std::min(eager_.size(), deferred_.size());
  if (fewest < 2 || (fewest < 3 && ratio > kClear)) return;
  if (ratio > kMargin) return start_watch(kRetry);
  phase_ = Phase::kEagerWins;
  wait_ = kRetry;
}

void Trials::start_watch(uint32_t wait) {
  phase_ = Phase::kWatch;
  wait_ = wait;
  eager_block_ = 0;
}

void Trials::start_trial() {
  phase_ = Phase::kTrial;
  eager_block_ = 0;
  deferred_ = eager_ = Times();
}

}  // namespace autobatch
