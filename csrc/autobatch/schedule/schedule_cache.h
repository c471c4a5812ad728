// A cache of schedules for graph structures that repeat. For example, the same minibatch occurs
// again in the next epoch, or all examples have the same shape.
//
// A schedule depends only on the graph's arrays, so graphs with equal arrays share one schedule,
// even if their ops differ. A lookup compares all arrays. For each node, hashing takes about 1 ns,
// and scheduling takes about 20 ns.
#pragma once

#include "autobatch/schedule.h"

#include <functional>

namespace autobatch {

// Returns the cached schedule of the graph, or the result of `schedule`. The result is cached when
// a structure occurs for the second time. The function is thread-safe.
Schedule reuse_schedule(const ScheduleInput& graph, const std::function<Schedule()>& schedule);

// Drops all cached schedules. Returns the number of bytes that the schedules occupied.
size_t forget_schedules();

}  // namespace autobatch
