// Statistics of the blocks that were opened at one place of a program.
#pragma once

#include "autobatch/scope/trials.h"

#include <array>
#include <cstdint>

namespace autobatch {

// Decides whether the blocks of one place are deferred. If several blocks in a row save no
// launches, the next blocks run eagerly. For example, a block saves no launches if it has only one
// instance, or if it reads a value after each op. Deferring begins again if a block makes more
// calls than the earlier blocks, or if it can call different code. At a fixed interval, one block
// is deferred as a trial.
class BlockHistory {
 public:
  using Clock = Trials::Clock;

  // Begins a block and returns whether it is deferred. `identity` is called only if needed, because
  // the call takes longer than a short block.
  bool pays(const Trials::Identity& identity, Clock::time_point now = Clock::now());
  // Ends the block that began last.
  void end(Clock::time_point now = Clock::now()) { took_ = now - began_; }
  // Records a block that flushed. `paid` tells whether deferring the block was worth its cost.
  // `calls` is the number of calls that the block made.
  void add(bool paid, uint64_t calls);
  // Largest number of calls made by a block that was not worth deferring.
  uint64_t most_calls() const { return most_calls_; }

  // Timing trials of blocks and maps. The index is 0, plus 1 if gradients are recorded, plus 2 for
  // a map.
  std::array<Trials, 4> trials;

 private:
  uint32_t losses_ = 0;  // consecutive blocks that were not worth deferring
  uint64_t most_calls_ = 0;
  uint32_t paused_ = 0;   // number of blocks since the last trial
  uint64_t loser_ = 0;    // identity of the blocks that were not worth deferring
  uint32_t changes_ = 0;  // number of identity changes since a block was worth deferring
  Clock::time_point began_;
  Clock::duration took_{};  // duration of the last block
};

}  // namespace autobatch
