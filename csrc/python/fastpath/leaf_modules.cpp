#include "python/fastpath/leaf_modules.h"

#include "autobatch/capture/capture.h"
#include "autobatch/scope/payoff.h"
#include "python/fastpath/direct_calls.h"
#include "python/fastpath/leaf_attributes.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace autobatch {

Switch leaf_modules_switch(Switch::Kind::kFastPath, "leaf_modules");

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const Name kCall("__call__");
const Name kCallImpl("_call_impl");
const Name kApproximate("approximate");
const Name kBias("bias");
const Name kBiasHh("bias_hh");
const Name kBiasIh("bias_ih");
const Name kEps("eps");
const Name kInplace("inplace");
const Name kMaxNorm("max_norm");
const Name kModules("_modules");
const Name kNormalizedShape("normalized_shape");
const Name kP("p");
const Name kHiddenSize("hidden_size");
const Name kPaddingIdx("padding_idx");
const Name kScaleGradByFreq("scale_grad_by_freq");
const Name kSparse("sparse");
const Name kTraining("training");
const Name kWeight("weight");
const Name kWeightHh("weight_hh");
const Name kWeightIh("weight_ih");

// The positional arguments of a call: exact tensors, or tuples of two exact tensors.
struct Inputs {
  PyObject* const* args;
  Py_ssize_t count;

  bool is_tensor(Py_ssize_t i) const { return i < count && THPVariable_CheckExact(args[i]); }
  const Tensor& tensor(Py_ssize_t i) const { return THPVariable_Unpack(args[i]); }
  bool is_pair(Py_ssize_t i) const {
    return i < count && PyTuple_CheckExact(args[i]) && PyTuple_GET_SIZE(args[i]) == 2 &&
           THPVariable_CheckExact(PyTuple_GET_ITEM(args[i], 0)) &&
           THPVariable_CheckExact(PyTuple_GET_ITEM(args[i], 1));
  }
  const Tensor& of_pair(Py_ssize_t i, Py_ssize_t k) const {
    return THPVariable_Unpack(PyTuple_GET_ITEM(args[i], k));
  }
};

OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

PyObject* wrap(const Tensor& tensor) { return THPVariable_Wrap(tensor); }

PyObject* wrap(const std::tuple<Tensor, Tensor>& pair) {
  PyObject* out = PyTuple_New(2);
  if (out == nullptr) throw python_error();
  PyTuple_SET_ITEM(out, 0, THPVariable_Wrap(std::get<0>(pair)));
  PyTuple_SET_ITEM(out, 1, THPVariable_Wrap(std::get<1>(pair)));
  return out;
}

// Runs an op in the same way as PyTorch's bindings: the GIL is released, and warnings of the op
// become Python warnings. Returns null, with no exception set, if ops are not captured.
template <class Op>
PyObject* run(const Op& op) {
  if (capturing_scope() == nullptr) return nullptr;
  torch::PyWarningHandler warnings;
  try {
    return wrap([&] {
      const py::gil_scoped_release no_gil;
      return op();
    }());
  } catch (...) {
    warnings.set_in_exception();
    throw;
  }
}

// A function with the same effect as the module's `forward`. If the function cannot handle the
// call, it returns null with no exception set.
using Forward = PyObject* (*)(Attributes& module, const Inputs& in);

PyObject* linear(Attributes& module, const Inputs& in) {
  const Tensor &weight = module.parameter(kWeight), &bias = module.parameter(kBias);
  if (!module.complete() || !weight.defined()) return nullptr;
  static const OpInfo& op = find_op("aten::linear", "");
  PyObject* known = from_cache(op, {argument(in.tensor(0)), argument(weight), argument(bias)});
  if (known != nullptr) return known;
  return run(
      [&, w = Tensor(weight), b = optional(bias)] { return at::linear(in.tensor(0), w, b); });
}

struct CellWeights {
  explicit CellWeights(Attributes& module)
      : ih(module.parameter(kWeightIh)),
        hh(module.parameter(kWeightHh)),
        b_ih(module.parameter(kBiasIh)),
        b_hh(module.parameter(kBiasHh)) {}
  bool given() const { return ih.defined() && hh.defined(); }
  PyObject* from_cache(const OpInfo& op, const Tensor& x, const Argument& state) const {
    return autobatch::from_cache(
        op, {argument(x), state, argument(ih), argument(hh), argument(b_ih), argument(b_hh)});
  }

  Tensor ih, hh, b_ih, b_hh;
};

Tensor initial_state(const Tensor& x, int64_t width) {
  return at::zeros({x.size(0), width}, x.options().requires_grad(false));
}

PyObject* lstm_cell(Attributes& module, const Inputs& in) {
  const bool fresh = in.count == 1 || in.args[1] == Py_None;
  if (!fresh && !in.is_pair(1)) return nullptr;
  Tensor x = in.tensor(0), h, c;
  if (!fresh) h = in.of_pair(1, 0), c = in.of_pair(1, 1);
  const int64_t dim = x.dim(), width = module.integer(kHiddenSize, -1);
  if ((dim != 1 && dim != 2) || (!fresh && (h.dim() != dim || c.dim() != dim))) return nullptr;
  const CellWeights w(module);
  if (!module.complete() || !w.given()) return nullptr;
  if (!fresh && dim == 2) {
    static const OpInfo& op = find_op("aten::lstm_cell", "");
    const std::array<const Tensor*, 2> state = {&h, &c};
    if (PyObject* known = w.from_cache(op, x, argument(state))) return known;
  }
  return run([&] {
    if (dim == 1) x = x.unsqueeze(0);
    if (fresh) {
      h = c = initial_state(x, width);
    } else if (dim == 1) {
      h = h.unsqueeze(0), c = c.unsqueeze(0);
    }
    auto state = at::lstm_cell(x, {h, c}, w.ih, w.hh, w.b_ih, w.b_hh);
    if (dim == 2) return state;
    return std::make_tuple(std::get<0>(state).squeeze(0), std::get<1>(state).squeeze(0));
  });
}

PyObject* gru_cell(Attributes& module, const Inputs& in) {
  const bool fresh = in.count == 1 || in.args[1] == Py_None;
  if (!fresh && !in.is_tensor(1)) return nullptr;
  Tensor x = in.tensor(0), h;
  if (!fresh) h = in.tensor(1);
  const int64_t dim = x.dim(), width = module.integer(kHiddenSize, -1);
  if ((dim != 1 && dim != 2) || (!fresh && h.dim() != dim)) return nullptr;
  const CellWeights w(module);
  if (!module.complete() || !w.given()) return nullptr;
  if (!fresh && dim == 2) {
    static const OpInfo& op = find_op("aten::gru_cell", "");
    if (PyObject* known = w.from_cache(op, x, argument(h))) return known;
  }
  return run([&] {
    if (dim == 1) x = x.unsqueeze(0);
    if (fresh) {
      h = initial_state(x, width);
    } else if (dim == 1) {
      h = h.unsqueeze(0);
    }
    const Tensor out = at::gru_cell(x, h, w.ih, w.hh, w.b_ih, w.b_hh);
    return dim == 1 ? out.squeeze(0) : out;
  });
}

PyObject* embedding(Attributes& module, const Inputs& in) {
  const Tensor& weight = module.parameter(kWeight);
  constexpr int64_t kNoPadding = std::numeric_limits<int64_t>::min();
  const int64_t index = module.integer(kPaddingIdx, kNoPadding);
  const int64_t padding = index == kNoPadding ? -1 : index;
  const bool scale = module.flag(kScaleGradByFreq), sparse = module.flag(kSparse);
  if (!module.complete() || !module.is_none(kMaxNorm) || !weight.defined()) {
    return nullptr;
  }
  if (weight.dim() != 2 || padding >= weight.size(0) || index == -1 || padding < -1) {
    return nullptr;
  }
  static const OpInfo& op = find_op("aten::embedding", "");
  PyObject* known = from_cache(op, {argument(weight), argument(in.tensor(0)), argument(padding),
                                    argument(scale), argument(sparse)});
  if (known != nullptr) return known;
  return run(
      [&, w = Tensor(weight)] { return at::embedding(w, in.tensor(0), padding, scale, sparse); });
}

PyObject* layer_norm(Attributes& module, const Inputs& in) {
  const Tensor w = module.parameter(kWeight), b = module.parameter(kBias);
  const at::DimVector shape = module.sizes(kNormalizedShape);
  const double eps = module.number(kEps);
  if (!module.complete()) return nullptr;
  const bool cudnn = at::globalContext().userEnabledCuDNN();
  return run(
      [&] { return at::layer_norm(in.tensor(0), shape, optional(w), optional(b), eps, cudnn); });
}

PyObject* dropout(Attributes& module, const Inputs& in) {
  const double p = module.number(kP);
  const bool training = module.flag(kTraining), in_place = module.flag(kInplace);
  if (!module.complete() || in_place || !(p >= 0 && p <= 1)) return nullptr;
  return run([&] { return at::dropout(in.tensor(0), p, training); });
}

// Runs an activation. `Op` is one of at::_ops. `kMayBeInPlace`: the module has an `inplace` flag.
template <class Op, bool kMayBeInPlace>
PyObject* activation(Attributes& module, const Inputs& in) {
  if (kMayBeInPlace && (module.flag(kInplace) || !module.complete())) return nullptr;
  static const OpInfo& op = find_op(Op::name, Op::overload_name);
  if (PyObject* known = from_cache(op, {argument(in.tensor(0))})) return known;
  return run([&] { return Op::call(in.tensor(0)); });
}

PyObject* gelu(Attributes& module, const Inputs& in) {
  const std::string approximate = module.text(kApproximate);
  if (!module.complete()) return nullptr;
  return run([&] { return at::gelu(in.tensor(0), approximate); });
}

// Calls the modules of an nn.Sequential one after the other, like nn.Sequential's `forward`.
PyObject* sequential(Attributes& module, const Inputs& in) {
  const py::object modules = module.values(kModules);
  if (!module.complete() || capturing_scope() == nullptr) return nullptr;
  py::object value = py::reinterpret_borrow<py::object>(in.args[0]);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(modules.ptr()); ++i) {
    PyObject* next = PyObject_CallOneArg(PyList_GET_ITEM(modules.ptr(), i), value.ptr());
    if (next == nullptr) return nullptr;  // a Python exception is set
    value = py::reinterpret_steal<py::object>(next);
  }
  return value.release().ptr();
}

// --- the classes ---

PyObject* attribute(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

// nn.Module, and the other objects of PyTorch on which each module call depends.
struct Base {
  PyObject* type = attribute("torch.nn", "Module");
  PyObject* call = PyObject_GetAttrString(type, "__call__");
  PyObject* call_impl = PyObject_GetAttrString(type, "_call_impl");
  PyObject* functions = PyModule_GetDict(attribute("torch.nn", "functional"));
  // The original tp_call slot, which looks up `__call__`.
  ternaryfunc call_slot = reinterpret_cast<PyTypeObject*>(type)->tp_call;
  std::vector<PyObject*> global_hooks;

  Base() {
    for (const char* name : {"_global_forward_hooks", "_global_forward_pre_hooks",
                             "_global_backward_hooks", "_global_backward_pre_hooks"}) {
      global_hooks.push_back(attribute("torch.nn.modules.module", name));
    }
  }

  static const Base& get() {
    static const auto* base = new Base();
    return *base;
  }

  // Whether nn.Module has its original `__call__`. FX's tracer replaces `__call__`.
  bool is_original() const {
    PyObject* dict = reinterpret_cast<PyTypeObject*>(type)->tp_dict;
    return PyDict_GetItemWithError(dict, kCall.object()) == call &&
           PyDict_GetItemWithError(dict, kCallImpl.object()) == call_impl;
  }

  // Whether there are no global module hooks and no torch function modes.
  bool is_quiet() const {
    if (at::impl::torch_function_mode_enabled()) return false;
    for (PyObject* hooks : global_hooks) {
      if (!PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 0) return false;
    }
    return true;
  }
};

struct LeafModule {
  const char* name;      // name of the class in torch.nn
  const char* function;  // function of torch.nn.functional that `forward` calls, or null
  Py_ssize_t most_inputs;
  Forward forward;
  bool takes_tensor = true;
  PyTypeObject* type = nullptr;
  PyObject* original_forward = nullptr;
  PyObject* original_function = nullptr;
  PyObject* function_name = nullptr;
  ternaryfunc original_call = nullptr;
  // The versions of the class and of torch.nn.functional's dict when runs_original() last returned
  // true.
  unsigned type_version = 0;
  uint64_t functions_version = 0;
};

LeafModule leaf_modules[] = {
    {"Linear", "linear", 1, linear},
    {"LSTMCell", nullptr, 2, lstm_cell},
    {"GRUCell", nullptr, 2, gru_cell},
    {"Embedding", "embedding", 1, embedding},
    {"LayerNorm", "layer_norm", 1, layer_norm},
    {"Dropout", "dropout", 1, dropout},
    {"GELU", "gelu", 1, gelu},
#define NN_MODULE(Class, op) {#Class, nullptr, 1, activation<at::_ops::op, false>},
#define NN_INPLACE_MODULE(Class, op) {#Class, #op, 1, activation<at::_ops::op, true>},
#define FUSED_ELEMENTWISE_OP(Name, op, reads, formula, gradient, forward, backward, into, ...) \
  __VA_ARGS__
#define ELEMENTWISE_OP(op, reads, forward, backward, into, ...) __VA_ARGS__
#include "autobatch/kernels/elementwise_ops.inc"
    {"Sequential", nullptr, 1, sequential, false},
};

// Returns the entry of this class. Returns null if the table has no entry for the class, even if
// the table has an entry for a base class.
LeafModule* leaf_of(PyTypeObject* type) {
  for (LeafModule& leaf : leaf_modules) {
    if (leaf.type == type) return &leaf;
  }
  return nullptr;
}

// Whether a call of the class runs PyTorch's own code. Each write to a class or to one of its base
// classes changes the version of the class. The version 0 means that the class has no version.
bool runs_original(LeafModule& leaf) {
  PyObject* functions = Base::get().functions;
  const uint64_t now = leaf.function != nullptr ? version_of(functions) : 1;
  if (leaf.type_version != 0 && leaf.type_version == leaf.type->tp_version_tag && now != 0 &&
      leaf.functions_version == now) {
    return true;
  }
  leaf.type_version = 0;
  if (leaf.function != nullptr &&
      PyDict_GetItemWithError(functions, leaf.function_name) != leaf.original_function) {
    return false;
  }
  PyObject* forward = PyDict_GetItemWithError(leaf.type->tp_dict, kForward.object());
  if (forward != leaf.original_forward || !Base::get().is_original()) return false;
  _PyType_Lookup(leaf.type, kForward.object());  // assigns a version to the class
  leaf.type_version = leaf.type->tp_version_tag;
  leaf.functions_version = now;
  return true;
}

bool is_plain_call(LeafModule& leaf, PyObject* args, PyObject* names) {
  if (names != nullptr && PyDict_GET_SIZE(names) != 0) return false;
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  if (count == 0 || count > leaf.most_inputs) return false;
  if (leaf.takes_tensor && !THPVariable_CheckExact(PyTuple_GET_ITEM(args, 0))) return false;
  return runs_original(leaf);
}

// The function in the tp_call slot of the leaf classes. Python code that looks up `__call__`
// (torch.compile, FX) still finds the method of nn.Module. When FX replaces nn.Module's `__call__`,
// Python resets the slot.
PyObject* call_leaf(PyObject* self, PyObject* args, PyObject* names) {
  try {
    if (!count_call()) return Base::get().call_slot(self, args, names);
    LeafModule* leaf = leaf_of(Py_TYPE(self));
    if (leaf != nullptr && is_plain_call(*leaf, args, names) && Base::get().is_quiet()) {
      const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(self, nullptr));
      Attributes attributes(dict.ptr(), leaf);
      if (attributes.is_plain()) {
        const Inputs in{&PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args)};
        PyObject* result = leaf->forward(attributes, in);
        if (result != nullptr) leaf_modules_switch.add_uses(1);
        if (result != nullptr || PyErr_Occurred() != nullptr) return result;
      }
    }
    return Base::get().call_slot(self, args, names);  // also runs for subclasses
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

void prepare(LeafModule& leaf) {
  PyObject* type = attribute("torch.nn", leaf.name);
  leaf.original_forward = PyObject_GetAttrString(type, "forward");
  if (leaf.function != nullptr) {
    leaf.original_function = attribute("torch.nn.functional", leaf.function);
    leaf.function_name = PyUnicode_InternFromString(leaf.function);
  }
  leaf.type = reinterpret_cast<PyTypeObject*>(type);
  leaf.original_call = leaf.type->tp_call;
}

// Whether the class uses nn.Module's `__call__`. The code that `__call__` runs is checked at each
// call (runs_original).
bool is_original(const LeafModule& leaf) {
  return leaf.type->tp_call == leaf.original_call &&
         PyDict_GetItemWithError(leaf.type->tp_dict, kCall.object()) == nullptr;
}

}  // namespace

void install_leaf_modules() {
  Base::get();
  for (LeafModule& leaf : leaf_modules) {
    if (leaf.type == nullptr) prepare(leaf);
    if (is_original(leaf)) leaf.type->tp_call = call_leaf;
  }
}

void remove_leaf_modules() {
  for (const LeafModule& leaf : leaf_modules) {
    if (leaf.type != nullptr && leaf.type->tp_call == call_leaf) {
      leaf.type->tp_call = leaf.original_call;
    }
  }
}

}  // namespace autobatch
