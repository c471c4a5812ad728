#include "autobatch/scope/payoff.h"

#include "autobatch/backward/backward.h"
#include "autobatch/backward/overwrites.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/scope/block_history.h"
#include "autobatch/scope/scope.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace autobatch {
namespace {

constexpr double kLaunch = 3;  // time saved by a launch that is not made
constexpr double kNode = 1;    // cost of capturing a node
constexpr double kFlush = 12;
constexpr double kBackward = 4;  // time saved by a node whose backward is batched
constexpr double kLost = -60, kMostSaved = 240;
constexpr uint64_t kShortest = 256, kLongest = 4096, kForGood = uint64_t{1} << 60;  // in calls

}  // namespace

// --- blocks of one place ---

bool BlockHistory::pays(const Trials::Identity& identity, Clock::time_point now) {
  constexpr uint32_t kLosses = 8, kTrial = 64, kMostChanges = 8;
  constexpr std::chrono::milliseconds kWorthAsking{1};
  began_ = now;
  if (losses_ + 1 == kLosses) loser_ = identity();
  if (losses_ < kLosses) return true;
  if (took_ >= kWorthAsking && changes_ < kMostChanges && identity() != loser_) {
    losses_ = 0;
    most_calls_ = 0;
    paused_ = 0;
    ++changes_;
    return true;
  }
  if (++paused_ < kTrial) return false;
  paused_ = 0;
  return true;
}

void BlockHistory::add(bool paid, uint64_t calls) {
  losses_ = paid ? 0 : losses_ + 1;
  most_calls_ = paid ? 0 : std::max(most_calls_, calls);
  if (paid) changes_ = 0;
}

// --- reads of one block ---

bool Payoff::is_lost() const { return balance_ < kLost; }

void Payoff::start_trial() { balance_ = kLost + 1; }

bool Payoff::pays(uint64_t nodes, uint64_t launches) {
  return kLaunch * static_cast<double>(nodes - launches) >
         kNode * static_cast<double>(nodes) + kFlush;
}

void Payoff::add_read(const Flush& flush) {
  const auto nodes = static_cast<double>(flush.nodes);
  const double joined = nodes - static_cast<double>(flush.batches);
  // Nodes that stay pending may still join batches with later nodes.
  const double left =
      std::max(static_cast<double>(flush.waiting) - static_cast<double>(waiting_), 0.0);
  waiting_ = flush.waiting;
  double gain = kLaunch * (joined + left) - kNode * (nodes + left) - kFlush;
  if (flush.record_open) gain += kBackward * nodes;
  balance_ = std::min(balance_ + gain, kMostSaved);
  if (balance_ > 0) pause_ = 0;
}

uint64_t Payoff::start_pause() {
  pause_ = std::clamp(2 * pause_, kShortest, kLongest);
  return pause_;
}

// --- the scope ---

void Scope::add_read(uint64_t nodes_before, uint64_t batches_before, const std::string& reason) {
  if (!may_pause()) return;
  payoff_.add_read({report_.nodes - nodes_before, report_.batches - batches_before,
                    graph_->num_waiting(),
                    graph_->open_record() != nullptr && at::GradMode::is_enabled()});
  if (!payoff_.is_lost()) return;
  report_.add_pause(current_site());
  flush_all(reason);
  read_records_->before_pause();
  pause(payoff_.start_pause());
}

bool Scope::may_pause() const {
  const CaptureState& state = capture_state;
  return options_.adaptive && maps_ == 0 && state.scope == this && state.trace == nullptr &&
         state.formula == nullptr && state.may_flush && verifier_ == nullptr && !is_flushing();
}

void Scope::pause(uint64_t calls) {
  weight_copies_.clear();  // writes are not observed while the scope is paused
  CaptureState& state = CaptureState::current();
  state.scope = nullptr;
  state.paused = this;
  paused_at_ = state.calls;
  state.resume_at = state.calls + calls;
  c10::impl::tls_set_dispatch_key_included(compat::kDeferKey, false);
}

void Scope::resume() {
  CaptureState& state = CaptureState::current();
  if (state.paused != this) return;
  state.paused = nullptr;
  state.scope = this;
  report_.add_paused_calls(state.calls - paused_at_);
  payoff_.start_trial();
  c10::impl::tls_set_dispatch_key_included(compat::kDeferKey, true);
}

void Scope::begin_block(std::shared_ptr<BlockHistory> history,
                        const std::function<uint64_t()>& identity) {
  if (!options_.adaptive || verifier_ != nullptr || depth_ != 1 || history == nullptr) return;
  history_ = std::move(history);
  calls_before_ = capture_state.calls;
  if (history_->pays(identity)) {
    begin_trial(/*is_map=*/false, identity);
    return;
  }
  report_.add_pause(current_site());
  // The number of calls is multiplied, because a module and its function count as two calls during
  // a pause.
  pause(3 * history_->most_calls() + 16);
}

bool Scope::begin_map(std::shared_ptr<BlockHistory> history,
                      const std::function<uint64_t()>& identity) {
  if (depth_ != 1) return is_eager_;  // a map inside a block runs like the block
  // The history is null if map was not called from the program's own code
  // (`threading.Thread(target=ab.map, ...)`).
  if (verifier_ != nullptr || history_ != nullptr || history == nullptr) return false;
  history_ = std::move(history);
  calls_before_ = capture_state.calls;
  return begin_trial(/*is_map=*/true, identity);
}

bool Scope::begin_trial(bool is_map, const std::function<uint64_t()>& identity) {
  // Results of deferred and eager blocks differ in rounding, so deterministic programs run no
  // trials.
  if (at::globalContext().deterministicAlgorithms() || report_.trace != nullptr) return false;
  for (Trials& trials : history_->trials) trials.end_period();
  const bool grad_mode = at::GradMode::is_enabled();
  trials_ = &history_->trials.at((grad_mode ? 1 : 0) + (is_map ? 2 : 0));
  const Trials::Run run = trials_->begin(grad_mode, identity);
  estimates_ = run == Trials::Run::kSampled;
  is_eager_ = run == Trials::Run::kEager;
  if (!is_eager_) return false;
  report_.add_pause(current_site(), /*measured=*/true);
  pause(kForGood);
  return true;
}

// Adds the time of the nodes that common_subexpressions has removed, because eager mode runs them
// too. Each removed node is taken to need as much time as the average of the others.
static void add_removed_nodes(EagerEstimate& estimate, const Report& report) {
  const auto removed = report.passes.find("common_subexpressions");
  if (removed == report.passes.end() || report.nodes == 0) return;
  estimate.eager += estimate.eager * removed->second / report.nodes;
}

void Scope::end_block(bool failed) {
  if (history_ == nullptr) return;
  if (estimates_) add_removed_nodes(estimate_, report_);
  if (trials_ != nullptr && !failed) trials_->end(estimate_);
  const bool timed = trials_ != nullptr && trials_->decides();
  history_->end();
  const bool ran = report_.num_flushes > 0;
  if (ran) {
    // Counts of launches do not show what a batched backward gains, so timing takes precedence.
    const bool paid = timed || Payoff::pays(report_.nodes, report_.launches);
    history_->add(paid, capture_state.calls - calls_before_);
  }
  history_ = nullptr;
  trials_ = nullptr;
  estimates_ = is_eager_ = false;
  estimate_ = {};
}

bool count_call() {
  CaptureState& state = CaptureState::current();
  ++state.calls;
  if (state.paused != nullptr && state.calls >= state.resume_at) state.paused->resume();
  const bool captures = state.scope != nullptr;
  // When a mode that was entered before a pause (inference_mode) ends, it restores the old dispatch
  // keys.
  if (state.keys->included().has(compat::kDeferKey) != captures) [[unlikely]] {
    c10::impl::tls_set_dispatch_key_included(compat::kDeferKey, captures);
  }
  return captures;
}

}  // namespace autobatch
