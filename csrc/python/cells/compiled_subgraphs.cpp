#include "python/cells/compiled_subgraphs.h"

#include "autobatch/subgraph/compiled_subgraph.h"

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

namespace py = pybind11;

namespace autobatch {
namespace {

// The metadata of a value.
struct Meta {
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  c10::Device device;
  bool requires_grad;
  ValueId value;
  bool is_weight = false;
  bool is_saved = false;  // whether eager mode's backward reads the value
};

// One step of a subgraph: an op or a view.
struct Step {
  std::string op;  // name of the op; empty for a view
  bool is_elementwise = false;
  NodeId node = 0;
  std::vector<int64_t> operands;  // value ids; -1: the operand is not given
  // For each operand: index of the argument. -1: the operand is an item of a list.
  std::vector<int64_t> places;
  std::vector<ValueId> results;
  std::vector<bool> requires_grad;  // whether each result requires grad
  std::vector<std::vector<int64_t>> sizes_of_results;
  // Geometry of a view. `from_strides` are the strides of its parent, and `offset` is relative to
  // the parent.
  std::vector<int64_t> sizes, strides, from_strides;
  int64_t offset = 0;
};

// The object through which the compiler in Python reads a subgraph.
class SubgraphView {
 public:
  explicit SubgraphView(std::shared_ptr<const Rule> rule) : rule_(std::move(rule)) {}

  std::vector<Meta> operands() const {
    std::vector<Meta> out;
    for (size_t i = 0; i < tape().graph_inputs.size(); ++i) {
      out.push_back(meta_of(tape().graph_inputs[i].value));
      out.back().is_weight = subgraph().is_weight[i] != 0;
      out.back().is_saved = subgraph().operand_saved[i] != 0;
    }
    return out;
  }

  std::vector<Meta> results() const {
    std::vector<Meta> out;
    for (const ValueId id : subgraph().results) out.push_back(meta_of(id));
    return out;
  }

  std::vector<Step> steps() const {
    std::vector<Step> out;
    for (ValueId id = 0; id < tape().values.size(); ++id) {
      const Value& value = tape().values[id];
      if (value.parent != kNone) {
        out.push_back(view(id));
      } else if (!value.is_graph_input() && id == tape().nodes[value.node].first_value) {
        out.push_back(call(value.node));
      }
    }
    return out;
  }

  // Runs the op of a node in the same way as eager mode, and returns the results of the op.
  std::vector<at::Tensor> run(NodeId id,
                              const std::vector<std::optional<at::Tensor>>& given) const {
    const Node& node = tape().nodes[id];
    std::vector<at::Tensor> operands, places;
    for (const auto& operand : given) operands.push_back(operand.value_or(at::Tensor()));
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const Value& value = tape().values[node.first_value + k];
      places.push_back(at::empty(value.geometry->sizes, at::device(at::kMeta).dtype(value.dtype)));
    }
    return node.signature->rule->eager(*node.signature, operands, places);
  }

  std::vector<at::Tensor> run_member(const std::vector<at::Tensor>& operands) const {
    return rule_->eager({}, operands, {});
  }

  // Returns the op's arguments. Tensors and lists of tensors are replaced by None.
  py::list arguments(NodeId id) const {
    py::list out;
    for (const c10::IValue& value : tape().nodes[id].signature->arguments) {
      out.append(value.isTensor() || value.isTensorList() ? py::none()
                                                          : torch::jit::toPyObject(value));
    }
    return out;
  }

  int closure(int reached) const { return closure_of(subgraph(), static_cast<uint8_t>(reached)); }

  std::string names() const {
    std::string out;
    for (const Node& node : tape().nodes) {
      out += (out.empty() ? "" : ", ") + node.signature->op->name.substr(6);
    }
    return out;
  }

 private:
  const Subgraph& subgraph() const { return *rule_->subgraph(); }
  const Tape& tape() const { return subgraph().tape; }

  Meta meta_of(ValueId id) const {
    const Value& value = tape().values[id];
    const Geometry& g = *value.geometry;
    return {g.sizes, g.strides, value.dtype, value.device, value.requires_grad, id};
  }

  Step view(ValueId id) const {
    const Value& value = tape().values[id];
    const Value& parent = tape().values[value.parent];
    Step step;
    step.operands = {value.parent};
    step.results = {id};
    step.requires_grad = {value.requires_grad};
    step.sizes = value.geometry->sizes;
    step.strides = value.geometry->strides;
    step.from_strides = parent.geometry->strides;
    step.offset = value.offset - parent.offset;
    return step;
  }

  Step call(NodeId id) const {
    const Node& node = tape().nodes[id];
    const Signature& signature = *node.signature;
    Step step;
    step.op = signature.op->name;
    step.is_elementwise = signature.op->handle.hasTag(at::Tag::pointwise);
    step.node = id;
    for (const ValueId operand : tape().operands_of(node)) {
      step.operands.push_back(operand == kNone ? -1 : static_cast<int64_t>(operand));
    }
    for (const Slot& slot : signature.slots) {
      step.places.push_back(slot.element == kNone ? slot.argument : -1);
    }
    for (uint32_t k = 0; k < node.num_values; ++k) {
      step.results.push_back(node.first_value + k);
      step.requires_grad.push_back(tape().values[node.first_value + k].requires_grad);
      step.sizes_of_results.push_back(tape().values[node.first_value + k].geometry->sizes);
    }
    return step;
  }

  std::shared_ptr<const Rule> rule_;
};

// The compiled code of a subgraph, which is a Python object of torch_autobatch._compiled.
class PythonCode final : public CompiledSubgraph {
 public:
  explicit PythonCode(py::object code) : code_(std::move(code)) {}
  ~PythonCode() override {
    if (Py_IsInitialized() == 0) {
      code_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    code_ = {};
  }

  bool runs(int64_t members) const override {
    const py::gil_scoped_acquire gil;
    return code_.attr("runs")(members).cast<bool>();
  }

  std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> operands, Saved& saved) override {
    const py::gil_scoped_acquire gil;
    py::list given;
    for (const at::Tensor& operand : operands) given.append(operand);
    const py::tuple out = code_.attr("forward")(given);
    saved.tensors = out[1].cast<std::vector<at::Tensor>>();
    saved.stacked = out[2].cast<std::vector<uint8_t>>();
    return out[0].cast<std::vector<at::Tensor>>();
  }

  std::vector<Gradient> backward(uint8_t reached, const Saved& saved,
                                 at::ArrayRef<at::Tensor> gradients) override {
    const py::gil_scoped_acquire gil;
    py::list given, tensors;
    for (const at::Tensor& t : saved.tensors) tensors.append(t);
    for (const at::Tensor& t : gradients) given.append(t);
    const py::list found = code_.attr("backward")(static_cast<int>(reached), tensors, given);
    std::vector<Gradient> out;
    for (const py::handle item : found) {
      const auto part = py::reinterpret_borrow<py::tuple>(item);
      const auto tensor = [&](size_t i) {
        return part[i].is_none() ? at::Tensor() : part[i].cast<at::Tensor>();
      };
      out.push_back({static_cast<Gradient::Kind>(part[0].cast<int>()), part[1].cast<size_t>(),
                     tensor(2), tensor(3), part[4].cast<int64_t>()});
    }
    return out;
  }

 private:
  py::object code_;
};

std::unique_ptr<CompiledSubgraph> compile(const std::shared_ptr<const Rule>& plain,
                                          at::ArrayRef<at::Tensor> operands) {
  const py::gil_scoped_acquire gil;
  py::list given;
  for (const at::Tensor& operand : operands) given.append(operand);
  const py::object made = py::module_::import("torch_autobatch._compiled")
                              .attr("compile_body")(SubgraphView(plain), given);
  if (made.is_none()) return nullptr;
  return std::make_unique<PythonCode>(made);
}

}  // namespace

void bind_compiled_subgraphs(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module_>(module);
  py::class_<Meta>(m, "BodyValue")
      .def_readonly("sizes", &Meta::sizes)
      .def_readonly("strides", &Meta::strides)
      .def_property_readonly("dtype", [](const Meta& meta) { return py::cast(meta.dtype); })
      .def_property_readonly("device", [](const Meta& meta) { return py::cast(meta.device); })
      .def_readonly("requires_grad", &Meta::requires_grad)
      .def_readonly("value", &Meta::value)
      .def_readonly("is_weight", &Meta::is_weight)
      .def_readonly("is_saved", &Meta::is_saved);
  py::class_<Step>(m, "BodyStep")
      .def_readonly("op", &Step::op)
      .def_readonly("is_elementwise", &Step::is_elementwise)
      .def_readonly("node", &Step::node)
      .def_readonly("operands", &Step::operands)
      .def_readonly("places", &Step::places)
      .def_readonly("results", &Step::results)
      .def_readonly("requires_grad", &Step::requires_grad)
      .def_readonly("sizes_of_results", &Step::sizes_of_results)
      .def_readonly("sizes", &Step::sizes)
      .def_readonly("strides", &Step::strides)
      .def_readonly("from_strides", &Step::from_strides)
      .def_readonly("offset", &Step::offset);
  py::class_<SubgraphView>(m, "Body")
      .def_property_readonly("operands", &SubgraphView::operands)
      .def_property_readonly("results", &SubgraphView::results)
      .def_property_readonly("steps", &SubgraphView::steps)
      .def("run", &SubgraphView::run)
      .def("run_member", &SubgraphView::run_member)
      .def("arguments", &SubgraphView::arguments)
      .def("closure", &SubgraphView::closure)
      .def("names", &SubgraphView::names);
  set_subgraph_compiler(compile);
}

}  // namespace autobatch
