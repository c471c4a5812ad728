#include "python/fastpath/patches.h"

#include "autobatch/capture/history_requests.h"
#include "autobatch/capture/memory_updates.h"
#include "autobatch/graph/foreign_memory.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"
#include "python/custom_functions.h"
#include "python/deferred_checks.h"
#include "python/fastpath/direct_calls.h"
#include "python/fastpath/in_place_calls.h"
#include "python/fastpath/leaf_modules.h"
#include "python/fastpath/module_attributes.h"
#include "python/fastpath/number_tensors.h"
#include "python/fastpath/tensor_objects.h"
#include "python/fibers/frame_memory.h"
#include "python/gradients.h"
#include "python/script_functions.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <iterator>
#include <utility>

namespace py = pybind11;

namespace autobatch {
namespace {

py::object attribute_of_tensor(const char* name) {
  const py::object base = py::module_::import("torch._C").attr("TensorBase");
  return py::reinterpret_borrow<py::dict>(base.attr("__dict__"))[name];
}

// Return the definition of a method of Tensor, or of a function of torch._C.
PyMethodDef* method_of_tensor(const char* name) {
  return reinterpret_cast<PyMethodDescrObject*>(attribute_of_tensor(name).ptr())->d_method;
}

PyMethodDef* function_of_module(const char* name) {
  const py::object function = py::module_::import("torch._C").attr(name);
  return reinterpret_cast<PyCFunctionObject*>(function.ptr())->m_ml;
}

// A method or function of PyTorch that is replaced while a block is open.
class Replaced {
 public:
  Replaced(PyMethodDef* (*find)(const char*), const char* name) : find_(find), name_(name) {}

  void install(PyCFunction replacement) {
    if (method_ == nullptr) method_ = find_(name_);
    original_ = std::exchange(method_->ml_meth, replacement);
  }
  void remove() { method_->ml_meth = original_; }

  const char* name() const { return name_; }
  // Call PyTorch's function.
  PyObject* call(PyObject* self, PyObject* argument) const { return original_(self, argument); }
  PyObject* call(PyObject* self, PyObject* args, PyObject* options) const {
    const auto original =
        reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void*>(original_));
    return original(self, args, options);
  }

 private:
  PyMethodDef* (*find_)(const char*);
  const char* name_;
  PyMethodDef* method_ = nullptr;
  PyCFunction original_ = nullptr;
};

// --- Tensor.new_tensor ---

Replaced original_new_tensor(method_of_tensor, "new_tensor");

// Returns torch.tensor(data, **options), with the dtype and device of `self` as defaults.
py::object tensor_like(const at::Tensor& self, const py::args& args, const py::kwargs& options) {
  py::kwargs given(options);
  py::object data = args.size() == 1 ? py::object(args[0]) : py::object(given["data"]);
  if (given.contains("data")) given.attr("pop")("data");
  const auto set_default = [&](const char* name, const py::object& value) {
    if (!given.contains(name) || given[name].is_none()) given[name] = value;
  };
  set_default("dtype", py::cast(self.scalar_type()));
  set_default("device", py::cast(self.device()));
  return py::module_::import("torch").attr("tensor")(data, **given);
}

PyObject* new_tensor(PyObject* self, PyObject* args, PyObject* options) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(self) || at::impl::torch_function_mode_enabled()) {
    return original_new_tensor.call(self, args, options);
  }
  const at::Tensor tensor = THPVariable_Unpack(self);
  const PendingTensor* pending = as_pending(tensor);
  const bool has_data =
      PyTuple_GET_SIZE(args) == 1 || (PyTuple_GET_SIZE(args) == 0 && options != nullptr &&
                                      PyDict_GetItemString(options, "data") != nullptr);
  if (pending == nullptr || !pending->is_pending() || !has_data) {
    return original_new_tensor.call(self, args, options);
  }
  py::kwargs named;
  if (options != nullptr) named = py::reinterpret_borrow<py::kwargs>(options).attr("copy")();
  return tensor_like(tensor, py::reinterpret_borrow<py::args>(args), named).release().ptr();
  END_HANDLE_TH_ERRORS
}

// --- Tensor.new, the legacy method ---

Replaced original_legacy_new(method_of_tensor, "new");

// PyTorch's `Tensor.new` needs only the dtype and device of `self`, but derives both from the
// dispatch keys. So an empty tensor with the same options is passed instead of a pending `self`.
PyObject* legacy_new(PyObject* self, PyObject* args, PyObject* options) {
  HANDLE_TH_ERRORS
  const PendingTensor* pending =
      THPVariable_CheckExact(self) ? as_pending(THPVariable_Unpack(self)) : nullptr;
  if (pending == nullptr || !pending->is_pending())
    return original_legacy_new.call(self, args, options);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* argument = PyTuple_GET_ITEM(args, i);
    PendingTensor* given =
        THPVariable_Check(argument) ? as_pending(THPVariable_Unpack(argument)) : nullptr;
    if (given != nullptr) ensure_real({given}, "Tensor.new");
  }
  at::Tensor stand_in;
  {
    const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
    stand_in = at::empty({0}, THPVariable_Unpack(self).options().requires_grad(false));
  }
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(stand_in)));
  return original_legacy_new.call(object.ptr(), args, options);
  END_HANDLE_TH_ERRORS
}

// --- torch._C._increment_version, which torch.autograd.graph.increment_version calls ---

Replaced original_increment_version(function_of_module, "_increment_version");

// Computes the tensors before PyTorch's function runs, because a pending tensor has no version
// counter yet.
PyObject* increment_version(PyObject* module, PyObject* tensors) {
  HANDLE_TH_ERRORS
  const auto all = py::reinterpret_steal<py::object>(PySequence_Tuple(tensors));
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all.ptr()); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(all.ptr(), i);
    PendingTensor* pending =
        THPVariable_Check(tensor) ? as_pending(THPVariable_Unpack(tensor)) : nullptr;
    if (pending != nullptr) ensure_real({pending}, "increment_version");
  }
  return original_increment_version.call(module, all.ptr());
  END_HANDLE_TH_ERRORS
}

// --- Tensor.is_leaf and Tensor.grad_fn ---

// PyTorch's getters need the grad_fn, and a tensor has no grad_fn before it is computed.
class HistoryRead {
 public:
  explicit HistoryRead(const char* name) : name_(name) {}

  void install(getter replacement) {
    if (property_ == nullptr) {
      const py::object found = attribute_of_tensor(name_);
      property_ = reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset;
    }
    original_ = std::exchange(property_->get, replacement);
  }
  void remove() { property_->get = original_; }
  PyObject* original(PyObject* self, void* closure) const { return original_(self, closure); }

 private:
  const char* name_;
  PyGetSetDef* property_ = nullptr;
  getter original_ = nullptr;
};

HistoryRead leaf_read("is_leaf"), node_read("grad_fn");

// Returns the pending tensor that `self` contains, if the pending tensor belongs to this thread's
// scope. Returns null if there is no such tensor, or if PyTorch's getter must run.
const PendingTensor* plainly_pending(PyObject* self) {
  if (!THPVariable_CheckExact(self) || at::impl::torch_function_mode_enabled()) return nullptr;
  const PendingTensor* pending = as_pending(THPVariable_Unpack(self));
  const Scope* scope = Scope::current();
  const bool ours = pending != nullptr && pending->is_pending() && scope != nullptr &&
                    pending->graph() == &scope->graph();
  return ours ? pending : nullptr;
}

PyObject* is_leaf(PyObject* self, void* closure) {
  const PendingTensor* pending = plainly_pending(self);
  if (pending != nullptr && is_result(*pending)) Py_RETURN_FALSE;
  return leaf_read.original(self, closure);
}

// Adds the tensor's dict of hooks to the tensor's autograd node.
void attach_hooks(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const auto self = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  const py::object node = self.attr("grad_fn");
  if (!node.is_none()) node.attr("_register_hook_dict")(self);
}

// Called when `grad_fn` is read. Tensor.register_hook creates an empty dict of hooks, and reads
// `grad_fn` to add this dict to the autograd node. Returns true if register_hook reads `grad_fn`,
// and the dict can be added later. In this case the getter must return None, so that register_hook
// does not add the dict.
bool defer_hooks(PyObject* self) {
  PyObject* hooks = reinterpret_cast<THPVariable*>(self)->backward_hooks;
  const bool registers =
      hooks != nullptr && PyDict_Check(hooks) != 0 && PyDict_GET_SIZE(hooks) == 0;
  const at::Tensor& tensor = THPVariable_Unpack(self);
  return registers && !as_pending(tensor)->has_request(attach_hooks) &&
         defer_request(tensor, attach_hooks);
}

// Keeps a new leaf (new_leaves.h) alive until the leaf is computed. In eager mode, the autograd
// graph keeps a leaf alive, and calls the leaf's hooks. The program may register hooks after it has
// read `grad_fn`.
void keep_leaf(const at::Tensor& tensor) {
  const auto nothing = [](const at::Tensor&) {};
  if (!as_pending(tensor)->has_request(nothing)) defer_request(tensor, nothing);
}

// This getter is called often: nn.Module reads the `grad_fn` of each parameter that it registers.
PyObject* grad_fn(PyObject* self, void* closure) {
  const PendingTensor* pending = plainly_pending(self);
  if (pending != nullptr && !is_result(*pending)) {
    keep_leaf(THPVariable_Unpack(self));
    Py_RETURN_NONE;
  }
  if (pending != nullptr && defer_hooks(self)) Py_RETURN_NONE;
  return node_read.original(self, closure);
}

void install_history_reads() {
  leaf_read.install(is_leaf);
  node_read.install(grad_fn);
}

void remove_history_reads() {
  node_read.remove();
  leaf_read.remove();
}

// --- reads of a tensor's memory without an op ---

Replaced numpy_read(method_of_tensor, "numpy"), pointer_read(method_of_tensor, "data_ptr"),
    storage_read(method_of_tensor, "untyped_storage");

// Before code reads a tensor's memory without an op, all pending updates of this memory by captured
// ops are completed (memory_updates.h).
template <Replaced& read>
PyObject* read_raw(PyObject* self, auto... arguments) {
  HANDLE_TH_ERRORS
  if (THPVariable_Check(self)) finish_updates(THPVariable_Unpack(self), read.name());
  return read.call(self, arguments...);
  END_HANDLE_TH_ERRORS
}

// Calls a function that exports the tensor's memory to other code. The other code may write to the
// memory without an op. `unmarked`: see note_given_away().
template <class Call>
PyObject* give_away(PyObject* tensor, bool unmarked, const Call& call) {
  Scope* scope = THPVariable_Check(tensor) ? Scope::current() : nullptr;
  if (scope != nullptr) {
    finish_updates(THPVariable_Unpack(tensor), "an export");
    keep_what_is_read(scope->graph(), THPVariable_Unpack(tensor));
  }
  PyObject* given = call();
  if (scope != nullptr && given != nullptr) note_given_away(THPVariable_Unpack(tensor), unmarked);
  return given;
}

PyObject* numpy(PyObject* self, PyObject* args, PyObject* options) {
  HANDLE_TH_ERRORS
  return give_away(self, false, [&] { return read_raw<numpy_read>(self, args, options); });
  END_HANDLE_TH_ERRORS
}

// --- torch._C._to_dlpack and _to_dlpack_versioned, which Tensor.__dlpack__ calls ---

Replaced dlpack(function_of_module, "_to_dlpack"),
    versioned_dlpack(function_of_module, "_to_dlpack_versioned");

template <Replaced& exported>
PyObject* to_dlpack(PyObject* module, PyObject* args, PyObject* options) {
  HANDLE_TH_ERRORS
  PyObject* tensor = PyTuple_GET_SIZE(args) == 0 ? Py_None : PyTuple_GET_ITEM(args, 0);
  return give_away(tensor, true, [&] { return exported.call(module, args, options); });
  END_HANDLE_TH_ERRORS
}

// --- the table of replaced functions ---

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

struct Replacement {
  Replaced& original;
  PyCFunction function;
};

const Replacement replacements[] = {
    {original_new_tensor, as_method(&new_tensor)},
    {original_legacy_new, as_method(&legacy_new)},
    {original_increment_version, &increment_version},
    {numpy_read, as_method(&numpy)},
    {pointer_read, &read_raw<pointer_read, PyObject*>},
    {storage_read, &read_raw<storage_read, PyObject*>},
    {dlpack, as_method(&to_dlpack<dlpack>)},
    {versioned_dlpack, as_method(&to_dlpack<versioned_dlpack>)},
};

void install_replacements() {
  for (const Replacement& replacement : replacements) {
    replacement.original.install(replacement.function);
  }
}

void remove_replacements() {
  for (const Replacement& replacement : replacements) replacement.original.remove();
}

// A change that is active while a block is open.
struct Patch {
  void (*install)();
  void (*remove)();
  Switch* fast_path = nullptr;  // null if results are wrong without the change
  bool is_installed = false;
};

// Patches are installed in this order, and removed in reverse order.
Patch patches[] = {
    {install_leaf_modules, remove_leaf_modules, &leaf_modules_switch},
    {install_module_attributes, remove_module_attributes, &module_attributes_switch},
    {install_direct_calls, remove_direct_calls, &direct_calls_switch},
    {install_number_tensors, remove_number_tensors, &number_tensors_switch},
    {install_replacements, remove_replacements},
    {install_history_reads, remove_history_reads},
    {install_in_place_calls, remove_in_place_calls},
    {install_custom_functions, remove_custom_functions},
    {install_script_functions, remove_script_functions},
    {install_tensor_objects, remove_tensor_objects, &tensor_objects_switch},
    {install_checks, remove_checks},
    {install_gradients, remove_gradients},
    {install_frame_memory, remove_frame_memory, &frame_memory_switch},
};

int open_blocks = 0;  // number of open blocks of all threads; guarded by the GIL

}  // namespace

bool any_block_open() { return open_blocks > 0; }

void block_opens() {
  if (++open_blocks > 1) return;
  for (Patch& patch : patches) {
    if (patch.fast_path != nullptr && !patch.fast_path->is_on()) continue;
    patch.install();
    patch.is_installed = true;
  }
}

void block_closes() {
  if (--open_blocks > 0) return;
  for (auto patch = std::rbegin(patches); patch != std::rend(patches); ++patch) {
    if (std::exchange(patch->is_installed, false)) patch->remove();
  }
}

}  // namespace autobatch
