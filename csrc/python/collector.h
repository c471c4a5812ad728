// Keeps flushes, which run without the GIL, apart from Python's cycle collector.
//
// Objects that the collector has found to be garbage have no references from outside. But the GIL
// is released while the collector clears them: PyTorch releases it for each tensor. If a flush then
// took a reference to a pending tensor among them, the collector would clear that tensor anyway.
#pragma once

namespace autobatch {

// Registers a callback for collections. Call it once, with the GIL held.
void watch_collector();

// Waits until no other thread runs the collector. Needs the GIL, and may release it meanwhile.
// Waits for at most a second, because an object that is collected may itself wait for the graph (a
// `__del__` that reads a value).
void await_collector();

}  // namespace autobatch
