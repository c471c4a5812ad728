// The rules of factory ops, which fill new memory, and of the ops that represent deferred writes
// (deferred_writes.h) and new leaves.
#include "autobatch/rules/factories.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/rules/complex_views.h"
#include "autobatch/rules/decompositions.h"
#include "autobatch/rules/rule.h"

#include <ATen/ATen.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

namespace autobatch {
namespace {

using at::Tensor;

// The rule of `zeros(size)`, `ones_like(self)`, `new_full(self, size, fill_value)` and similar ops.
// The last arguments of these ops are dtype, layout, device, pin_memory and, for some ops,
// memory_format. `empty` returns zeros.
class FactoryRule final : public Rule {
 public:
  enum Form : uint8_t { kSize, kLike, kNew };
  FactoryRule(Form form, double fill) : form_(form), fill_(fill) {}
  explicit FactoryRule(Form form) : form_(form), has_fill_argument_(true) {}

  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const size_t options = num_leading();
    if (form_ != kSize && !builder.is_tensor(0)) return false;
    if (!is_plain(builder, options)) return false;
    const c10::IValue& device_argument = builder.argument(options + 2);
    c10::Device device = form_ == kSize ? c10::Device(c10::kCPU) : builder.tensor(0).device();
    if (!device_argument.isNone()) device = device_argument.toDevice();
    if (!place(builder, device)) return false;
    at::DimVector sizes;
    if (form_ == kLike) {
      sizes = builder.tensor(0).sizes();
    } else {
      const c10::IValue& given = builder.argument(form_ == kSize ? 0 : 1);
      if (!given.isIntList()) return false;
      for (int64_t size : given.toIntVector()) sizes.push_back(size);
    }
    for (int64_t size : sizes) {
      if (size < 0) return false;
    }
    // An empty tensor has no elements to fill. The code that creates an empty tensor may replace
    // the tensor's memory without a dispatched op, as TorchScript's unpickler does.
    if (c10::multiply_integers(sizes) == 0) return false;
    const c10::ScalarType dtype = dtype_of(builder, options);
    if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype) &&
        !c10::isIntegralType(dtype, true)) {
      return false;
    }
    builder.on_device(device);
    builder.key(static_cast<uint64_t>(dtype) << 16 | static_cast<uint64_t>(device.type()) << 8 |
                static_cast<uint8_t>(device.index()));
    if (has_fill_argument_ && !builder.constant(options - 1)) return false;
    builder.result(sizes, dtype);
    return true;
  }

  // Sets the device of the result. Returns false if this library does not manage the memory of the
  // device. `device="cuda"` becomes the current device at capture.
  static bool place(NodeBuilder& builder, c10::Device& device) {
    if (has_host_memory(device)) return true;
    if (device.type() != accelerator()) return false;
    if (device.has_index()) return true;
    const c10::impl::VirtualGuardImpl runtime(device.type());
    if (runtime.deviceCount() != 1) builder.do_not_cache();
    device = runtime.getDevice();
    return true;
  }

  void forward(Batch& batch) const override { batch.output(0).fill_(fill_of(batch.signature())); }
  void backward(BackwardBatch&) const override {}

  // The signature does not contain the sizes, so the sizes are read from `places`.
  std::vector<Tensor> eager(const Signature& signature, at::ArrayRef<Tensor>,
                            at::ArrayRef<Tensor> places) const override {
    return {at::full_like(places[0], fill_of(signature))};
  }

  at::Scalar fill_of(const Signature& signature) const {
    return has_fill_argument_ ? signature.arguments[num_leading() - 1].toScalar()
                              : at::Scalar(fill_);
  }

 private:
  // The number of arguments before the options.
  size_t num_leading() const { return (form_ == kNew ? 2u : 1u) + (has_fill_argument_ ? 1u : 0u); }

  // Whether the result is strided, row-major and not pinned.
  bool is_plain(const NodeBuilder& builder, size_t options) const {
    const auto none = [&](size_t i) {
      return i >= builder.num_arguments() || builder.argument(i).isNone();
    };
    if (!none(options + 1) && builder.argument(options + 1).toLayout() != c10::kStrided)
      return false;
    if (!none(options + 3) && builder.argument(options + 3).toBool()) return false;
    const auto format = none(options + 4) ? c10::MemoryFormat::Preserve
                                          : builder.argument(options + 4).toMemoryFormat();
    if (format == c10::MemoryFormat::Contiguous) return true;
    if (format != c10::MemoryFormat::Preserve) return false;
    return form_ != kLike || is_row_major_like(builder.tensor(0));
  }

  // Whether the result of `empty_like(self)` is row-major.
  static bool is_row_major_like(const Tensor& self) {
    if (self.is_contiguous()) return true;
    if (self.is_non_overlapping_and_dense()) return false;
    const auto strides = at::infer_dense_strides(self.sizes(), self.strides());
    return at::IntArrayRef(strides) == c10::contiguous_strides(self.sizes());
  }

  c10::ScalarType dtype_of(const NodeBuilder& builder, size_t options) const {
    if (!builder.argument(options).isNone()) return builder.argument(options).toScalarType();
    if (form_ != kSize) return builder.tensor(0).scalar_type();
    const auto by_default = c10::get_default_dtype_as_scalartype();
    if (!has_fill_argument_) return by_default;
    const at::Scalar fill = builder.argument(options - 1).toScalar();
    if (fill.isBoolean()) return c10::kBool;
    if (fill.isIntegral(false)) return c10::kLong;
    return fill.isComplex() ? c10::toComplexType(by_default) : by_default;
  }

  Form form_;
  bool has_fill_argument_ = false;
  double fill_ = 0;
};

// Returns a copy of `self` with the same strides.
Tensor copy_of(const Tensor& self) {
  return at::empty_strided(self.sizes(), self.strides(), self.options()).copy_(self);
}

Tensor assemble(const Tensor& self, at::TensorList places, at::TensorList pieces) {
  const Tensor out = copy_of(self);
  for (size_t e = 0; e < places.size(); ++e) {
    const int64_t offset = places[e].storage_offset() - self.storage_offset();
    out.as_strided(places[e].sizes(), places[e].strides(), offset).copy_(pieces[e]);
  }
  return out;
}

// Copies operand `slot` of each member to result 0. Returns the regions of the results.
Regions copy_to_results(const Batch& batch, size_t slot) {
  Regions from, to;
  for (int64_t m = 0; m < batch.size(); ++m) {
    from.push_back(batch.operand_region(m, slot));
    to.push_back(batch.result_region(m, 0));
  }
  copy_regions(from, to);
  return to;
}

// assemble(self, places, pieces) returns a copy of `self` in which each piece is written to its
// place. A place is a view of `self`. Places do not overlap. The signature contains no shapes.
class AssembleRule final : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value self = builder.operand(0);
    builder.key(dtype_word(self));
    const size_t form = builder.key().size();
    const size_t count = builder.argument(1).toListRef().size();
    for (size_t list = 1; list <= 2; ++list) {
      for (size_t e = 0; e < count; ++e) builder.operand(list, e);
    }
    builder.truncate_key(form);  // the number of places and pieces is not part of the key
    builder.result(self.geometry, self.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    const Regions to = copy_to_results(batch, 0);
    Regions pieces, places;
    for (int64_t m = 0; m < batch.size(); ++m) {
      for (size_t e = 0; e < count(batch, m); ++e) {
        pieces.push_back(batch.region(m, piece(batch, m, e)));
        places.push_back(place(batch, m, e, to[m]));
      }
    }
    copy_regions(pieces, places);
  }

  void backward(BackwardBatch& batch) const override {
    Regions from, to;
    for (int64_t m = 0; m < batch.size(); ++m) {
      for (size_t e = 0; e < count(batch, m); ++e) {
        if (!batch.wanted(piece(batch, m, e))) continue;
        from.push_back(place(batch, m, e, batch.grad_region(m, 0)));
        to.push_back(batch.target(m, piece(batch, m, e)));
      }
    }
    add_regions(from, to);
    if (batch.needs(0)) add_what_was_kept(batch);
  }

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    const size_t count = (operands.size() - 1) / 2;
    return {assemble(operands[0], operands.slice(1, count), operands.slice(1 + count, count))};
  }

 private:
  static size_t count(const BatchView& batch, int64_t m) {
    return (batch.node(m).num_operands - 1) / 2;
  }
  static ValueId piece(const BatchView& batch, int64_t m, size_t e) {
    return batch.operand(m, 1 + count(batch, m) + e);
  }
  // Returns the region of place `e` within `whole`. `whole` is the region of the result or of its
  // gradient.
  static Region place(const BatchView& batch, int64_t m, size_t e, const Region& whole) {
    const Value& place = batch.operand_value(m, 1 + e);
    const int64_t offset = place.offset - batch.operand_value(m, 0).offset;
    return {whole.buffer, whole.offset + offset, place.geometry};
  }

  // Adds the gradient of `self`, which is the gradient of the result with zeros in the places of
  // the pieces.
  static void add_what_was_kept(BackwardBatch& batch) {
    GeometryTable geometries;
    Regions from, to, zeros, places;
    int64_t length = 0;
    for (int64_t m = 0; m < batch.size(); ++m) length += batch.result_value(m, 0).geometry->extent;
    const auto options = batch.grad_region(0, 0).buffer->options();
    const Tensor kept = at::empty({length}, options);
    const Tensor zero = at::zeros({1}, options);
    int64_t start = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Region whole = batch.grad_region(m, 0);
      from.push_back(whole);
      to.push_back({&kept, start, whole.geometry});
      start += whole.geometry->extent;
      for (size_t e = 0; e < count(batch, m); ++e) {
        places.push_back(place(batch, m, e, to.back()));
        const auto& sizes = places.back().geometry->sizes;
        zeros.push_back({&zero, 0, geometries.intern(sizes, at::DimVector(sizes.size(), 0))});
      }
    }
    copy_regions(from, to);
    copy_regions(zeros, places);
    Regions targets, wanted;
    for (int64_t m = 0; m < batch.size(); ++m) {
      if (!batch.wanted(batch.operand(m, 0))) continue;
      wanted.push_back(to[m]);
      targets.push_back(batch.target(m, batch.operand(m, 0)));
    }
    add_regions(wanted, targets);
  }
};

Tensor with_values(const Tensor& self, const Tensor& values) {
  const Tensor out = copy_of(self);
  const at::NoGradGuard no_grad;
  out.copy_(values);
  return out;
}

// with_values(self, values) returns a tensor with the history of `self` and the given values. The
// op represents a write to `self` in torch.no_grad(), which changes the values of `self` but not
// its history. The gradient of the result is the gradient of `self`.
class WithValuesRule final : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value self = builder.operand(0);
    const size_t form = builder.key().size();
    builder.operand(1);
    builder.truncate_key(form);
    builder.key(dtype_word(self));
    builder.result(self.geometry, self.dtype);
    return true;
  }

  void forward(Batch& batch) const override { copy_to_results(batch, 1); }

  void backward(BackwardBatch& batch) const override {
    Regions from, to;
    for (int64_t m = 0; m < batch.size(); ++m) {
      if (!batch.wanted(batch.operand(m, 0))) continue;
      from.push_back(batch.grad_region(m, 0));
      to.push_back(batch.target_to_add(m, batch.operand(m, 0)));
    }
    add_regions(from, to);
  }

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    return {with_values(operands[0], operands[1])};
  }
};

// leaf(self) returns a copy of `self`. The capture of the op makes the result require grad
// (capture/new_leaves.h). `self` gets no gradient.
class LeafRule final : public Rule {
 public:
  bool saves() const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    const Value self = builder.operand(0);
    builder.key(dtype_word(self));
    builder.require_grad();
    builder.result(self.geometry, self.dtype);
    return true;
  }

  void forward(Batch& batch) const override { copy_to_results(batch, 0); }
  void backward(BackwardBatch&) const override {}

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    return {copy_of(operands[0])};
  }
};

}  // namespace

bool is_leaf(const Tape& tape, ValueId id) {
  const Value& value = tape.values[id];
  return !value.is_graph_input() && value.parent == kNone &&
         dynamic_cast<const LeafRule*>(tape.nodes[value.node].signature->rule) != nullptr;
}

RuleTable memory_rules() {
  using F = FactoryRule;
  return {{"aten::zeros", new F(F::kSize, 0)},
          {"aten::ones", new F(F::kSize, 1)},
          {"aten::empty.memory_format", new F(F::kSize, 0)},
          {"aten::full", new F(F::kSize)},
          {"aten::zeros_like", new F(F::kLike, 0)},
          {"aten::ones_like", new F(F::kLike, 1)},
          {"aten::empty_like", new F(F::kLike, 0)},
          {"aten::full_like", new F(F::kLike)},
          {"aten::new_zeros", new F(F::kNew, 0)},
          {"aten::new_ones", new F(F::kNew, 1)},
          {"aten::new_empty", new F(F::kNew, 0)},
          {"aten::new_full", new F(F::kNew)},
          {"autobatch::assemble", new AssembleRule()},
          {"autobatch::with_values", new WithValuesRule()},
          {"autobatch::leaf", new LeafRule()}};
}

bool is_factory(const Signature& signature) {
  return dynamic_cast<const FactoryRule*>(signature.rule) != nullptr;
}

at::Tensor create_alone(const Signature& signature, const Value& value) {
  const auto& rule = static_cast<const FactoryRule&>(*signature.rule);
  const Geometry& g = *value.geometry;
  const auto options = value.options();
  return at::empty_strided(g.sizes, g.strides, options).fill_(rule.fill_of(signature));
}

// Only the rule of a cell's subgraph runs the subgraph. This op is never called.
static std::vector<Tensor> cell_alone(at::TensorList) {
  TORCH_CHECK(false,
              "autobatch::cell is an internal op of batch() blocks, and can't be called directly");
}

void register_memory_ops() {
  static torch::Library* library = [] {
    auto* lib =
        new torch::Library(torch::Library::FRAGMENT, "autobatch", std::nullopt, __FILE__, __LINE__);
    lib->def("assemble(Tensor self, Tensor[] places, Tensor[] pieces) -> Tensor", &assemble);
    lib->def("with_values(Tensor self, Tensor values) -> Tensor", &with_values);
    lib->def("leaf(Tensor self) -> Tensor", &copy_of);
    lib->def("sparse_product(Tensor indices, Tensor values, Tensor x, int size) -> Tensor",
             &sparse_product);
    lib->def("memory_view(Tensor(a) self, int[] size, int[] stride) -> Tensor(a)", &memory_view);
    lib->def("as_complex(Tensor(a) self) -> Tensor(a)", &as_complex);
    lib->def("as_real(Tensor(a) self) -> Tensor(a)", &as_real);
    lib->def("conjugate(Tensor(a) self) -> Tensor(a)", &conjugate);
    lib->def("cell(Tensor[] inputs) -> Tensor[]", &cell_alone);
    return lib;
  }();
  (void)library;
}

}  // namespace autobatch
