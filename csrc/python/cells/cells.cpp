#include "python/cells/cells.h"

#include "autobatch/capture/capture.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/scope/scope.h"
#include "autobatch/scope/trials.h"
#include "python/cells/cell_values.h"
#include "python/cells/data_results.h"
#include "python/cells/dynamic_arguments.h"
#include "python/cells/guards.h"
#include "python/cells/number_conversions.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <structmember.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace autobatch {
namespace {

// The templates for the program of a dynamic cell. The templates are kept when a block ends. Of
// each kind of calls, the second call is traced.
class LastingTemplates {
 public:
  // Returns the templates. If the keys and nodes of the templates refer to interning tables of an
  // earlier scope, first removes all templates.
  CellTable& of(const Scope& scope) {
    if (tables_.lock() != scope.shared_tables()) {
      tables_ = scope.shared_tables();
      clear();
    }
    return table_;
  }
  void add(const Key& key, std::unique_ptr<CellTemplate> made, CellFunction& function) {
    if (table_.is_full() || steps_ > kMostSteps) clear();
    steps_ += made->num_steps();
    table_.add(key, std::move(made), function);
  }
  // Whether many traces produced no template. In this case the ops of the function probably depend
  // on data that is not in the key of a call.
  bool give_up() const { return failures_ >= kMostFailures; }
  void count_failure() { ++failures_; }

 private:
  static constexpr size_t kMostSteps = size_t{1} << 16;  // each step has about 400 bytes
  static constexpr int kMostFailures = 4;
  void clear() {
    table_.clear();
    steps_ = 0;
  }

  std::weak_ptr<Tables> tables_;
  CellTable table_;
  size_t steps_ = 0;
  int failures_ = 0;
};

struct CellObject {
  PyObject_HEAD PyObject* function;
  PyObject* dict;
  PyObject* weakrefs;
  vectorcallfunc vectorcall;
  unsigned long long uses;    // number of calls that used a template
  CellFunction* known;        // owned by this object
  LastingTemplates* lasting;  // owned by this object; null: the templates are in Scope::cells()
};

// The Python part of a template (CellTemplate::host).
struct Host {
  std::vector<PyObject*> held;  // objects whose addresses are in the key; owned
  Guards guards;
  OutputSpec outputs;

  ~Host() {
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE gil = PyGILState_Ensure();
    for (PyObject* object : held) Py_DECREF(object);
    outputs.clear();
    PyGILState_Release(gil);
  }
};

PyObject* call_plainly(CellObject* cell, PyObject* const* args, size_t nargsf, PyObject* names) {
  return PyObject_Vectorcall(cell->function, args, nargsf, names);
}

std::string name_of(CellObject* cell) {
  PyObject* name = PyObject_GetAttrString(reinterpret_cast<PyObject*>(cell), "__qualname__");
  if (name == nullptr) {
    PyErr_Clear();
    name = PyObject_Str(reinterpret_cast<PyObject*>(Py_TYPE(cell->function)));
  }
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8(name);
  std::string out = text == nullptr ? "cell" : text;
  Py_XDECREF(name);
  PyErr_Clear();
  return out;
}

// Calls torch_autobatch._cell.guards(function, modules, weights) and adds the guards that it
// returns, a list of tuples (dict, name, value). The function returns None if a module has hooks.
// In this case sets `has_hooks`, because hooks must run in each call. If there is an error, returns
// false with an exception set.
bool add_guards(Host& host, bool& has_hooks, PyObject* cell, at::ArrayRef<PyObject*> modules,
                const std::vector<at::Tensor>& weights) {
  const auto own = [](PyObject* object) { return py::reinterpret_steal<py::object>(object); };
  const py::object of_modules = own(PyList_New(0)), of_weights = own(PyList_New(0));
  for (PyObject* module : modules) PyList_Append(of_modules.ptr(), module);
  for (const at::Tensor& w : weights)
    PyList_Append(of_weights.ptr(), own(THPVariable_Wrap(w)).ptr());
  const py::object library = own(PyImport_ImportModule("torch_autobatch._cell"));
  if (!library) return false;
  const py::object function = own(PyObject_GetAttrString(library.ptr(), "guards"));
  if (!function) return false;
  const py::object found = own(PyObject_CallFunctionObjArgs(function.ptr(), cell, of_modules.ptr(),
                                                            of_weights.ptr(), nullptr));
  if (!found) return false;
  has_hooks = found.is_none();
  if (has_hooks) return true;
  return host.guards.add(found.ptr());
}

void note_plain(Scope& scope, const std::string& name, const std::string& why,
                const std::string& site) {
  scope.report().at_once.push_back({name, "captured op by op: " + why, site, 1, ""});
}

// One call of a cell while a scope captures ops.
class Use {
 public:
  Use(CellObject* cell, Scope& scope, PyObject* const* args, size_t nargsf, PyObject* names)
      : cell_(cell), scope_(scope), args_(args), nargsf_(nargsf), names_(names) {}

  PyObject* run() {
    if (!inputs_.add_call(cell_->function, args_, PyVectorcall_NARGS(nargsf_), names_)) {
      return nullptr;
    }
    Key key;
    if (lasting() && cell_->lasting->give_up()) return plain();
    if (!inputs_.capturable() || !make_key(key)) return plain();
    if (CellTemplate* known = table().find(key)) {
      if (known->num_steps() == 0) return is_second(*known) ? trace() : plain();
      auto* host = static_cast<Host*>(known->host.get());
      const bool holds = host->guards.hold();
      if (holds && scope_.options().check_cells) return check(*known);
      c10::SmallVector<at::Tensor, 4> outputs;
      if (holds && known->apply(scope_, inputs_.tensors(), outputs)) {
        ++cell_->uses;
        return host->outputs.build(outputs);
      }
      if (PyErr_Occurred() != nullptr) return nullptr;
      table().remove(key);
    } else if (lasting()) {
      add(key, std::make_unique<CellTemplate>());
      return plain();
    }
    return table().is_full() && !lasting() ? plain() : trace();
  }

 private:
  bool lasting() const { return cell_->lasting != nullptr; }
  CellTable& table() { return lasting() ? cell_->lasting->of(scope_) : scope_.cells(); }
  void add(const Key& key, std::unique_ptr<CellTemplate> made) {
    lasting() ? cell_->lasting->add(key, std::move(made), *cell_->known)
              : scope_.cells().add(key, std::move(made), *cell_->known);
  }
  // Whether `known` is only the mark that the first call of a kind has stored. In this case the
  // current call is the second call and must be traced.
  bool is_second(const CellTemplate& known) const { return lasting() && known.host == nullptr; }

  PyObject* plain() {
    inputs_.hold();
    return call_plainly(cell_, args_, nargsf_, names_);
  }

  bool make_key(Key& key) {
    return CellTable::make_key(scope_, cell_->known->id(), inputs_.tensors(), inputs_.words(), key);
  }

  // Runs the function although there is a template. Raises an error if the captured ops or the
  // result differ from the template.
  PyObject* check(const CellTemplate& known) {
    CellTrace trace(scope_, inputs_.tensors(), !lasting());
    auto result = py::reinterpret_steal<py::object>(plain());
    if (!result) return nullptr;
    OutputSpec spec;
    std::vector<at::Tensor> outputs;
    std::string difference;
    if (!spec.describe(result.ptr(), outputs) && PyErr_Occurred() == nullptr) {
      difference = "a result of a different kind";
    }
    const auto* host = static_cast<const Host*>(known.host.get());
    if (difference.empty() && !spec.equals(host->outputs))
      difference = "a different constant result";
    spec.clear();
    const std::unique_ptr<CellTemplate> now = trace.finish(outputs);
    if (difference.empty()) difference = now ? known.difference(*now) : trace.why();
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (!difference.empty()) raise_different(name_of(cell_), difference);
    return result.release().ptr();
  }

  PyObject* trace() {
    if (lasting()) Trials::note_preparation();
    CellTrace trace(scope_, inputs_.tensors(), !lasting());
    auto result = py::reinterpret_steal<py::object>(plain());
    if (!result) return nullptr;
    if (!lasting()) trace.check_no_read(name_of(cell_));
    return keep(trace, result.ptr()) ? result.release().ptr() : nullptr;
  }

  // Stores the template of a traced call, or an empty template if the trace failed. If there is an
  // error, returns false with an exception set.
  bool keep(CellTrace& trace, PyObject* result) {
    auto host = std::make_shared<Host>();
    std::vector<at::Tensor> outputs;
    const bool known_kind = host->outputs.describe(result, outputs);
    if (PyErr_Occurred() != nullptr) return false;
    if (!known_kind)
      CellTrace::break_off("it returns a kind of object that a replay cannot construct", "");
    std::unique_ptr<CellTemplate> made =
        trace.finish(outputs, lasting() ? nullptr : cell_->known);  // a subgraph belongs to a scope
    std::string why = trace.why();
    bool has_hooks = false;
    if (made && !lasting() &&
        !add_guards(*host, has_hooks, cell_->function, inputs_.modules(), made->weights())) {
      return false;
    }
    if (has_hooks) why = "a module in it has hooks", made.reset();
    if (!made) {
      if (!lasting()) note_plain(scope_, name_of(cell_), why, trace.site());
      if (lasting() && PyTuple_Check(result)) cell_->lasting->count_failure();
      made = std::make_unique<CellTemplate>();  // later calls run the function
    }
    Key key;  // a new key, because only the trace shows which inputs are weights
    if (!make_key(key)) return true;
    for (PyObject* object : inputs_.objects()) host->held.push_back(Py_NewRef(object));
    made->host = std::move(host);
    if (lasting()) table().remove(key);
    add(key, std::move(made));
    return true;
  }

  CellObject* cell_;
  Scope& scope_;
  PyObject* const* args_;
  size_t nargsf_;
  PyObject* names_;
  CellInputs inputs_;
};

// Returns the scope that captures each call of a cell as a whole. Returns null if a call just runs
// the cell's function.
Scope* scope_for_cells() {
  Scope* scope = capturing_scope();
  // If a cell is called while another cell is traced, the ops of the call become part of the trace.
  const bool uses = scope != nullptr && scope->options().cells && CellTrace::current() == nullptr;
  return uses ? scope : nullptr;
}

PyObject* call_cell(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* cell = reinterpret_cast<CellObject*>(self);
  Scope* scope = scope_for_cells();
  if (scope == nullptr || !may_apply_cells(*scope)) {
    return call_plainly(cell, args, nargsf, names);
  }
  return Use(cell, *scope, args, nargsf, names).run();
  END_HANDLE_TH_ERRORS
}

// --- the type ---

PyObject* new_cell(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* function = nullptr;
  int compiles = 0, lasts = 0;
  if (!PyArg_ParseTuple(args, "O|pp:Cell", &function, &compiles, &lasts)) return nullptr;
  auto* cell = reinterpret_cast<CellObject*>(type->tp_alloc(type, 0));
  if (cell == nullptr) return nullptr;
  cell->function = Py_NewRef(function);
  cell->vectorcall = call_cell;
  cell->known = new CellFunction(compiles != 0);
  cell->lasting = lasts != 0 ? new LastingTemplates : nullptr;
  return reinterpret_cast<PyObject*>(cell);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  auto* cell = reinterpret_cast<CellObject*>(self);
  Py_VISIT(cell->function);
  Py_VISIT(cell->dict);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  auto* cell = reinterpret_cast<CellObject*>(self);
  Py_CLEAR(cell->function);
  Py_CLEAR(cell->dict);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (reinterpret_cast<CellObject*>(self)->weakrefs != nullptr) PyObject_ClearWeakRefs(self);
  clear(self);
  delete reinterpret_cast<CellObject*>(self)->known;
  delete reinterpret_cast<CellObject*>(self)->lasting;
  type->tp_free(self);
  Py_DECREF(type);
}

// Binds the cell to an object, like a function that is used as a method.
PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  if (object == nullptr || object == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, object);
}

// Pickles the cell by its name. Python pickles functions in the same way.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyMemberDef members[] = {
    {"__wrapped__", T_OBJECT, offsetof(CellObject, function), READONLY, "The function itself."},
    {"uses", T_ULONGLONG, offsetof(CellObject, uses), READONLY,
     "How many calls were captured by a template, without running the function."},
    {"__dictoffset__", T_PYSSIZET, offsetof(CellObject, dict), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CellObject, weakrefs), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CellObject, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef functions[] = {
    {"take_apart", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(take_apart)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

template <class F>
void* slot(F* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void add_cell_functions(PyObject* of) {
  if (PyModule_AddFunctions(of, functions) != 0) throw py::error_already_set();
  auto module = py::reinterpret_borrow<py::module_>(of);
  py::class_<Guards>(module, "CellGuards")
      .def(py::init([](const py::list& found, const py::list& tensors) {
        auto guards = std::make_unique<Guards>();
        if (!guards->add(found.ptr())) throw py::error_already_set();
        guards->add_tensors(tensors.ptr());
        return guards;
      }))
      .def("hold", &Guards::hold);
  module.def("uses_cells", [] { return scope_for_cells() != nullptr; });
  module.def("checks_cells", [] {
    const Scope* scope = scope_for_cells();
    return scope != nullptr && scope->options().check_cells;
  });
  // Returns the id of the open scope, and the number of batches that it has run. Returns zeros if
  // no scope is open.
  module.def("note_preparation", &Trials::note_preparation);
  module.def("batches_run", [] {
    Scope* scope = Scope::current();
    return scope == nullptr ? std::pair<uint64_t, uint64_t>()
                            : std::pair(scope->id(), uint64_t{scope->report().batches});
  });
  module.def("note_plain_cell",
             [](const std::string& name, const std::string& why, const std::string& place) {
               if (Scope* scope = scope_for_cells()) {
                 note_plain(*scope, name, why, place.empty() ? current_site() : place);
               }
             });
  py::class_<DataResults>(module, "DataResults")
      .def(py::init<>())
      .def("find", &DataResults::find)
      .def("add", &DataResults::add);
  module.def("raise_different_cell", &raise_different);
  module.def("trace_conversions", [](const py::object& convert) {
    trace_conversions(convert.is_none() ? nullptr : convert.ptr());
  });
}

void add_cell_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_new, slot(new_cell)},
                                {Py_tp_dealloc, slot(dealloc)},
                                {Py_tp_traverse, slot(traverse)},
                                {Py_tp_clear, slot(clear)},
                                {Py_tp_call, slot(PyVectorcall_Call)},
                                {Py_tp_descr_get, slot(bind)},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec = {"torch_autobatch._C.Cell", sizeof(CellObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_METHOD_DESCRIPTOR,
                             slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "Cell", type) < 0) {
    throw py::error_already_set();
  }
}

}  // namespace autobatch
