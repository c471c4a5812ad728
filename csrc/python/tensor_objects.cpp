#include "python/tensor_objects.h"

#include "autobatch/pending_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

namespace autobatch {
namespace {

destructor original = nullptr;

// torch._C.TensorBase, by which objects of all tensor classes end.
PyTypeObject* tensor_base() { return reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base; }

// Whether the object is all that refers to a pending tensor, and nothing hangs on it.
bool is_last_of_pending(const THPVariable& object) {
  const PendingTensor* pending = as_pending(object.cdata.unsafeGetTensorImpl());
  return pending != nullptr && pending->is_pending() && object.cdata.use_count() == 1 &&
         object.backward_hooks == nullptr && object.post_accumulate_grad_hooks == nullptr;
}

// As PyTorch's, but that the lock is kept.
void drop(PyObject* self) {
  auto& object = *reinterpret_cast<THPVariable*>(self);
  if (!is_last_of_pending(object)) return original(self);
  PyObject_GC_UnTrack(self);
  // Who holds a weak reference must not find the object from here on.
  object.cdata.unsafeGetTensorImpl()->pyobj_slot()->clear();
  std::destroy_at(&object.cdata);
  Py_TYPE(self)->tp_free(self);
}

}  // namespace

void install_tensor_objects() { original = std::exchange(tensor_base()->tp_dealloc, drop); }

void remove_tensor_objects() { tensor_base()->tp_dealloc = original; }

}  // namespace autobatch
