// How Python's tensor objects come and go while a block is open. For each one that goes PyTorch
// lets the interpreter's lock go, since memory may take long to free; a pending tensor has none,
// and a block drops one for most ops. So they go without that, and most of them with their tensors
// wait to stand for the results of later ops: making and freeing both is a third of what capturing
// an op takes.
#pragma once

#include "autobatch/graph/graph.h"

#include <Python.h>

namespace autobatch {

// Both need the interpreter's lock; patches.h has when.
void install_tensor_objects();
void remove_tensor_objects();

// A new pending tensor that stands for the value, as Python's object; raises py::error_already_set.
// Needs the interpreter's lock.
PyObject* new_tensor_object(Graph& graph, ValueId id);

// Frees those that wait. Needs the interpreter's lock.
void free_waiting_objects();

}  // namespace autobatch
