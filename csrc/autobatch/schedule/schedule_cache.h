// A cache of schedules, for graph structures that repeat: the same minibatch in the next epoch, or
// examples of one shape.
//
// A schedule is a function of the graph's arrays only, so graphs with equal arrays share one
// schedule, whatever their ops are. A lookup compares all arrays. Hashing costs one nanosecond per
// node, and scheduling costs twenty.
#pragma once

#include "autobatch/schedule.h"

#include <functional>

namespace autobatch {

// Returns the graph's schedule: the cached one, or the result of `schedule`. The result is cached
// from the second occurrence of a structure on. Thread-safe.
Schedule reuse_schedule(const ScheduleInput& graph, const std::function<Schedule()>& schedule);

// Drops all cached schedules. Returns the number of bytes that they took.
size_t forget_schedules();

}  // namespace autobatch
