#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace autobatch {

class Policy;

struct ScopeOptions {
  std::string policy = "auto";  // one of policy_names()
  size_t max_pending = 0;       // flush when this many ops are captured; 0: no limit
  bool verify = false;          // run every op eagerly as well and compare
  bool cells = true;            // capture cells as a whole; else op by op
  bool check_cells = false;     // trace each use of a cell and compare
  // Run ops at once where deferring them does not pay, until a number of calls were made. Python's
  // batch() has it on; in C++ nothing counts calls, so that only a map starts capture again.
  bool adaptive = false;
  // Record when each batch ran and how nodes depend on each other, for a picture of the block.
  bool profile = false;
  // One of your own instead of `policy`. What it returns is validated.
  std::shared_ptr<const Policy> own_policy;
};

}  // namespace autobatch
