#include "python/tensor_objects.h"

#include "autobatch/pending_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace autobatch {
namespace {

destructor original = nullptr;

// torch._C.TensorBase, by which objects of all tensor classes end.
PyTypeObject* tensor_base() { return reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base; }

// Whether the object is all that refers to a pending tensor, and nothing hangs on it.
template <class Object>
bool is_last_of_pending(const Object& object) {
  const c10::TensorImpl* impl = object.cdata.unsafeGetTensorImpl();
  const PendingTensor* pending = as_pending(impl);
  return pending != nullptr && pending->is_pending() && object.cdata.use_count() == 1 &&
         object.backward_hooks == nullptr && object.post_accumulate_grad_hooks == nullptr;
}

// As PyTorch's, but that the lock is kept.
template <class Object>
void drop(PyObject* self) {
  auto& object = *reinterpret_cast<Object*>(self);
  if (!is_last_of_pending(object)) return original(self);
  PyObject_GC_UnTrack(self);
  // Who holds a weak reference must not find the object from here on.
  object.cdata.unsafeGetTensorImpl()->pyobj_slot()->clear();
  std::destroy_at(&object.cdata);
  Py_TYPE(self)->tp_free(self);
}

template <class Object>
void install() {
  if constexpr (std::is_same_v<decltype(Object::cdata), at::Tensor>) {
    original = std::exchange(tensor_base()->tp_dealloc, drop<Object>);
  }
}

}  // namespace

void install_tensor_objects() { install<THPVariable>(); }

void remove_tensor_objects() {
  if (original != nullptr) tensor_base()->tp_dealloc = original;
}

}  // namespace autobatch
