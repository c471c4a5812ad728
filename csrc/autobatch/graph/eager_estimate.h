// An EagerEstimate is a lower bound on the time that eager mode needs for the ops of a flush. The
// time that Python needs to call the ops is not included. For each signature, one member of a batch
// is run separately and timed. The results of this run are discarded.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <cstdint>

namespace autobatch {

struct EagerEstimate {
  using Nanoseconds = std::chrono::nanoseconds;

  Nanoseconds eager{0};
  Nanoseconds sampling{0};                        // time spent on making the estimate
  ska::flat_hash_map<uint64_t, Nanoseconds> ops;  // time of one op, by Signature::serial
};

}  // namespace autobatch
