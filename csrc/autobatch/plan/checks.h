// Assertions of a program that wait for the value they ask for (`if not valid.all(): raise ...`).
// The program goes on as if they held, and the flush that computes the value looks. What it raises
// where one fails is made by the program's own code, which is the host's business.
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

// One, in the host's language. It goes under the host's lock.
class Check {
 public:
  virtual ~Check() = default;
  // The error that it raises. More than once: the same.
  virtual std::exception_ptr failure() = 0;
};

// Those of a scope. Only its own thread adds to them, and is told what failed.
class Checks {
 public:
  // Whose code asked: a fiber's number, or 0.
  using Owner = uint64_t;

  enum class Which : uint8_t { kNone, kOfPyTorch, kAll };
  // Which ones wait, and what the host keeps for as long as the scope is open.
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
  // Whether some wait for a value. No flush on the scope's thread leaves any.
  bool wait() const { return waiting_ > 0; }
  bool is_empty() const { return all_.empty(); }
  AUTOBATCH_INTERNAL bool wait(Owner owner) const;
  std::vector<PendingTensor*> asked() const;

  // Looks at what was computed, which `find` knows while it is pending. Those that hold go, with
  // what they kept of the program; true if there are such. `cause_of` a tensor that was lost.
  using Find = std::function<std::optional<Region>(const PendingTensor&)>;
  using CauseOf = std::function<std::exception_ptr(const PendingTensor&)>;
  bool settle(const Find& find, const CauseOf& cause_of);

  // The error of the first that failed; null if none did. It stays so: the program may catch the
  // error in a place where it would not have been raised.
  std::exception_ptr failure_of(Owner owner);
  bool has_failed(Owner owner) const;
  AUTOBATCH_INTERNAL void drop(Owner owner);
  // All, and what the host keeps.
  AUTOBATCH_INTERNAL void clear();

 private:
  enum class State : uint8_t { kWaits, kHolds, kFailed };
  struct Item {
    at::Tensor asked;
    bool expected;
    Owner owner;
    std::unique_ptr<Check> check;
    std::exception_ptr lost;  // what the value was lost to
    State state = State::kWaits;
  };
  static void settle(Item& item, const Find& find, const CauseOf& cause_of);

  std::vector<Item> all_;  // in the order of the program
  size_t waiting_ = 0;
  Which which_ = Which::kNone;
  std::shared_ptr<void> host_;
};

}  // namespace autobatch
