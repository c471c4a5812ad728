// Elementwise ops with gradient formulas, for instances of any length. The arguments are one tensor
// (elementwise_ops.inc), two tensors, or a tensor and a number. For other elementwise ops, see
// elementwise_by_tag.cpp.
#include "autobatch/rules/elementwise_layout.h"
#include "autobatch/rules/rowwise.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <cmath>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = std::vector<c10::IValue>;

// Returns a word of the key that contains the dtype and the rank of x. Values of different ranks
// ([T, d] and [d]) could share a batch, but they occur at different points of a model. If values of
// different ranks had one signature, the policy `agenda` would compute one mean depth for ops at
// different points of the model.
uint64_t elementwise_word(const Value& x) {
  return dtype_word(x) << 8 | static_cast<uint64_t>(x.geometry->dim());
}

// Returns the geometry of the result, or null if eager must run the call.
const Geometry* layout_of(NodeBuilder& builder, at::ArrayRef<const Geometry*> operands,
                          bool has_number) {
  if (operands.size() == 1 && operands[0]->canonical->contiguous) return operands[0]->canonical;
  return elementwise_result(builder.graph().geometries(), operands, has_number);
}

// --- one tensor argument ---

// The values that the gradient is computed from.
enum class Saves : uint8_t { kNothing, kOperand, kResult };

struct Unary {
  const char* op;
  Tensor& (*forward)(Tensor& out, const Tensor& x, const Arguments& args);
  // Returns the gradient of x, given g (the gradient of the result), x and y (the result).
  Tensor (*backward)(const Tensor& g, const Tensor& x, const Tensor& y, const Arguments& args);
  Saves saves = Saves::kOperand;
  // Writes the gradient of x to `o`. Null if ATen has no kernel that writes this gradient.
  void (*backward_into)(Tensor& o, const Tensor& g, const Tensor& x, const Tensor& y) = nullptr;
  // Returns the op as a step of an elementwise program. Null if the op cannot be a step.
  ElementwiseOp (*step)(const Arguments& args) = nullptr;
};

class UnaryRule final : public Rule {
 public:
  explicit UnaryRule(const Unary& entry) : entry_(entry) {}

  std::optional<ElementwiseOp> elementwise(const Signature& signature) const override {
    if (entry_.step == nullptr) return {};
    return entry_.step(signature.arguments);
  }

  bool saves() const override { return entry_.saves != Saves::kNothing; }
  bool reads(size_t) const override { return entry_.saves == Saves::kOperand; }
  bool reads_result(uint32_t) const override { return entry_.saves == Saves::kResult; }

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    if (!is_float(x)) return false;
    const Geometry* result = layout(builder, x);
    if (result == nullptr) return false;
    builder.key(elementwise_word(x));
    for (size_t i = 1; i < builder.num_arguments(); ++i) {
      // A complex number makes the result complex.
      const c10::IValue& argument = builder.argument(i);
      if (builder.is_tensor(i) || argument.isComplexDouble() || !builder.constant(i)) return false;
    }
    builder.result(result, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    Tensor out = batch.uniform_result(0) ? batch.output_stacked(0) : batch.output(0);
    entry_.forward(out, elements(batch, 0), batch.signature().arguments);
  }

  void backward(BackwardBatch& batch) const override {
    const Tensor g = elements_of_gradients(batch);
    Tensor x, y;  // undefined if not needed, because the values may be freed
    if (entry_.saves == Saves::kOperand) x = elements(batch, 0);
    if (entry_.saves == Saves::kResult) y = elements_of_results(batch);
    if (entry_.backward_into != nullptr) {
      if (Tensor to = batch.fresh(0); to.defined()) return entry_.backward_into(to, g, x, y);
    }
    Tensor own = entry_.backward(g, x, y, batch.signature().arguments);
    add_elements(batch, 0, g, std::move(own));
  }

 private:
  const Geometry* layout(NodeBuilder& builder, const Value& x) const {
    if (builder.op().name == "aten::clone") return layout_of_clone(builder, x);
    // If the operand of log_sigmoid is not row-major, eager first makes a contiguous copy of it.
    if (builder.op().name == "aten::log_sigmoid" && !row_major(x)) return nullptr;
    const Geometry* given = given_geometry(builder.graph().tape(), x);
    return layout_of(builder, {given}, /*has_number=*/builder.num_arguments() > 1);
  }

  // Returns null if the call makes a row-major copy of an operand that is not row-major.
  // ContiguousRule covers these calls.
  static const Geometry* layout_of_clone(NodeBuilder& builder, const Value& x) {
    const c10::IValue& format = builder.argument(1);
    GeometryTable& table = builder.graph().geometries();
    switch (format.isNone() ? at::MemoryFormat::Preserve : format.toMemoryFormat()) {
      case at::MemoryFormat::Contiguous:
        return row_major(x) ? x.geometry->canonical : nullptr;
      case at::MemoryFormat::Preserve:
        return row_major(x) ? x.geometry->canonical : preserved_layout(table, *x.geometry);
      case at::MemoryFormat::ChannelsLast:
        return channels_last(table, x.geometry->sizes);
      default:
        return nullptr;
    }
  }

  const Unary& entry_;
};

#define FORWARD(expression)                                       \
  [](Tensor& o, const Tensor& x, const Arguments& a) -> Tensor& { \
    (void)a;                                                      \
    return expression;                                            \
  }
#define GRADIENT(expression)                                                            \
  [](const Tensor& g, const Tensor& x, const Tensor& y, const Arguments& a) -> Tensor { \
    (void)g, (void)x, (void)y, (void)a;                                                 \
    return expression;                                                                  \
  }

#define STEP(...)                           \
  [](const Arguments& a) -> ElementwiseOp { \
    (void)a;                                \
    return ElementwiseOp{__VA_ARGS__};      \
  }

#define INTO(expression)                                                     \
  [](Tensor& o, const Tensor& g, const Tensor& x, const Tensor& y) -> void { \
    (void)x, (void)y;                                                        \
    expression;                                                              \
  }

double real(const c10::IValue& number) { return number.toScalar().toDouble(); }

const Unary kUnary[] = {
#define FUSED_ELEMENTWISE_OP(Name, op, reads, formula, gradient, forward, backward, into, ...) \
  {"aten::" #op,                                                                               \
   FORWARD(forward),                                                                           \
   GRADIENT(backward),                                                                         \
   Saves::reads,                                                                               \
   into,                                                                                       \
   STEP(ElementwiseCode::k##Name)},
#define ELEMENTWISE_OP(op, reads, forward, backward, into, ...) \
  {"aten::" #op, FORWARD(forward), GRADIENT(backward), Saves::reads, into},
#include "autobatch/kernels/elementwise_ops.inc"
    {"aten::neg", FORWARD(at::neg_out(o, x)), GRADIENT(g.neg()), Saves::kNothing, nullptr,
     STEP(ElementwiseCode::kNeg)},
    {"aten::clone", FORWARD(o.copy_(x)), GRADIENT(g), Saves::kNothing, nullptr,
     STEP(ElementwiseCode::kCopy)},
};

// --- two tensor arguments, with broadcasting ---

enum class Side : uint8_t { kLeft, kRight };

struct Binary {
  const char* op;
  Tensor& (*forward)(Tensor& out, const Tensor& x, const Tensor& y, const Arguments& args);
  // Returns the gradient of one operand. The gradient has the shape of the result.
  Tensor (*backward)(Side side, const Tensor& g, const Tensor& x, const Tensor& y,
                     const Arguments& args);
  bool saves = true;
  // Writes the gradient of one side to `o`. Used if no operand is broadcast. Null if ATen has no
  // kernel that writes this gradient.
  void (*backward_into)(Side side, Tensor& o, const Tensor& g, const Tensor& x,
                        const Tensor& y) = nullptr;
  // Returns the op as a step of an elementwise program. The step is kMul, kDiv or kAdd. The scale
  // of kAdd is the factor of the right side. Null if the op cannot be a step.
  ElementwiseOp (*step)(const Arguments& args) = nullptr;
};

// Sums `g` over the broadcast dimensions, so that its shape becomes `sizes`.
Tensor reduced_to(const Tensor& g, at::IntArrayRef sizes) {
  return g.sizes() == sizes ? g : at::sum_to(g, sizes);
}

class BinaryRule final : public Rule {
 public:
  explicit BinaryRule(const Binary& entry) : entry_(entry) {}

  std::optional<ElementwiseOp> elementwise(const Signature& signature) const override {
    if (entry_.step == nullptr) return {};
    const Arguments& args = signature.arguments;
    const ElementwiseOp op = entry_.step(args);
    // If an argument of the signature is a tensor, it is a Python number that PyTorch has wrapped
    // in a tensor.
    const bool left = args[0].isTensor(), right = args[1].isTensor();
    if (!left && !right) return op;
    const double number = args[left ? 0 : 1].toTensor().item().toDouble();
    if (op.code == ElementwiseCode::kMul) return ElementwiseOp{ElementwiseCode::kMulNumber, number};
    if (op.code == ElementwiseCode::kDiv) {
      if (left) return {};
      return ElementwiseOp{ElementwiseCode::kDivNumber, number};
    }
    if (left) return ElementwiseOp{ElementwiseCode::kAddNumber, number, op.scale};
    if (std::abs(op.scale) != 1) return {};  // scale * number would be rounded differently
    return ElementwiseOp{ElementwiseCode::kAddNumber, op.scale * number};
  }

  bool saves() const override { return entry_.saves; }
  bool reads_result(uint32_t) const override { return false; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(0) || !builder.is_tensor(1)) return false;
    for (size_t i = 0; i < 2; ++i) {
      if (builder.tensor(i).unsafeGetTensorImpl()->is_wrapped_number()) return number(builder, i);
    }
    const Value x = builder.operand(0);
    const Value y = builder.operand(1);
    if (x.dtype != y.dtype || x.device != y.device || !is_float(x)) return false;
    if (!constants(builder, 2)) return false;
    builder.key(elementwise_word(x));
    const Geometry* a = x.geometry->canonical;
    const Geometry* b = y.geometry->canonical;
    if (a == b && a->contiguous) {
      add_spread_key(builder, Spread::kElements, {a, b}, a->sizes);
      builder.result(a, x.dtype);
      return true;
    }
    // If the operands do not broadcast, eager raises the error.
    const Tape& tape = builder.graph().tape();
    const Geometry* result = layout_of(builder, {given_geometry(tape, x), given_geometry(tape, y)},
                                       /*has_number=*/false);
    if (result == nullptr) return false;
    add_spread_key(builder, spread_of({a, b}, result->sizes, result->contiguous), {a, b},
                   result->sizes);
    builder.result(result, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    if (batch.num_operands() == 1) return forward_number(batch);
    const Sides s = sides(batch);
    Tensor out = s.form == Form::kStacked ? batch.output_stacked(0) : batch.output(0);
    if (s.form == Form::kRows) out = out.view(at::infer_size(s.x.sizes(), s.y.sizes()));
    entry_.forward(out, s.x, s.y, batch.signature().arguments);
  }

  void backward(BackwardBatch& batch) const override {
    if (batch.num_operands() == 1) return backward_number(batch);
    const Sides s = entry_.saves ? sides(batch) : shapes(batch);
    Tensor g = s.form == Form::kStacked    ? batch.grad_stacked(0)
               : s.form == Form::kExpanded ? gradients_in_order(batch)
                                           : batch.grad_flat(0);
    if (s.form == Form::kRows) g = g.view(at::infer_size(s.x.sizes(), s.y.sizes()));
    const Arguments& args = batch.signature().arguments;
    const int64_t rank = batch.result_value(0, 0).geometry->dim();
    const auto add = [&](Side side, size_t slot, const Tensor& as, bool single) {
      if (!batch.needs(slot)) return;
      const bool as_it_is = s.form == Form::kStacked && !single && as.sizes() == g.sizes();
      if (as_it_is && entry_.backward_into != nullptr && rank_of(batch, slot) == rank) {
        if (Tensor to = batch.fresh(slot); to.defined()) {
          return entry_.backward_into(side, to, g, s.x, s.y);
        }
      }
      Tensor gradient = entry_.backward(side, g, s.x, s.y, args);
      if (s.form == Form::kElements) return batch.add_repeated(slot, gradient);
      if (s.form == Form::kExpanded) return add_expanded(batch, slot, gradient);
      if (as_it_is && gradient.is_same(g)) return batch.pass_on(slot, gradient);
      if (as_it_is) return batch.add(slot, std::move(gradient));
      const Tensor own = reduced_to(gradient, as.sizes());
      if (s.form == Form::kRows) return add_spread_rows(batch, slot, own);
      single ? batch.add_single(slot, own) : batch.add(slot, own);
    };
    add(Side::kLeft, 0, s.x, s.single_x);
    add(Side::kRight, 1, s.y, s.single_y);
  }

 private:
  enum class Form : uint8_t {
    kStacked,  // instances of one shape; the other forms are explained at Spread
    kElements,
    kRows,
    kExpanded,
  };

  static int64_t rank_of(const BatchView& batch, size_t slot) {
    return batch.operand_value(0, slot).geometry->dim();
  }

  // The two operands, reshaped so that they broadcast to the shape of the results of all instances.
  struct Sides {
    Tensor x, y;
    Form form = Form::kStacked;
    bool single_x = false, single_y = false;  // whether all instances use one tensor
  };

  static Sides form_of(BatchView& batch) {
    Sides s;
    if (!batch.uniform_result(0) || !batch.uniform(0) || !batch.uniform(1)) {
      const Geometry* a = batch.operand_value(0, 0).geometry;
      const Geometry* b = batch.operand_value(0, 1).geometry;
      const Spread spread = spread_in(batch, {a, b}, batch.result_value(0, 0).geometry->contiguous);
      s.form = spread == Spread::kRows       ? Form::kRows
               : spread == Spread::kElements ? Form::kElements
                                             : Form::kExpanded;
    } else {
      s.single_x = batch.size() > 1 && batch.shared(0);
      s.single_y = batch.size() > 1 && batch.shared(1) && !s.single_x;
    }
    return s;
  }

  static Sides sides(BatchView& batch) {
    Sides s = form_of(batch);
    const int64_t rank = batch.result_value(0, 0).geometry->dim();
    const auto side = [&](size_t slot, bool single) {
      if (s.form == Form::kElements) return batch.flat_repeated(slot);
      if (s.form == Form::kExpanded) return expanded(batch, slot);
      if (s.form == Form::kRows) return spread_rows(batch, slot);
      return single ? batch.single(slot) : aligned(batch, slot, rank);
    };
    s.x = side(0, s.single_x);
    s.y = side(1, s.single_y);
    return s;
  }

  // Like `sides`, but only the shapes of the returned tensors are correct, and the values are
  // arbitrary. Used for ops whose gradients read no operand.
  static Sides shapes(BackwardBatch& batch) {
    Sides s = form_of(batch);
    if (s.form == Form::kElements || s.form == Form::kExpanded) return s;
    const int64_t rank = batch.result_value(0, 0).geometry->dim();
    const Tensor none = at::empty({1}, batch.grad_flat(0).options());
    const auto shape = [&](size_t slot, bool single) {
      at::DimVector sizes;
      if (s.form == Form::kRows) {
        sizes = spread_sizes(batch, slot);
      } else {
        const auto& each = batch.operand_value(0, slot).geometry->sizes;
        if (!single) {
          sizes.push_back(batch.size());
          sizes.resize(static_cast<size_t>(rank + 1) - each.size(), 1);
        }
        sizes.append(each.begin(), each.end());
      }
      return none.view(at::DimVector(sizes.size(), 1)).expand(sizes);
    };
    s.x = shape(0, s.single_x);
    s.y = shape(1, s.single_y);
    return s;
  }

  // Returns the stacked operand, [n, 1.., *sizes]. The dimensions of size 1 are added to reach the
  // result's rank.
  static Tensor aligned(BatchView& batch, size_t slot, int64_t rank) {
    Tensor t = batch.stacked(slot);
    while (t.dim() < rank + 1) t = t.unsqueeze(1);
    return t;
  }

  // --- one side is a Python number, which is a constant of the signature ---

  static bool constants(NodeBuilder& builder, size_t from) {
    for (size_t i = from; i < builder.num_arguments(); ++i) {
      if (!builder.constant(i)) return false;
    }
    return true;
  }

  static bool number(NodeBuilder& builder, size_t i) {
    if (builder.tensor(1 - i).unsafeGetTensorImpl()->is_wrapped_number()) return false;
    const at::ScalarType type = builder.tensor(i).scalar_type();
    builder.python_number(i);
    const Value x = builder.operand(1 - i);
    if (!is_float(x) || at::isComplexType(type)) return false;
    if (type == at::kBool) return false;  // `x - True` is an error
    if (!constants(builder, 2)) return false;
    const Geometry* given = given_geometry(builder.graph().tape(), x);
    const Geometry* result = layout_of(builder, {given}, /*has_number=*/true);
    if (result == nullptr) return false;
    builder.key(elementwise_word(x) << 1 | i);
    builder.result(result, x.dtype);
    return true;
  }

  static bool number_on_left(const BatchView& batch) { return batch.argument(0).isTensor(); }

  void forward_number(Batch& batch) const {
    Tensor out = batch.uniform_result(0) ? batch.output_stacked(0) : batch.output(0);
    const Tensor x = elements(batch, 0);
    const Arguments& args = batch.signature().arguments;
    if (number_on_left(batch)) {
      entry_.forward(out, args[0].toTensor(), x, args);
    } else {
      entry_.forward(out, x, args[1].toTensor(), args);
    }
  }

  void backward_number(BackwardBatch& batch) const {
    const Tensor g = elements_of_gradients(batch);
    const Tensor x = entry_.saves ? elements(batch, 0) : Tensor();
    const Arguments& args = batch.signature().arguments;
    Tensor own = number_on_left(batch)
                     ? entry_.backward(Side::kRight, g, args[0].toTensor(), x, args)
                     : entry_.backward(Side::kLeft, g, x, args[1].toTensor(), args);
    add_elements(batch, 0, g, std::move(own));
  }

  const Binary& entry_;
};

#define FORWARD2(expression)                                                       \
  [](Tensor& o, const Tensor& x, const Tensor& y, const Arguments& a) -> Tensor& { \
    (void)a;                                                                       \
    return expression;                                                             \
  }
#define GRADIENTS(left, right)                                                                     \
  [](Side side, const Tensor& g, const Tensor& x, const Tensor& y, const Arguments& a) -> Tensor { \
    (void)x, (void)y, (void)a;                                                                     \
    return side == Side::kLeft ? Tensor(left) : Tensor(right);                                     \
  }

Tensor scaled(const Tensor& g, const at::Scalar& alpha) { return alpha.equal(1) ? g : g * alpha; }

const Binary kBinary[] = {
    {"aten::add.Tensor", FORWARD2(at::add_out(o, x, y, a[2].toScalar())),
     GRADIENTS(g, scaled(g, a[2].toScalar())), false, nullptr,
     STEP(ElementwiseCode::kAdd, 0, real(a[2]))},
    {"aten::sub.Tensor", FORWARD2(at::sub_out(o, x, y, a[2].toScalar())),
     GRADIENTS(g, scaled(g, a[2].toScalar()).neg()), false, nullptr,
     STEP(ElementwiseCode::kAdd, 0, -real(a[2]))},
    {"aten::mul.Tensor", FORWARD2(at::mul_out(o, x, y)), GRADIENTS(g * y, g* x), true,
     [](Side side, Tensor& o, const Tensor& g, const Tensor& x, const Tensor& y) -> void {
       at::mul_out(o, g, side == Side::kLeft ? y : x);
     },
     STEP(ElementwiseCode::kMul)},
    {"aten::div.Tensor", FORWARD2(at::div_out(o, x, y)), GRADIENTS(g / y, g.neg() * ((x / y) / y)),
     true, nullptr, STEP(ElementwiseCode::kDiv)},
};

// --- a tensor and a Scalar argument ---

Tensor pow_backward(const Tensor& g, const Tensor& x, const at::Scalar& exponent) {
  if (exponent.equal(0)) return at::zeros_like(g);  // avoids 0 * inf at x = 0
  return g * (exponent * x.pow(exponent.toDouble() - 1));
}

const Unary kScalar[] = {
    {"aten::add.Scalar", FORWARD(at::add_out(o, x, a[1].toScalar(), a[2].toScalar())), GRADIENT(g),
     Saves::kNothing, nullptr, STEP(ElementwiseCode::kAddNumber, real(a[1]) * real(a[2]))},
    {"aten::sub.Scalar", FORWARD(at::sub_out(o, x, a[1].toScalar(), a[2].toScalar())), GRADIENT(g),
     Saves::kNothing, nullptr, STEP(ElementwiseCode::kAddNumber, -real(a[1]) * real(a[2]))},
    {"aten::mul.Scalar", FORWARD(at::mul_out(o, x, a[1].toScalar())), GRADIENT(g * a[1].toScalar()),
     Saves::kNothing, nullptr, STEP(ElementwiseCode::kMulNumber, real(a[1]))},
    {"aten::div.Scalar", FORWARD(at::div_out(o, x, a[1].toScalar())), GRADIENT(g / a[1].toScalar()),
     Saves::kNothing, nullptr, STEP(ElementwiseCode::kDivNumber, real(a[1]))},
    {"aten::rsub.Scalar", FORWARD(at::rsub_out(o, x, a[1].toScalar(), a[2].toScalar())),
     GRADIENT(scaled(g, a[2].toScalar()).neg()), Saves::kNothing, nullptr,
     STEP(ElementwiseCode::kAddNumber, real(a[1]), -real(a[2]))},
    {"aten::pow.Tensor_Scalar", FORWARD(at::pow_out(o, x, a[1].toScalar())),
     GRADIENT(pow_backward(g, x, a[1].toScalar()))},
};

}  // namespace

RuleTable elementwise_rules() {
  RuleTable table;
  for (const Unary& entry : kUnary) table.push_back({entry.op, new UnaryRule(entry)});
  for (const Unary& entry : kScalar) table.push_back({entry.op, new UnaryRule(entry)});
  for (const Binary& entry : kBinary) table.push_back({entry.op, new BinaryRule(entry)});
  return table;
}

}  // namespace autobatch
