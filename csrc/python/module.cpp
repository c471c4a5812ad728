// The bindings of the Python module.
#include "autobatch/autobatch.h"
#include "autobatch/capture/capture.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/switches.h"
#include "autobatch/scope/scope.h"
#include "python/call_site.h"
#include "python/captured_functions.h"
#include "python/cells/cells.h"
#include "python/cells/compiled_subgraphs.h"
#include "python/collector.h"
#include "python/deferred_checks.h"
#include "python/fastpath/patches.h"
#include "python/fastpath/tensor_objects.h"
#include "python/fibers/fibers.h"
#include "python/fibers/frame_memory.h"
#include "python/gradients.h"
#include "python/report.h"

#include <torch/csrc/Exceptions.h>
#include <torch/extension.h>

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

namespace py = pybind11;

namespace {

using autobatch::Report;
using autobatch::Scope;
using autobatch::ScopeOptions;
using autobatch::Switch;

// A scope may be destroyed while it is open, because its thread has ended or the object of the
// block was freed. In this case the deleter ends the blocks of the scope.
std::shared_ptr<Scope> make_scope(const ScopeOptions& options) {
  return {new Scope(options), [](Scope* scope) {
            if (scope->is_open()) {
              const py::gil_scoped_acquire gil;
              for (int open = scope->depth(); open > 0; --open) autobatch::block_closes();
            }
            delete scope;
          }};
}

// Opens a block and returns the scope of the block. This is the scope that is open on this thread,
// or a new scope if no scope is open. `exit` closes the block. Opening a block takes only one call
// from Python, which saves time in blocks with few ops.
std::shared_ptr<Scope> open_block(const std::string& policy, size_t max_pending, bool verify,
                                  bool cells, bool check_cells, std::optional<bool> defer_checks,
                                  bool adaptive, bool profile) {
  std::shared_ptr<Scope> scope;
  if (Scope* open = Scope::current()) {
    scope = open->enter();
    autobatch::block_opens();
  } else {
    const ScopeOptions options{policy,      max_pending, verify,  cells,
                               check_cells, adaptive,    profile, nullptr};
    scope = make_scope(options)->enter();
    autobatch::block_opens();
    if (adaptive) {
      scope->begin_block(autobatch::python_block_history(), autobatch::python_block_identity);
    }
    using Which = autobatch::DeferredChecks::Which;
    autobatch::begin_checks(*scope, !defer_checks.has_value() ? Which::kOfPyTorch
                                    : *defer_checks           ? Which::kAll
                                                              : Which::kNone);
    scope->report().defers_checks = defer_checks.value_or(false);
  }
  return scope;
}

// Returns the options of the scope, as keyword arguments of batch().
py::dict options_of(Scope& scope) {
  using namespace py::literals;
  using Which = autobatch::DeferredChecks::Which;
  const ScopeOptions& o = scope.options();
  const Which which = scope.checks().which();
  const py::object defer_checks =
      which == Which::kOfPyTorch ? py::object(py::none()) : py::bool_(which == Which::kAll);
  return py::dict("policy"_a = o.policy, "max_pending"_a = o.max_pending, "verify"_a = o.verify,
                  "granularity"_a = o.cells ? "cell" : "op", "check_cells"_a = o.check_cells,
                  "defer_checks"_a = defer_checks, "adaptive"_a = o.adaptive,
                  "profile"_a = o.profile);
}

void bind_scope(py::module_& m) {
  // This class contains only data. The class for users is torch_autobatch._report.Report.
  py::class_<Report, std::shared_ptr<Report>>(m, "ReportFacts")
      .def("facts", &autobatch::report_facts);
  py::class_<Scope, std::shared_ptr<Scope>>(m, "Scope")
      // Called when the map has opened its block. Returns true if the instances should run in a
      // loop, and false if they should run in fibers.
      .def("begin_map",
           [](Scope& scope, const py::object& function) {
             return scope.begin_map(autobatch::python_block_history(),
                                    [&] { return autobatch::python_identity_of(function.ptr()); });
           })
      .def("check_thread", &Scope::check_thread)
      .def(
          "exit",
          [](Scope& scope, bool discard_errors) {
            scope.check_thread();
            autobatch::block_closes();
            scope.exit(discard_errors);
          },
          py::arg("discard_errors"))
      .def("drop_checks", [](Scope& scope) { scope.checks().clear(); })
      .def("flush", [](Scope& scope) { scope.flush("scope.flush()"); })
      .def("report", [](const Scope& scope) { return scope.shared_report(); })
      .def_property_readonly("options", &options_of)
      .def_property_readonly("is_open", &Scope::is_open);
  m.def("open_block", &open_block);
  m.def("set_eager", &autobatch::set_eager);
  m.def("set_captures_data", &autobatch::set_captures_data);
  m.def("is_open", [] { return Scope::current() != nullptr; });
}

// Returns the exception that a kernel written in Python has raised. Returns null if the error is
// not a Python exception.
py::handle raised_in_python(const std::exception& error) {
  if (const auto* e = dynamic_cast<const py::error_already_set*>(&error)) return e->value();
  const auto* found = dynamic_cast<const python_error*>(&error);
  if (found == nullptr) return {};
  auto* e = const_cast<python_error*>(found);
  if (e->type == nullptr) e->persist();
  if (e->type == nullptr) return {};
  PyErr_Clear();  // autograd's engine does not clear the exception
  // An error that was set by PyErr_SetString consists only of a type and a text until the error is
  // normalised.
  PyErr_NormalizeException(&e->type, &e->value, &e->traceback);
  return e->value;
}

// Whether the error is a Python exception that is not derived from `Exception`, such as
// KeyboardInterrupt or SystemExit.
bool is_interruption(const std::exception& error) {
  const py::gil_scoped_acquire gil;
  const py::handle raised = raised_in_python(error);
  return raised && PyObject_IsInstance(raised.ptr(), PyExc_Exception) == 0;
}

void add_note(const std::exception& error, const std::string& note) {
  const py::gil_scoped_acquire gil;
  const py::handle raised = raised_in_python(error);
  if (raised && py::hasattr(raised, "add_note")) raised.attr("add_note")(note);
}

std::shared_ptr<void> hold_gil() {
  std::shared_ptr<void> held;
  if (PyGILState_Check() == 0) held = std::make_shared<py::gil_scoped_acquire>();
  autobatch::await_collector();
  return held;
}

void wait_without_gil(const std::function<void()>& wait) {
  std::optional<py::gil_scoped_release> released;
  if (PyGILState_Check() != 0) released.emplace();
  wait();
}

// Whether torch._dynamo has been imported. The Meta kernels of most ops are written in Python and
// import torch._dynamo. The first import takes a second or more.
bool is_compiler_imported() {
  const py::gil_scoped_acquire gil;
  return PyDict_GetItemString(PyImport_GetModuleDict(), "torch._dynamo") != nullptr;
}

// --- switches.h ---

std::string names_of_switches() {
  std::string names = "all, passes, fast_paths";
  for (const Switch* s : Switch::all()) names.append(", ").append(s->name());
  return names;
}

// Returns a dict of all switches. The key is the name, and the value is a tuple (is a pass, is on,
// uses).
py::dict switches() {
  py::dict all;
  for (const Switch* s : Switch::all()) {
    all[s->name()] = py::make_tuple(s->kind() == Switch::Kind::kPass, s->is_on(), s->uses());
  }
  return all;
}

void set_switch(const std::string& name, bool on) {
  if (autobatch::any_block_open()) throw std::runtime_error("set_switch: a block is open");
  for (Switch* s : Switch::all()) {
    if (s->name() != name) continue;
    s->set(on);
    autobatch::free_waiting_objects();  // the objects that are kept for reuse
    autobatch::free_frame_memory();
    return;
  }
  throw py::value_error("set_switch: there is no switch '" + name +
                        "'; switches: " + names_of_switches());
}

void check_disabled_names() {
  for (const std::string& name : autobatch::unknown_disabled_names()) {
    throw py::value_error("AUTOBATCH_DISABLE names '" + name +
                          "', which is not a switch; expected one of " + names_of_switches());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "torch_autobatch's C++ core";
  m.attr("__version__") = AUTOBATCH_VERSION;
  m.attr("torch_version") = AUTOBATCH_TORCH_VERSION;
  m.attr("capture_key") = c10::toString(autobatch::compat::kDeferKey);
  m.def("is_pending", &autobatch::is_pending);
  m.def("is_known", &autobatch::is_known);
  m.def("build_info", &autobatch::build_info);
  check_disabled_names();
  m.def("switches", &switches);
  m.def("set_switch", &set_switch);
  m.def("any_block_open", &autobatch::any_block_open);
  m.def("policy_names", [] {
    std::vector<std::string> names;
    for (std::string_view name : autobatch::policy_names()) names.emplace_back(name);
    return names;
  });
  const auto empty_cache = [] {
    autobatch::free_waiting_objects();
    const size_t frames = autobatch::free_frame_memory();
    const py::gil_scoped_release no_gil;
    return frames + autobatch::empty_cache();
  };
  m.def("empty_cache", empty_cache,
        "Frees the buffers (at most 256 MiB), the schedules, and the memory of Python frames that "
        "the library keeps for later blocks. Returns the number of freed bytes.");
  autobatch::add_cell_type(m.ptr());
  autobatch::add_cell_functions(m.ptr());
  autobatch::bind_compiled_subgraphs(m.ptr());
  m.def("flush_open_scope", [](const std::string& reason) {
    autobatch::Scope* scope = autobatch::Scope::current();
    if (scope != nullptr && !scope->graph().empty()) scope->flush(reason);
  });
  // Replaces a method of a class that is written in C. Python does not allow assigning attributes
  // of such a class.
  m.def("replace_method", [](py::handle type, const std::string& name, py::object function) {
    auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
    if (PyDict_SetItemString(of->tp_dict, name.c_str(), function.ptr()) != 0) {
      throw py::error_already_set();
    }
    PyType_Modified(of);
  });
  bind_scope(m);
  autobatch::bind_fibers(m.ptr());
  autobatch::add_server_type(m.ptr());
  autobatch::bind_gradients(m.ptr());
  autobatch::bind_captured_functions(m.ptr());
  autobatch::watch_collector();
  autobatch::set_host_hooks({autobatch::python_place, autobatch::python_caller, is_interruption,
                             add_note, wait_without_gil, hold_gil, is_compiler_imported,
                             autobatch::may_catch});
}
