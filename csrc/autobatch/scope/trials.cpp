#include "autobatch/scope/trials.h"

#include <algorithm>

namespace autobatch {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr uint32_t kRetry = 16;       // fewest eager blocks between two deferred blocks
constexpr uint32_t kMostRetry = 256;  // most eager blocks between two deferred blocks
constexpr uint32_t kRare = 1024;      // most blocks until the next estimate, if deferring is faster
constexpr uint32_t kLonger = 4;       // factor by which the wait grows from estimate to estimate
constexpr double kMargin = 0.97;    // above this ratio of eager to deferred time, deferring is kept
constexpr double kSlower = 1.15;    // above this time ratio, two eager blocks are enough
constexpr double kLost = 3;         // above this time ratio, one eager block is enough
constexpr double kVaries = 1.5;     // ratio of two times of one mode if the blocks' sizes vary
constexpr double kOther = 2;        // a block whose time differs by this factor runs different code
constexpr double kSure = 0.9;       // above this ratio of op time to block time, deferring is kept
constexpr Seconds kShortest{4e-4};  // shorter blocks have no trials
constexpr uint32_t kOften = 7;      // blocks shorter than kLong until the next identity is computed
constexpr Seconds kLong{4e-3};      // for longer blocks, computing the identity costs below 1 %
constexpr uint32_t kChanging = 8;   // changes in a row until only needed identities are computed
constexpr size_t kMostOthers = 8;   // identities whose times are kept, besides the current identity
constexpr uint32_t kForget = 64;    // after this many blocks of one identity, others are dropped
constexpr uint32_t kMostPreparing = 8;  // later blocks count even if they do work for later blocks

thread_local uint64_t preparations = 0;

// Whether block `i` of a trial runs eagerly: D D E E E E D D D E E E E D D D. Deferred blocks are
// first, because earlier blocks may have been slow by chance. A program may do other work after
// every second to fifth block. In this sequence, the other work follows blocks of both modes about
// equally often.
bool is_eager_in_trial(size_t i) { return (0x1E3C >> (i % 16) & 1) != 0; }

}  // namespace

double Trials::Times::least() const {
  return *std::min_element(times_.begin(), times_.begin() + static_cast<ptrdiff_t>(size()));
}

double Trials::Times::most() const {
  return *std::max_element(times_.begin(), times_.begin() + static_cast<ptrdiff_t>(size()));
}

double Trials::Times::median() const {
  std::array<double, kMost> sorted = times_;
  std::sort(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(size()));
  return (sorted[(size() - 1) / 2] + sorted[size() / 2]) / 2;
}

// Computing the identity takes a considerable part of the time of a short block. Therefore the
// identity of short blocks is computed only if a block may run eagerly, and occasionally to detect
// another model. In some programs each block has a new identity, for example because each block
// makes a new model. An identity is useless for such programs.
bool Trials::needs_identity() {
  if (took_ >= kShortest && unknown_ < kChanging) {
    if (took_ >= kLong || unasked_ >= kOften) return true;
    ++unasked_;
  }
  const auto may_be_eager = [](const Known& known) {
    return known.phase != Phase::kWatch || known.wait == 0;
  };
  return may_be_eager(known_) || std::ranges::any_of(others_, may_be_eager);
}

void Trials::switch_to(uint64_t identity) {
  unasked_ = 0;
  if (identity == known_.identity) {
    unknown_ = 0;
    if (++unchanged_ > kForget) others_.clear();
    return;
  }
  unchanged_ = 0;
  Known next;
  next.identity = identity;
  next.wait = 0;
  const auto found = std::ranges::find(others_, identity, &Known::identity);
  unknown_ = found == others_.end() ? unknown_ + 1 : 0;
  if (found != others_.end()) {
    next = *found;
    others_.erase(found);
  }
  if (known_.identity != 0) others_.insert(others_.begin(), known_);
  if (others_.size() > kMostOthers) others_.pop_back();
  known_ = next;
}

Trials::Run Trials::begin(bool grad_mode, const Identity& identity, Clock::time_point now) {
  end_period(now);
  is_open_ = true;
  by_period_ = grad_mode;
  began_ = now;
  preparations_ = preparations;
  if (needs_identity()) switch_to(identity());
  switch (known_.phase) {
    case Phase::kWatch:
      run_ = known_.wait == 0 ? Run::kSampled : Run::kDeferred;
      break;
    case Phase::kTrial:
      run_ = is_eager_in_trial(known_.eager.size() + known_.deferred.size()) ? Run::kEager
                                                                             : Run::kDeferred;
      break;
    case Phase::kEagerWins:
      run_ = known_.wait == 0 ? Run::kDeferred : Run::kEager;
      break;
  }
  return run_;
}

void Trials::end_period(Clock::time_point now) {
  if (has_period_ && by_period_) add(run_, Seconds(now - began_).count());
  has_period_ = false;
}

void Trials::end(const EagerEstimate& estimate, Clock::time_point now) {
  if (!is_open_) return;
  is_open_ = false;
  took_ = now - began_;
  if (preparations != preparations_ && known_.preparing < kMostPreparing) {
    ++known_.preparing;
    return;
  }
  const Seconds took = took_;
  if (run_ == Run::kSampled) {
    const Seconds itself = took - Seconds(estimate.sampling);
    const bool may_lose = itself > kShortest && Seconds(estimate.eager) < kSure * itself;
    if (may_lose) return start_trial();
    start_watch(known_.wait_if_deferred);
    known_.wait_if_deferred = std::min(kRare, kLonger * known_.wait_if_deferred);
    return;
  }
  has_period_ = true;
  if (known_.wait > 0) --known_.wait;
  if (run_ == Run::kEager) {
    const bool is_other = known_.eager_block > 0 && (took.count() > kOther * known_.eager_block ||
                                                     took.count() * kOther < known_.eager_block);
    known_.eager_block += (took.count() - known_.eager_block) / (known_.eager_block == 0 ? 1 : 4);
    if (is_other && !known_.varies && known_.phase == Phase::kEagerWins) return start_trial();
  }
  if (!by_period_) add(run_, took.count());
}

void Trials::note_preparation() { ++preparations; }

void Trials::add(Run run, double seconds) {
  if (run == Run::kEager) known_.eager.add(seconds);
  if (run == Run::kDeferred) known_.deferred.add(seconds);
  if (known_.phase == Phase::kTrial) return decide();
  if (known_.phase != Phase::kEagerWins || run != Run::kDeferred) return;
  known_.wait = known_.wait_if_eager;
  known_.wait_if_eager = std::min(kMostRetry, 2 * known_.wait_if_eager);
  const double eager = known_.varies ? known_.eager.median() : known_.eager.least();
  if (seconds < eager) start_trial();
}

void Trials::decide() {
  if (known_.eager.size() == 0 || known_.deferred.size() == 0) return;
  const Times &eager = known_.eager, &deferred = known_.deferred;
  // A long time between blocks may be caused by an evaluation or a checkpoint. If this is possible,
  // a second eager block is timed.
  const bool may_be_other_work =
      by_period_ && eager.size() == 1 && eager.least() - known_.eager_block > deferred.least();
  if (eager.least() > kLost * deferred.most() && !may_be_other_work) return keep_deferring();
  if (eager.most() > kVaries * eager.least() || deferred.most() > kVaries * deferred.least()) {
    return decide_if_times_vary();
  }
  // A single time may be too long, because another process disturbed the block.
  const double ratio = eager.least() / deferred.least();
  const size_t fewest = std::min(eager.size(), deferred.size());
  if (fewest >= 2 && ratio > kSlower) return keep_deferring();
  if (fewest < 3) return;
  if (ratio > kMargin) return keep_deferring(kRetry);
  start_eager();
}

// The sizes of the blocks differ, or other processes disturbed some of them. So the least time of
// each mode may belong to blocks of different sizes, and the medians of more times are compared.
void Trials::decide_if_times_vary() {
  const Times &eager = known_.eager, &deferred = known_.deferred;
  if (std::min(eager.size(), deferred.size()) < Times::kMost) return;
  const double ratio = eager.median() / deferred.median();
  if (ratio > kMargin) return keep_deferring(ratio > kSlower ? kRare : kRetry);
  start_eager();
  known_.varies = true;
}

// Deferring has clearly won.
void Trials::keep_deferring() {
  keep_deferring(known_.wait_if_lost);
  known_.wait_if_lost = std::min(kRare, kLonger * known_.wait_if_lost);
}

void Trials::keep_deferring(uint32_t wait) {
  start_watch(wait);
  known_.deferring_won = true;
  known_.wait_if_eager = 0;
}

void Trials::start_eager() {
  known_.phase = Phase::kEagerWins;
  known_.deferring_won = false;
  known_.wait_if_eager = std::clamp(2 * known_.wait_if_eager, kRetry, kMostRetry);
  known_.wait = known_.wait_if_eager;
}

void Trials::start_watch(uint32_t wait) {
  known_.phase = Phase::kWatch;
  known_.wait = wait;
  known_.eager_block = 0;
}

void Trials::start_trial() {
  known_.phase = Phase::kTrial;
  known_.varies = false;
  known_.eager_block = 0;
  known_.deferred = known_.eager = Times();
}

}  // namespace autobatch
