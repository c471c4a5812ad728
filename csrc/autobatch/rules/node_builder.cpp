#include "autobatch/rules/node_builder.h"

#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"

namespace autobatch {
namespace {

// Marks for the kinds of words in a key. Because of the marks, calls of different forms never have
// equal keys.
constexpr uint64_t kOperandMark = uint64_t{1} << 32;
constexpr uint64_t kAbsentMark = uint64_t{2} << 32;
constexpr uint64_t kNumberMark = uint64_t{3} << 32;

}  // namespace

NodeBuilder::NodeBuilder(const OpInfo& op, Graph& graph, at::ArrayRef<c10::IValue> arguments,
                         const DispatchContext& context)
    : op_(op), graph_(graph), arguments_(arguments), context_(context) {
  key_.push_back(reinterpret_cast<uint64_t>(&op));
  key_.push_back(context.word());
}

Value NodeBuilder::add_operand(ValueId id, Slot slot) {
  operands_.push_back(id);
  slots_.push_back(slot);
  sources_.push_back(slot);
  const Value& value = graph_.value(id);
  any_requires_grad_ |= value.requires_grad;
  const bool cpu_scalar = value.device.is_cpu() && value.geometry->sizes.empty();
  if (!device_known_) device_ = value.device;
  deferrable_ = deferrable_ && (!device_known_ || device_ == value.device || cpu_scalar);
  if (value.is_graph_input())
    deferrable_ = deferrable_ && !graph_.tape().graph_inputs[value.index].is_odd;
  device_known_ = device_known_ || !cpu_scalar;
  key_.push_back(kOperandMark | static_cast<uint64_t>(value.device.type()) << 8 |
                 static_cast<uint8_t>(value.device.index()));
  return value;
}

bool NodeBuilder::is_computed(const at::Tensor& tensor) const {
  const PendingTensor* pending = as_pending(tensor);
  return pending != nullptr && !graph_.value(pending->value()).is_graph_input();
}

Value NodeBuilder::operand(size_t i) {
  return add_operand(graph_.value_of(tensor(i)), {static_cast<uint32_t>(i), kNone});
}

Value NodeBuilder::operand(size_t i, size_t element) {
  return add_operand(graph_.value_of(arguments_[i].toListRef()[element].toTensor()),
                     {static_cast<uint32_t>(i), static_cast<uint32_t>(element)});
}

void NodeBuilder::add_identity(const Value& value) {
  cacheable_ = cacheable_ && value.is_graph_input();
  key_.push_back(graph_.identity(value) << 1 | (value.requires_grad ? 1 : 0));
  key(value.geometry);
  key_.push_back(static_cast<uint64_t>(value.offset));
}

Value NodeBuilder::weight(size_t i) {
  return add_weight(tensor(i), {static_cast<uint32_t>(i), kNone});
}

Value NodeBuilder::weight(size_t i, size_t element) {
  return add_weight(arguments_[i].toListRef()[element].toTensor(),
                    {static_cast<uint32_t>(i), static_cast<uint32_t>(element)});
}

Value NodeBuilder::add_weight(const at::Tensor& tensor, Slot slot) {
  if (operands_.size() < 63) weight_slots_ |= uint64_t{1} << operands_.size();
  const Value value = add_operand(graph_.weight_value_of(tensor), slot);
  add_identity(value);
  return value;
}

void NodeBuilder::absent(size_t i, size_t element) {
  operands_.push_back(kNone);
  slots_.push_back({static_cast<uint32_t>(i), static_cast<uint32_t>(element)});
  sources_.push_back({kNone, kNone});
  key_.push_back(kAbsentMark);
}

void NodeBuilder::python_number(size_t i) {
  constants_ |= uint64_t{1} << i;
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::Tensor& number = tensor(i);
  key_.push_back(kNumberMark | i);
  key_.push_back(static_cast<uint64_t>(number.scalar_type()));
  append_constant(key_, c10::IValue(number.item()));
}

void NodeBuilder::variadic(size_t i) {
  variadic_ = static_cast<uint32_t>(i);
  const auto list = arguments_[i].toListRef();
  for (size_t e = 0; e < list.size(); ++e) {
    const size_t before = key_.size();
    operand(i, e);
    if (e > 0) key_.resize(before);
  }
  slots_.clear();
}

void NodeBuilder::result(const Geometry* geometry, c10::ScalarType dtype) {
  const bool differentiable = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  const bool requires_grad = any_requires_grad_ && context_.grad_mode && differentiable;
  results_.push_back({geometry, dtype, device_, requires_grad});
  deferrable_ = deferrable_ && fits_slab(dtype, requires_grad);
  ++num_visible_;
}

void NodeBuilder::result(at::IntArrayRef sizes, c10::ScalarType dtype) {
  result(graph_.geometries().intern_contiguous(sizes), dtype);
}

void NodeBuilder::hidden(at::IntArrayRef sizes, c10::ScalarType dtype) {
  results_.push_back({graph_.geometries().intern_contiguous(sizes), dtype, device_, false});
}

bool fits_slab(c10::ScalarType type, bool requires_grad) {
  if (c10::isQIntType(type) || c10::isBitsType(type)) return false;
  // Gradients are added in a buffer, but PyTorch cannot add complex numbers in half precision
  // (ComplexHalf).
  const bool half_complex = c10::isComplexType(type) && c10::elementSize(type) == 4;
  return !requires_grad || !(half_complex || c10::isFloat8Type(type));
}

}  // namespace autobatch
