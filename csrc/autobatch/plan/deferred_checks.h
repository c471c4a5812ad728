// Deferred assertions are checks of the user's code on a pending value (`if not valid.all(): raise
// ...`). The user's code continues as if the check had passed. The flush that computes the value
// evaluates the check. If a check fails, the user's code creates the exception. The host
// (host_hooks.h) runs this code.
#pragma once

#include "autobatch/export.h"
#include "autobatch/kernels/gather.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace autobatch {

class PendingTensor;

// One deferred check, implemented by the host. A check must be destroyed while the host's lock is
// held.
class Check {
 public:
  virtual ~Check() = default;
  // Returns the exception that the check raises. Repeated calls return the same exception.
  virtual std::exception_ptr failure() = 0;
};

// The checks of a scope. Only the scope's own thread adds checks and receives failures.
class DeferredChecks {
 public:
  // Number of the fiber whose code made the check; 0 outside fibers.
  using Owner = uint64_t;

  enum class Which : uint8_t { kNone, kOfPyTorch, kAll };
  // Sets which checks are deferred: no checks, only checks in PyTorch's own code, or all checks.
  // `host` is an object that belongs to the host. DeferredChecks keeps this object until clear().
  void begin(Which which, std::shared_ptr<void> host) {
    which_ = which;
    host_ = std::move(host);
  }
  Which which() const { return which_; }
  void* host() const { return host_.get(); }

  void add(const at::Tensor& asked, bool expected, Owner owner, std::unique_ptr<Check> check) {
    all_.push_back({asked, expected, owner, std::move(check), nullptr});
    ++waiting_;
  }
  // Whether at least one check waits for its value. Returns false after each flush on the scope's
  // thread.
  bool any_waiting() const { return waiting_ > 0; }
  bool is_empty() const { return all_.empty(); }
  AUTOBATCH_INTERNAL bool any_waiting(Owner owner) const;
  std::vector<PendingTensor*> asked() const;

  // Evaluates the checks whose values have been computed. Removes the checks that pass, together
  // with the objects that these checks keep. Returns true if any check was removed. `find` returns
  // the memory of a value whose tensor is still pending. `cause_of` returns the exception that
  // caused the loss of a tensor.
  using Find = std::function<std::optional<Region>(const PendingTensor&)>;
  using CauseOf = std::function<std::exception_ptr(const PendingTensor&)>;
  bool settle(const Find& find, const CauseOf& cause_of);

  // Returns the exception of the owner's first failed check, or null if no check has failed. A
  // failed check is kept until drop() or clear(), because the user's code may catch the exception
  // in a place where eager mode would not have raised it.
  std::exception_ptr failure_of(Owner owner);
  bool has_failed(Owner owner) const;
  AUTOBATCH_INTERNAL void drop(Owner owner);
  // Removes all checks and the host's object.
  AUTOBATCH_INTERNAL void clear();

 private:
  enum class State : uint8_t { kWaits, kHolds, kFailed };
  struct Item {
    at::Tensor asked;
    bool expected;
    Owner owner;
    std::unique_ptr<Check> check;
    std::exception_ptr lost;  // why the value was lost; null if it was not lost
    State state = State::kWaits;
  };
  static void settle(Item& item, const Find& find, const CauseOf& cause_of);

  std::vector<Item> all_;  // the checks, in program order
  size_t waiting_ = 0;
  Which which_ = Which::kNone;
  std::shared_ptr<void> host_;
};

}  // namespace autobatch
