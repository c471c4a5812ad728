// Serves fibers that arrive one by one. A fiber can resume while other fibers still run. A slice
// runs a part of the pending nodes. After each slice, the fibers whose values are computed are
// resumed.
#include "autobatch/common/host_hooks.h"
#include "autobatch/fibers/fibers.h"

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

// The errors of lost tensors are stored until this number of slices has failed. Then the errors are
// freed, because each error holds references to the stack frames of its traceback.
constexpr size_t kMostFailed = 32;

// Measures the time from construction to destruction, and adds it to `sum`.
class Timer {
 public:
  explicit Timer(std::chrono::nanoseconds& sum) : sum_(sum) {}
  ~Timer() { sum_ += std::chrono::steady_clock::now() - began_; }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  std::chrono::nanoseconds& sum_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

}  // namespace

void FiberPool::start(std::unique_ptr<Fiber> fiber) {
  const Timer timer(in_fibers_);
  number(*fiber);
  fibers_.push_back(std::move(fiber));
  resume(*fibers_.back());
  if (fibers_.back()->state_ == Fiber::State::kEnded) fibers_.pop_back();
}

bool FiberPool::serve_slice(std::chrono::nanoseconds bound) {
  if (!losses_.has_value()) losses_.emplace(scope_);
  const auto waits = [](const auto& fiber) {
    return fiber->state_ == Fiber::State::kWaitsForValues;
  };
  {
    const Timer timer(in_fibers_);
    if (resume_after_ends()) return true;
  }
  if (std::ranges::none_of(fibers_, waits)) return false;
  bool ran = run_slice(bound);
  std::vector<Fiber*> ready, to_compute;
  for (const auto& fiber : fibers_) {
    if (!waits(fiber) || (ran && !has_values(*fiber))) continue;
    ready.push_back(fiber.get());
    // If no batch was ready, all tensors that the waiting fibers need are computed now.
    if (!ran || !fiber->values_only_) to_compute.push_back(fiber.get());
  }
  if (!to_compute.empty()) {
    const Timer timer(in_slices_);
    serve_values(to_compute);
  }
  for (Fiber* fiber : ready) fiber->wanted_.clear();
  const Timer timer(in_fibers_);
  resume_all(std::move(ready));
  if (failed_slices_ > kMostFailed || (failed_slices_ > 0 && fibers_.empty())) {
    scope_.forget_losses();
    failed_slices_ = 0;
  }
  return true;
}

// Runs batches for about the time `bound`. Returns false if no batch was ready.
bool FiberPool::run_slice(std::chrono::nanoseconds bound) {
  const Timer timer(in_slices_);
  bool ran = false;
  std::exception_ptr interruption;
  try {
    host_wait([&] { ran = scope_.run_slice(bound); });
  } catch (const std::exception& error) {
    ran = true;
    ++failed_slices_;
    if (host_interrupts(error)) interruption = std::current_exception();
  }
  if (interruption) std::rethrow_exception(interruption);
  return ran;
}

// Whether the fiber can be resumed: all tensors that it waits for are computed, or one of them is
// lost. If a tensor is lost, sets the fiber's error.
bool FiberPool::has_values(Fiber& fiber) const {
  for (const PendingTensor* tensor : fiber.wanted_) {
    if (tensor->is_lost()) {
      fiber.error_ = scope_.loss_of(*tensor);
      return true;
    }
    if (tensor->is_pending() && !scope_.is_computed(*tensor)) return false;
  }
  return true;
}

Fiber* FiberPool::find(size_t index) const {
  const auto found =
      std::ranges::find_if(fibers_, [index](const auto& fiber) { return fiber->index_ == index; });
  return found == fibers_.end() ? nullptr : found->get();
}

bool FiberPool::wake(size_t index) {
  Fiber* fiber = find(index);
  if (fiber == nullptr || fiber->state_ != Fiber::State::kWaitsForHost) return false;
  const Timer timer(in_fibers_);
  resume_all({fiber});
  return true;
}

void FiberPool::end_one(size_t index) {
  Fiber* fiber = find(index);
  if (fiber == nullptr) return;
  const Timer timer(in_fibers_);
  while (fiber->state_ != Fiber::State::kEnded) resume(*fiber, /*to_end=*/true);
  sweep();
}

}  // namespace autobatch
