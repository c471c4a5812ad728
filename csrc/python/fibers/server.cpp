// The fibers of ab.Engine. The Python code of ab.Engine starts and ends the fibers one by one, and
// runs the slices.
#include "python/fibers/fibers.h"
#include "python/fibers/greenlets.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>

namespace autobatch {
namespace {

// Runs the fibers of a Server. The function of a fiber must handle its result and its errors. An
// error that the function raises is reported as unraisable.
class RequestPool final : public GreenletPool {
 public:
  explicit RequestPool(Scope& scope) : GreenletPool(scope, 0) {}
  size_t add(PyObject* function, PyObject* argument) {
    const size_t index = ++last_;
    start(make_fiber(index, function, argument));
    return index;
  }

 protected:
  std::unique_ptr<Fiber> next() override { return nullptr; }
  void note_end(Fiber& fiber, Ref result) override {
    if (!result) note_failed_end(fiber);
  }
  void note_failed_end(Fiber&) override { PyErr_WriteUnraisable(nullptr); }

 private:
  size_t last_ = 0;
};

struct Server {
  PyObject_HEAD RequestPool* pool;
};

RequestPool& pool_of(PyObject* self) { return *reinterpret_cast<Server*>(self)->pool; }

// Translates C++ exceptions to Python exceptions. Functions that run fibers can't use
// HANDLE_TH_ERRORS, because this macro puts a warning handler on the stack. A fiber that starts
// under this handler may return to the handler after the handler has been destroyed.
template <class Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (python_error& error) {
    error.restore();
  } catch (...) {
    as_python(std::current_exception()).restore();
  }
  return nullptr;
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    Scope* scope = Scope::current();
    TORCH_CHECK(scope != nullptr, "Server: no batch() is open on this thread");
    auto pool = std::make_unique<RequestPool>(*scope);
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) throw fetch_error();
    reinterpret_cast<Server*>(self)->pool = pool.release();
    return self;
  });
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Server*>(self)->pool;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* start(PyObject* self, PyObject* args) {
  PyObject *function, *argument;
  if (PyArg_ParseTuple(args, "OO", &function, &argument) == 0) return nullptr;
  return guarded([&] { return PyLong_FromSize_t(pool_of(self).add(function, argument)); });
}

PyObject* step(PyObject* self, PyObject* bound) {
  const double seconds = PyFloat_AsDouble(bound);
  if (seconds == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&] {
    const std::chrono::nanoseconds time(static_cast<int64_t>(seconds * 1e9));
    return PyBool_FromLong(pool_of(self).serve_slice(time) ? 1 : 0);
  });
}

PyObject* wake(PyObject* self, PyObject* number) {
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&] { return PyBool_FromLong(pool_of(self).wake(index) ? 1 : 0); });
}

PyObject* end(PyObject* self, PyObject* number) {
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    pool_of(self).end_one(index);
    Py_RETURN_NONE;
  });
}

PyObject* live(PyObject* self, void*) { return PyLong_FromSize_t(pool_of(self).num_live()); }

PyObject* times(PyObject* self, void*) {
  using Seconds = std::chrono::duration<double>;
  return Py_BuildValue("(dd)", Seconds(pool_of(self).in_slices()).count(),
                       Seconds(pool_of(self).in_fibers()).count());
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS,
     "Runs function(argument) in a fiber until the fiber waits or ends. Returns the number of the "
     "fiber."},
    {"step", step, METH_O,
     "Runs batches for about the given number of seconds. Then resumes the fibers whose values are "
     "computed. Returns False if no fiber waits for a value."},
    {"wake", wake, METH_O,
     "Resumes a fiber that waits in wait_in_fiber. Returns False if the fiber does not wait "
     "there."},
    {"end", end, METH_O, "Raises GreenletExit in the fiber, at its current position."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"live", live, nullptr, "The number of fibers that have not ended.", nullptr},
    {"times", times, nullptr, "The seconds spent in slices, and in the code of fibers.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"torch_autobatch._C.Server", sizeof(Server), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

void add_server_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "Server", type) != 0) throw python_error();
}

}  // namespace autobatch
