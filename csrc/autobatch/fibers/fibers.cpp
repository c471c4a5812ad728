#include "autobatch/fibers/fibers.h"

#include "autobatch/cells/cell_template.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/thread_state.h"

#include <ATen/autocast_mode.h>
#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/PythonDispatcherTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <cxxabi.h>

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

thread_local Fiber* current_fiber = nullptr;
thread_local uint64_t fibers_made = 0;

// Whether any thread of this process uses forward-mode AD. The level of forward-mode AD is global
// to the process.
bool is_in_forward_ad() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

bool has_saved_hooks() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  return !hooks.stack.empty() || hooks.disabled_error_message.has_value();
}

// This function is a template, because some members of `State` exist only in some versions of
// PyTorch.
template <class State>
bool is_equal(const State& a, const State& b) {
  if (a.get_grad_mode() != b.get_grad_mode() || a.get_inference_mode() != b.get_inference_mode() ||
      a.get_fw_grad_mode() != b.get_fw_grad_mode() ||
      a.get_multithreading_enabled() != b.get_multithreading_enabled() ||
      a.get_view_replay_enabled() != b.get_view_replay_enabled()) {
    return false;
  }
  if constexpr (requires { a.get_grad_layout_enforcement_enabled(); }) {
    if (a.get_grad_layout_enforcement_enabled() != b.get_grad_layout_enforcement_enabled()) {
      return false;
    }
  }
  if constexpr (requires { a.get_graph_exec_group(); }) {
    if (a.get_graph_exec_group().has_value() || b.get_graph_exec_group().has_value()) return false;
  }
  return true;
}

}  // namespace

// --- thread-local state ---

ThreadState::Stack::Exceptions& ThreadState::Stack::exceptions() {
  return *reinterpret_cast<Exceptions*>(abi::__cxa_get_globals());
}

void ThreadState::Stack::restore() const {
  c10::WarningUtils::set_warning_handler(warnings_);
  exceptions() = exceptions_;
}

ThreadState::ThreadState()
    : keys_(c10::impl::tls_local_dispatch_key_set()),
      autograd_(c10::AutogradState::get_tls_state()),
      torch_function_(at::impl::PythonTorchFunctionTLS::get_state()),
      debug_info_(c10::ThreadLocalDebugInfo::current()),
      autocast_cpu_(at::autocast::get_autocast_dtype(at::kCPU)),
      autocast_cuda_(at::autocast::get_autocast_dtype(accelerator())),
      default_dtype_(c10::get_default_dtype_as_scalartype()),
      autocast_cache_(at::autocast::is_autocast_cache_enabled()),
      eager_(capture_state.eager),
      captures_data_(capture_state.captures_data),
      has_modes_(at::impl::PythonTorchFunctionTLS::stack_len() > 0),
      torch_function_disabled_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
  if (has_saved_hooks()) saved_hooks_ = at::SavedTensorDefaultHooks::get_tls_state();
}

bool ThreadState::is_current() const {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return keys_.included_ == keys.included_ && keys_.excluded_ == keys.excluded_ &&
         eager_ == capture_state.eager && captures_data_ == capture_state.captures_data &&
         is_equal(autograd_, c10::AutogradState::get_tls_state()) && !has_modes_ &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         torch_function_disabled_ == at::impl::PythonTorchFunctionTLS::get_disabled_state() &&
         debug_info_ == c10::ThreadLocalDebugInfo::current() && !saved_hooks_.has_value() &&
         !has_saved_hooks() && autocast_cpu_ == at::autocast::get_autocast_dtype(at::kCPU) &&
         autocast_cuda_ == at::autocast::get_autocast_dtype(accelerator()) &&
         autocast_cache_ == at::autocast::is_autocast_cache_enabled() &&
         default_dtype_ == c10::get_default_dtype_as_scalartype();
}

void ThreadState::restore() const {
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
  capture_state.eager = eager_;
  capture_state.captures_data = captures_data_;
  c10::AutogradState::set_tls_state(autograd_);
  at::impl::PythonTorchFunctionTLS::set_state(torch_function_);
  if (c10::ThreadLocalDebugInfo::current() != debug_info_) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(debug_info_);
  }
  if (saved_hooks_.has_value() || has_saved_hooks()) {
    at::SavedTensorDefaultHooks::set_tls_state(
        saved_hooks_.value_or(at::impl::SavedTensorDefaultHooksTLS()));
  }
  stack_.restore();
  at::autocast::set_autocast_dtype(at::kCPU, autocast_cpu_);
  at::autocast::set_autocast_dtype(accelerator(), autocast_cuda_);
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  if (c10::get_default_dtype_as_scalartype() != default_dtype_) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype_));
  }
}

// --- one fiber ---

Fiber* Fiber::current() { return current_fiber; }

Fiber* Fiber::suspendable() {
  Fiber* fiber = current_fiber;
  if (fiber == nullptr || fiber->ending_ || !fiber->turn_kept_by_.empty()) return nullptr;
  if (fiber->num_pins_ > 0) return nullptr;
  if (Scope::is_flushing()) return nullptr;
  if (torch::autograd::get_current_graph_task_id() != -1) return nullptr;
  if (CellTrace::current() != nullptr) return nullptr;  // the trace would record other fibers' ops
  if (c10::impl::dispatch_mode_enabled() || torch::jit::tracer::isTracing() ||
      c10::impl::PythonDispatcherTLS::get_state() != nullptr ||
      !at::functorch::getDynamicLayerStack().empty()) {
    return nullptr;
  }
  if (is_in_forward_ad() && !fiber->pool_.in_forward_ad_) return nullptr;
  return fiber;
}

bool Fiber::wait_for(at::ArrayRef<PendingTensor*> tensors, const std::string& reason,
                     bool values_only) {
  wanted_.assign(tensors.begin(), tensors.end());
  values_only_ = values_only;
  const bool first = pool_.reason_.empty();
  if (first) {
    pool_.reason_ = reason;
    pool_.site_ = current_site();
  }
  if (suspend(State::kWaitsForValues)) return true;
  wanted_.clear();
  if (first) {
    pool_.reason_.clear();
    pool_.site_.clear();
  }
  return false;
}

bool Fiber::wait_for_end(uint64_t number) {
  const Fiber* other = pool_.find_number(number);
  if (other == nullptr || other->index_ >= index_) return false;
  awaited_ = number;
  ++pool_.num_held_;
  const auto release = c10::make_scope_exit([this] { --pool_.num_held_; });
  return suspend(State::kWaitsForEnd);
}

bool Fiber::wait_for_earlier() {
  const auto runs = [](const auto& fiber) { return fiber->state_ != State::kEnded; };
  const auto first = std::ranges::find_if(pool_.fibers_, runs);
  return first != pool_.fibers_.end() && wait_for_end((*first)->number_);
}

bool Fiber::wait_for_host() { return suspend(State::kWaitsForHost); }

Fiber* Fiber::next_served() { return own_state_.has_value() ? nullptr : pool_.next_served(); }

bool Fiber::suspend(State state) {
  Left left = Left::kNot;
  {
    const ThreadState::Stack stack;
    if (!pool_.base_.is_current()) own_state_.emplace();
    const int locks = pool_.scope_.unlock();
    state_ = state;
    left = leave();
    current_fiber = this;
    own_state_.has_value() ? own_state_->restore() : stack.restore();
    own_state_.reset();
    pool_.scope_.lock(locks);
  }
  // Exceptions may be thrown only after this point. While the lists of exceptions are exchanged, no
  // exception may be in flight.
  if (left == Left::kNot) {
    state_ = State::kRunning;
    return false;
  }
  if (left == Left::kToEnd) raise_end();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  return true;
}

// --- the pool ---

FiberPool::FiberPool(Scope& scope, size_t max_live)
    : scope_(scope),
      max_live_(max_live == 0 ? std::numeric_limits<size_t>::max() : max_live),
      outer_(current_fiber),
      in_forward_ad_(is_in_forward_ad()) {}

void FiberPool::run() {
  const Scope::LossesKept losses(scope_);
  std::exception_ptr failure;
  try {
    run_all();
  } catch (...) {
    failure = std::current_exception();
  }
  // end_from() must not be called inside the `catch` block, because end_from() runs fibers, and
  // each fiber has a separate list of handled exceptions.
  end_from(0);
  if (failure) std::rethrow_exception(failure);
}

void FiberPool::run_all() {
  for (;;) {
    fill();
    if (fibers_.empty()) return;
    serve();
  }
}

void FiberPool::fill() {
  while (!exhausted_ && num_held_ == 0 && stop_ == std::numeric_limits<size_t>::max() &&
         fibers_.size() < max_live_) {
    std::unique_ptr<Fiber> fiber = next();
    exhausted_ = fiber == nullptr;
    if (exhausted_) return;
    number(*fiber);
    fibers_.push_back(std::move(fiber));
    resume(*fibers_.back());
    if (fibers_.back()->state_ == Fiber::State::kEnded) fibers_.pop_back();
  }
}

void FiberPool::number(Fiber& fiber) { fiber.number_ = ++fibers_made; }

void FiberPool::resume(Fiber& fiber, bool to_end) {
  fiber.state_ = Fiber::State::kRunning;
  fiber.ending_ = to_end;
  current_fiber = &fiber;
  const bool ended = to_end ? end(fiber) : enter(fiber);
  Fiber& last = *std::exchange(current_fiber, outer_);
  if (ended) last.state_ = Fiber::State::kEnded;
  if (ended && last.has_checks_) {
    last.ending_ ? scope_.checks().drop(last.number_)
                 : static_cast<void>(checked_.emplace_back(last.index_, last.number_));
  }
  // A mode that the fiber has entered must not be active in the next fiber.
  ended || last.own_state_.has_value() ? base_.restore() : base_.stack().restore();
}

// Returns the next fiber to resume, and marks the fiber as running. Returns null if there is no
// such fiber.
Fiber* FiberPool::next_served() {
  while (resumed_ < served_.size()) {
    Fiber* fiber = served_[resumed_++];
    if (fiber->index_ >= stop_ || fiber->index_ > first_held()) continue;
    fiber->state_ = Fiber::State::kRunning;
    return fiber;
  }
  return nullptr;
}

// Called when every fiber waits. Computes the values that fibers wait for. If no fiber waits for a
// value, calls serve_host().
void FiberPool::serve() {
  if (resume_after_ends()) return;
  std::vector<Fiber*> waiting;
  for (const auto& fiber : fibers_) {
    if (fiber->index_ > first_held()) break;
    if (fiber->state_ == Fiber::State::kWaitsForValues) waiting.push_back(fiber.get());
  }
  if (!waiting.empty()) {
    serve_values(waiting);
  } else {
    // The host is called only if no fiber waits for values. So the host can serve as many fibers as
    // possible together.
    for (const auto& fiber : fibers_) {
      if (fiber->state_ == Fiber::State::kWaitsForHost) waiting.push_back(fiber.get());
    }
    serve_host(waiting);
  }
  resume_all(std::move(waiting));
}

// Resumes the fibers that wait for the end of a fiber that has ended. Returns false if there are no
// such fibers.
bool FiberPool::resume_after_ends() {
  if (num_held_ == 0) return false;
  std::vector<Fiber*> ready;
  for (const auto& fiber : fibers_) {
    const bool waits = fiber->state_ == Fiber::State::kWaitsForEnd;
    if (waits && find_number(fiber->awaited_) == nullptr) ready.push_back(fiber.get());
  }
  const bool any = !ready.empty();
  resume_all(std::move(ready));
  return any;
}

size_t FiberPool::first_held() const {
  const auto waits = [](const auto& f) { return f->state_ == Fiber::State::kWaitsForEnd; };
  const auto first = num_held_ == 0 ? fibers_.end() : std::ranges::find_if(fibers_, waits);
  return first == fibers_.end() ? std::numeric_limits<size_t>::max() : (*first)->index_;
}

Fiber* FiberPool::find_number(uint64_t number) const {
  const auto found = std::ranges::find_if(fibers_, [number](const auto& fiber) {
    return fiber->number_ == number && fiber->state_ != Fiber::State::kEnded;
  });
  return found == fibers_.end() ? nullptr : found->get();
}

void FiberPool::resume_all(std::vector<Fiber*> fibers) {
  served_ = std::move(fibers);
  resumed_ = 0;
  while (Fiber* fiber = next_served()) resume(*fiber);
  sweep();
}

void FiberPool::sweep() {
  std::erase_if(fibers_, [](const auto& f) { return f->state_ == Fiber::State::kEnded; });
  if (stop_ != std::numeric_limits<size_t>::max()) end_from(stop_);
}

void FiberPool::serve_values(at::ArrayRef<Fiber*> waiting) {
  c10::SmallVector<PendingTensor*, 64> wanted;
  bool values_only = true;
  for (const Fiber* fiber : waiting) {
    values_only = values_only && fiber->values_only_;
    for (PendingTensor* tensor : fiber->wanted_) {
      if (tensor->is_pending()) wanted.push_back(tensor);
    }
  }
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::exception_ptr failure;
  bool interrupted = false;
  try {
    // If this pool runs inside an outer fiber, the outer fiber may wait instead of flushing here.
    // In this case the outer fiber reports the line of user code.
    std::optional<SiteGuard> site;
    if (outer_ == nullptr) site.emplace(site_);
    site_.clear();
    const std::string reason = std::exchange(reason_, {}) + kOfMap;
    host_wait([&] { scope_.compute(wanted, reason, values_only); });
  } catch (const std::exception& error) {
    failure = std::current_exception();
    interrupted = host_interrupts(error);
  }
  // A failed check may also belong to the code that runs this pool. In this case, that code must
  // get the error.
  const uint64_t runs = outer_ == nullptr ? 0 : outer_->number();
  if (interrupted || (failure && scope_.checks().has_failed(runs))) {
    std::rethrow_exception(failure);
  }
  for (Fiber* fiber : waiting) {
    for (const PendingTensor* tensor : fiber->wanted_) {
      if (!tensor->is_lost() && (!tensor->is_pending() || scope_.is_computed(*tensor))) {
        continue;
      }
      const std::exception_ptr cause = scope_.loss_of(*tensor);
      fiber->error_ = cause ? cause : failure;
      if (fiber->error_) break;
    }
    fiber->wanted_.clear();
  }
}

void FiberPool::end_from(size_t index) {
  for (const auto& fiber : fibers_) {
    if (fiber->index_ < index) continue;
    while (fiber->state_ != Fiber::State::kEnded) resume(*fiber, /*to_end=*/true);
  }
  std::erase_if(fibers_, [](const auto& f) { return f->state_ == Fiber::State::kEnded; });
}

}  // namespace autobatch
