// Python's cycle collector, as seen by a flush that runs without the interpreter's lock.
//
// What the collector has found to be garbage has no reference from outside; but while it takes that
// apart it lets the lock go (PyTorch does, for each tensor), and a graph that then takes hold of a
// pending tensor in it would have one that is taken apart all the same.
#pragma once

namespace autobatch {

// Once, with the interpreter's lock: hears of each collection from then on.
void watch_collector();

// With the lock, which it may let go meanwhile: waits until no other thread collects. For a second
// at most, since what is collected may itself wait for the graph (a `__del__` that reads a value).
void await_collector();

}  // namespace autobatch
