// Whether deferring pays. A read runs what it needs at once: where a block reads at each step, its
// flushes run one instance's few ops, and to defer these only adds to what eager takes. Then the
// scope pauses: what is pending runs, and ops run as if no block were open. It captures again when
// a map begins, or after a number of calls. No answer depends on it.
//
// Estimates are in microseconds, and only their order of magnitude matters. Blocks that do batch,
// and are slower than eager none the less, are found by the clock (trials.h).
#pragma once

#include "autobatch/export.h"

#include <cstdint>

namespace autobatch {

class Payoff {
 public:
  // What a flush ran, and what it left.
  struct Flush {
    uint64_t nodes = 0;
    uint64_t batches = 0;
    uint64_t waiting = 0;
    bool record_open = false;  // backward will go over this and later parts together
  };

  // A read that one instance alone waited for.
  void add_read(const Flush& flush);
  bool is_lost() const;
  // The calls to let pass before the next trial: twice as many each time.
  uint64_t start_pause();
  void start_trial();

  // Of a whole block.
  static bool pays(uint64_t nodes, uint64_t launches);

 private:
  double balance_ = 0;
  uint64_t waiting_ = 0;
  uint64_t pause_ = 0;  // the last one's calls
};

// Of a call that reaches the library while a scope is paused too. Whether ops are captured.
AUTOBATCH_INTERNAL bool count_call();

}  // namespace autobatch
