// Estimates whether deferring is worth its cost. A read immediately runs the ops that it needs. If
// a block reads at each step, each flush runs the few ops of one instance, and deferring them only
// adds to the cost of eager execution. If deferring is not worth its cost, the scope pauses. When a
// pause begins, pending ops run. Later ops run as if no block were open. The scope captures again
// when a map begins, or after a number of calls. Results do not depend on pauses.
//
// Estimates are in microseconds, and only their order of magnitude matters. A block may form
// batches and still be slower than eager; such blocks are found by timing (trials.h).
#pragma once

#include "autobatch/export.h"

#include <cstdint>

namespace autobatch {

class Payoff {
 public:
  // Counts of a flush: the nodes and batches that ran, and the nodes that are still pending.
  struct Flush {
    uint64_t nodes = 0;
    uint64_t batches = 0;
    uint64_t waiting = 0;      // nodes still pending
    bool record_open = false;  // one backward will run over this flush and later flushes
  };

  // Records a read that caused a flush for only one instance.
  void add_read(const Flush& flush);
  // Whether the reads until now have cost clearly more time than deferring has saved.
  bool is_lost() const;
  // Returns the number of calls that run eagerly before the next trial. The number doubles with
  // each pause, up to a limit.
  uint64_t start_pause();
  void start_trial();

  // Whether deferring a whole block was worth its cost.
  static bool pays(uint64_t nodes, uint64_t launches);

 private:
  double balance_ = 0;
  uint64_t waiting_ = 0;
  uint64_t pause_ = 0;  // length of the last pause, in calls
};

// Counts a call of a function or module that this library observes. If the scope is paused and
// enough calls were counted, ends the pause. Must also be called while a scope is paused. Returns
// whether ops are captured.
AUTOBATCH_INTERNAL bool count_call();

}  // namespace autobatch
