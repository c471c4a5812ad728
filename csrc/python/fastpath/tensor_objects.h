// Creates and destroys Python's tensor objects while a block is open. PyTorch releases the GIL to
// destroy a tensor object, because freeing memory may take long. A pending tensor has no memory,
// and a block drops one for most ops: its object is destroyed without releasing the GIL. Most such
// objects are kept, with their tensors, and reused for the results of later ops. Creating and
// freeing an object and its tensor takes a third of the time of capturing an op.
#pragma once

#include "autobatch/common/switches.h"
#include "autobatch/graph/graph.h"

#include <Python.h>

namespace autobatch {

// Both functions need the GIL; patches.h says when they are called.
extern Switch tensor_objects_switch;

void install_tensor_objects();
void remove_tensor_objects();

// Returns a new pending tensor for the value, as a Python object; a new reference. Raises
// py::error_already_set. Needs the GIL.
PyObject* new_tensor_object(Graph& graph, ValueId id);

// Frees the objects that are kept for reuse. Needs the GIL.
void free_waiting_objects();

}  // namespace autobatch
