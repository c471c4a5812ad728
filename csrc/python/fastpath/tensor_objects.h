// Creates and destroys Python's tensor objects while a block is open. PyTorch releases the GIL when
// it destroys a tensor object, because freeing memory may take a long time. A pending tensor has no
// memory, so its object is destroyed without releasing the GIL. Most ops in a block create a
// pending tensor that is soon destroyed. Most objects of pending tensors are kept, together with
// their tensors, and reused for the results of later ops. Without reuse, creating and freeing an
// object and its tensor takes a third of the time of capturing an op.
#pragma once

#include "autobatch/common/switches.h"
#include "autobatch/graph/graph.h"

#include <Python.h>

namespace autobatch {

// Both functions need the GIL. patches.h describes when they are called.
extern Switch tensor_objects_switch;

void install_tensor_objects();
void remove_tensor_objects();

// Returns a new pending tensor for the value, as a new reference to a Python object. If there is an
// error, throws py::error_already_set. Needs the GIL.
PyObject* new_tensor_object(Graph& graph, ValueId id);

// Frees the objects that are kept for reuse. Needs the GIL.
void free_waiting_objects();

}  // namespace autobatch
