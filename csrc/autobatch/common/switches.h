// Switches that turn off single optimizations, for tests and to find the cause of an error. The
// switches do not change results, except for rounding.
//
// The environment variable AUTOBATCH_DISABLE turns switches off when the library is loaded. The
// value of the variable is a comma-separated list of names of switches. The names `passes`,
// `fast_paths` and `all` select groups of switches.
#pragma once

#include "autobatch/export.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace autobatch {

// A switch has static storage duration and registers itself. Reads and writes are thread safe.
class Switch {
 public:
  enum class Kind : uint8_t {
    kPass,      // rewrites the graph of a flush or of a cell
    kFastPath,  // captures calls from Python before the dispatcher
  };

  // `name` must have static storage duration.
  AUTOBATCH_INTERNAL Switch(Kind kind, const char* name);
  Switch(const Switch&) = delete;
  Switch& operator=(const Switch&) = delete;

  Kind kind() const { return kind_; }
  const char* name() const { return name_; }
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  void set(bool on) { is_on_.store(on, std::memory_order_relaxed); }

  // Returns how many rewrites the pass has made, or how many calls the fast path has captured,
  // since the library was loaded. The count is not exact if two threads add to it at the same time.
  uint64_t uses() const { return uses_.load(std::memory_order_relaxed); }
  void add_uses(uint64_t count) {
    uses_.store(uses_.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
  }

  // Returns all switches of the process, sorted by name.
  AUTOBATCH_INTERNAL static std::vector<Switch*> all();

 private:
  const Kind kind_;
  const char* const name_;
  std::atomic<bool> is_on_;
  std::atomic<uint64_t> uses_ = 0;
};

// Returns the entries of AUTOBATCH_DISABLE that are neither the name of a switch nor of a group.
AUTOBATCH_INTERNAL std::vector<std::string> unknown_disabled_names();

}  // namespace autobatch
