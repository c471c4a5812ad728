// Prevents a flush from running at the same time as Python's cycle collector. (Flushes run without
// the GIL.)
//
// The collector clears objects that it has found to be garbage. During this time PyTorch releases
// the GIL for each tensor. If a flush then took a reference to a pending tensor that is garbage,
// the collector would still clear this tensor.
#pragma once

namespace autobatch {

// Registers a callback with Python's collector. Call this function once, with the GIL held.
void watch_collector();

// Waits until no other thread runs the collector. Needs the GIL, but may release the GIL during the
// wait. The wait is limited to one second, because a collected object may itself wait for the graph
// (in a `__del__` that reads a value).
void await_collector();

}  // namespace autobatch
