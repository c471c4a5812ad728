#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace autobatch {

class Policy;

struct ScopeOptions {
  std::string policy = "auto";  // one of policy_names()
  // Limit on the number of pending nodes. When the limit is reached, half of the nodes are
  // computed. 0: no limit.
  size_t max_pending = 0;
  bool verify = false;       // also run every op eagerly and compare the values
  bool cells = true;         // capture each cell as a whole; if false, op by op
  bool check_cells = false;  // trace every call of a cell and compare the trace with the template
  // If deferring the ops of a line of user code does not save time, capture stops for a number of
  // calls. In Python, batch() enables the option `adaptive` by default. In C++, calls are not
  // counted, so capture resumes only when a map begins.
  bool adaptive = false;
  // Record the times of batches and the dependencies between nodes, so that the block can be
  // plotted.
  bool profile = false;
  // A custom policy, which is used instead of `policy`. The schedules of a custom policy are
  // validated.
  std::shared_ptr<const Policy> own_policy;
};

}  // namespace autobatch
