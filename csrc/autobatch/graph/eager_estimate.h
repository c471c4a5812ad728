// What eager takes at least for the ops of a flush, without what Python takes to call them: one
// member of a batch is run alone, by the clock, and its results are thrown away.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <cstdint>

namespace autobatch {

struct EagerEstimate {
  using Nanoseconds = std::chrono::nanoseconds;

  Nanoseconds eager{0};
  Nanoseconds sampling{0};                        // what the estimate itself took
  uint64_t nodes = 0;                             // that it is of
  ska::flat_hash_map<uint64_t, Nanoseconds> ops;  // by Signature::serial: one that was run
};

}  // namespace autobatch
