#include "python/fastpath/tensor_objects.h"

#include "autobatch/capture/node_builder.h"
#include "autobatch/graph/pending_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

namespace autobatch {
namespace {

destructor original = nullptr;

// torch._C.TensorBase, by which objects of all tensor classes end.
PyTypeObject* tensor_base() { return reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base; }

at::Tensor& tensor_of(PyObject* object) { return reinterpret_cast<THPVariable*>(object)->cdata; }

PendingTensor& pending_of(PyObject* object) {
  return *static_cast<PendingTensor*>(tensor_of(object).unsafeGetTensorImpl());
}

// Whether the object is all that refers to a pending tensor, and nothing hangs on it.
bool is_last_of_pending(const THPVariable& object) {
  const PendingTensor* pending = as_pending(object.cdata.unsafeGetTensorImpl());
  return pending != nullptr && pending->is_pending() && object.cdata.use_count() == 1 &&
         object.backward_hooks == nullptr && object.post_accumulate_grad_hooks == nullptr;
}

// --- objects that wait, with their tensors, to be another op's result ---

// What an object of a Python class has before its start belongs to Python, and another version
// keeps its attributes elsewhere: there objects do not wait.
constexpr bool kObjectsWait = PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000;
constexpr size_t kMostWaiting = 1 << 14;

// Under the interpreter's lock; as long as the process. They have no references, and their class
// does not count them.
struct Waiting {
  PyObject** objects = nullptr;  // room for kMostWaiting, once there is one
  size_t count = 0;
};
constinit Waiting waiting;

// Of an object that Python has taken apart, but for its memory. Not where somebody has given the
// class a `__del__`, which Python calls but once for an object.
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

// Its dict, and the values in place of one, were freed when it went (`subtype_dealloc`), but are
// still named there.
void forget_attributes(PyObject* self) {
  if ((Py_TYPE(self)->tp_flags & Py_TPFLAGS_MANAGED_DICT) == 0) return;
  auto* before = reinterpret_cast<PyObject**>(self);
  before[-3] = before[-4] = nullptr;
}

PyObject* use_again(Graph& graph, ValueId id) {
  PyObject* self = waiting.objects[--waiting.count];
  pending_of(self).wake(&graph, id);
  forget_attributes(self);
  Py_INCREF(Py_TYPE(self));
  _Py_NewReference(self);
  PyObject_GC_Track(self);
  return self;
}

// --- how they go ---

void free_object(PyObject* self) {
  // Who holds a weak reference must not find the object from here on.
  tensor_of(self).unsafeGetTensorImpl()->pyobj_slot()->clear();
  std::destroy_at(&tensor_of(self));
  Py_TYPE(self)->tp_free(self);
}

// As PyTorch's, but that the lock is kept.
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
