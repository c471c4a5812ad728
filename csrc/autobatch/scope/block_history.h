// What the blocks have been like that were opened at one place of a program.
#pragma once

#include "autobatch/scope/trials.h"

#include <array>
#include <chrono>
#include <cstdint>

namespace autobatch {

// Blocks that save no launch (one instance, a loop of reads) are not deferred any more, until one
// of them makes more calls than the others made or can call something else, or for a trial each so
// many blocks.
class BlockHistory {
 public:
  using Clock = Trials::Clock;

  // A block begins. Whether it is deferred. `identity` is called where it matters: it takes longer
  // than a short block.
  bool pays(const Trials::Identity& identity, Clock::time_point now = Clock::now());
  // The same block ends.
  void end(Clock::time_point now = Clock::now()) { took_ = now - began_; }
  // The same of one that flushed: whether it paid, and how many calls it made.
  void add(bool paid, uint64_t calls);
  // The most that a block that did not pay made.
  uint64_t most_calls() const { return most_calls_; }

  // Of those that pay: by the clock, of blocks that record no gradients, and of those that do.
  std::array<Trials, 2> trials;

 private:
  uint32_t losses_ = 0;  // blocks in a row that did not pay
  uint64_t most_calls_ = 0;
  uint32_t paused_ = 0;   // blocks since the last trial
  uint64_t loser_ = 0;    // what the blocks that did not pay could call
  uint32_t changes_ = 0;  // of `loser_` since a block has paid
  Clock::time_point began_;
  Clock::duration took_{};  // the last block
};

}  // namespace autobatch
