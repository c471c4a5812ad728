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
  // One of your own instead of `policy`. What it returns is validated.
  std::shared_ptr<const Policy> own_policy;
};

}  // namespace autobatch
