#include "python/collector.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace py = pybind11;

namespace autobatch {
namespace {

std::atomic<unsigned long> collecting{0};  // id of the thread that runs the collector; 0: no thread

// Python calls this function with (phase, info), because the function is in the list gc.callbacks.
PyObject* note(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const bool starts = count > 0 && PyUnicode_CompareWithASCIIString(args[0], "start") == 0;
  collecting = starts ? PyThread_get_thread_ident() : 0;
  Py_RETURN_NONE;
}

PyMethodDef note_method = {"torch_autobatch_notes_collections",
                           reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(note)),
                           METH_FASTCALL, nullptr};

}  // namespace

void watch_collector() {
  const auto callback = py::reinterpret_steal<py::object>(PyCFunction_New(&note_method, nullptr));
  py::module_::import("gc").attr("callbacks").attr("append")(callback);
}

void await_collector() {
  constexpr auto kStep = std::chrono::microseconds(50);
  constexpr int kMostSteps = 20000;
  for (int step = 0; step < kMostSteps; ++step) {
    const unsigned long thread = collecting;
    if (thread == 0 || thread == PyThread_get_thread_ident()) return;
    const py::gil_scoped_release released;
    std::this_thread::sleep_for(kStep);
  }
  collecting = 0;  // after a fork, the thread with the stored id may not exist
}

}  // namespace autobatch
