// What the blocks have been like that were opened at one place of a program.
#pragma once

#include "autobatch/scope/trials.h"

#include <array>
#include <cstdint>

namespace autobatch {

struct BlockHistory {
  // Blocks that save no launch (one instance, a loop of reads) are not deferred any more, until one
  // of them makes more calls than the others made, or for a trial each so many blocks.
  uint32_t losses = 0;      // blocks in a row that did not pay
  uint64_t most_calls = 0;  // that one of these made
  uint32_t paused = 0;      // blocks since the last trial

  // Of those that do: by the clock, of blocks that record no gradients, and of those that do.
  std::array<Trials, 2> trials;

  bool pays();
  void add(bool paid, uint64_t calls);
};

}  // namespace autobatch
