#include "python/fastpath/tensor_objects.h"

#include "autobatch/graph/pending_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

namespace autobatch {

Switch tensor_objects_switch(Switch::Kind::kFastPath, "tensor_objects");

namespace {

destructor original = nullptr;

// Returns torch._C.TensorBase, whose tp_dealloc destroys the objects of all tensor classes.
PyTypeObject* tensor_base() { return reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base; }

at::Tensor& tensor_of(PyObject* object) { return reinterpret_cast<THPVariable*>(object)->cdata; }

PendingTensor& pending_of(PyObject* object) {
  return *static_cast<PendingTensor*>(tensor_of(object).unsafeGetTensorImpl());
}

// Whether the object has no hooks and holds the only reference to a pending tensor.
bool is_last_of_pending(const THPVariable& object) {
  const PendingTensor* pending = as_pending(object.cdata.unsafeGetTensorImpl());
  return pending != nullptr && pending->is_pending() && object.cdata.use_count() == 1 &&
         object.backward_hooks == nullptr && object.post_accumulate_grad_hooks == nullptr;
}

// --- objects that are kept for reuse, with their tensors ---

// Python stores data about an object's attributes in memory before the start of the object. Code
// that reuses an object must know the layout of this memory, which depends on the version of
// Python. So objects are reused in Python 3.11 only.
constexpr bool kObjectsWait = PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000;
constexpr size_t kMostWaiting = 1 << 14;

// The objects that wait for reuse. Objects in this list have refcount 0 and hold no reference to
// their class. The GIL guards the list.
struct Waiting {
  PyObject** objects = nullptr;  // array of kMostWaiting objects, allocated at first use
  size_t count = 0;
};
constinit Waiting waiting;

// Keeps an object that Python has destroyed but not freed. Returns false if the object can't be
// reused. For example, an object can't be reused if its class now has a `__del__`, because Python
// calls `__del__` only once for each object.
bool keep(PyObject* self) {
  if (!kObjectsWait || PyObject_GC_IsFinalized(self) != 0 || waiting.count >= kMostWaiting ||
      !Py_IS_TYPE(self, reinterpret_cast<PyTypeObject*>(THPVariableClass)) ||
      !PendingTensor::rest(tensor_of(self))) {
    return false;
  }
  if (waiting.objects == nullptr) waiting.objects = new PyObject*[kMostWaiting];
  waiting.objects[waiting.count++] = self;
  return true;
}

// Clears the pointers to the object's dict and inline values. `subtype_dealloc` has freed both, but
// has not cleared the pointers.
void forget_attributes(PyObject* self) {
  if ((Py_TYPE(self)->tp_flags & Py_TPFLAGS_MANAGED_DICT) == 0) return;
  auto* before = reinterpret_cast<PyObject**>(self);
  before[-3] = before[-4] = nullptr;
}

PyObject* use_again(Graph& graph, ValueId id) {
  tensor_objects_switch.add_uses(1);
  PyObject* self = waiting.objects[--waiting.count];
  pending_of(self).wake(&graph, id);
  forget_attributes(self);
  Py_INCREF(Py_TYPE(self));
  _Py_NewReference(self);
  PyObject_GC_Track(self);
  return self;
}

// --- destruction ---

void free_object(PyObject* self) {
  // After this call, code that holds a weak reference to the tensor cannot find the object any
  // more.
  tensor_of(self).unsafeGetTensorImpl()->pyobj_slot()->clear();
  std::destroy_at(&tensor_of(self));
  Py_TYPE(self)->tp_free(self);
}

// The function in the tp_dealloc slot. For pending tensors, this function has the same effect as
// PyTorch's function, but does not release the GIL.
void drop(PyObject* self) {
  auto& object = *reinterpret_cast<THPVariable*>(self);
  if (!is_last_of_pending(object)) return original(self);
  PyObject_GC_UnTrack(self);
  if (!keep(self)) free_object(self);
}

}  // namespace

PyObject* new_tensor_object(Graph& graph, ValueId id) {
  if (waiting.count != 0) return use_again(graph, id);
  at::Tensor tensor = make_pending(graph, id);
  as_pending(tensor)->allow_rest();
  return THPVariable_Wrap(std::move(tensor));
}

void free_waiting_objects() {
  while (waiting.count != 0) {
    PyObject* self = waiting.objects[--waiting.count];
    pending_of(self).end_rest();
    free_object(self);
  }
}

void install_tensor_objects() { original = std::exchange(tensor_base()->tp_dealloc, drop); }

void remove_tensor_objects() { tensor_base()->tp_dealloc = original; }

}  // namespace autobatch
