// Schedules of structures that have come before: an epoch's minibatch again, examples of one shape.
//
// A schedule is a function of the graph's arrays and of nothing else, so graphs whose arrays are
// equal share one, whatever their ops are. All arrays are compared; the hash that finds them costs
// a nanosecond a node, where scheduling costs twenty.
#pragma once

#include "autobatch/schedule.h"

#include <functional>

namespace autobatch {

// The graph's schedule: that which is kept, or what `schedule` returns, which is kept from the
// second time on that the structure comes. Any thread.
Schedule reuse_schedule(const ScheduleInput& graph, const std::function<Schedule()>& schedule);

// Drops all that are kept, and says how many bytes they took.
size_t forget_schedules();

}  // namespace autobatch
