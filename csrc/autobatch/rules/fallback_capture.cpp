#include "autobatch/rules/fallback.h"

namespace autobatch {
namespace {

bool is_optional_tensor_list(const Draft& draft, size_t i) {
  return autobatch::is_optional_tensor_list(*draft.op().handle.schema().arguments()[i].type());
}

// embedding(.., sparse): its gradient is a sparse tensor, which no slab can hold.
bool gives_sparse_gradient(const Draft& draft) {
  return draft.op().name == "aten::embedding" && draft.argument(4).toBool();
}

// Their result has the operand's strides, gaps included.
bool keeps_gaps(const std::string& op) {
  return op == "aten::select_scatter" || op == "aten::slice_scatter" ||
         op == "aten::diagonal_scatter";
}

// The tensor's own, which strides of results follow from, though a copy of it is what is read.
const Geometry* geometry_given(Draft& draft, const Value& value) {
  if (!value.is_outside()) return value.geometry;
  const Geometry* given = draft.graph().tape().outside[value.index].given;
  return given != nullptr ? given : value.geometry;
}

}  // namespace

bool is_optional_tensor_list(const c10::Type& type) {
  return type.isSubtypeOf(*c10::ListType::ofOptionalTensors()) &&
         !type.isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_custom_function(const OpInfo& op) {
  return op.handle.operator_name().name == "autobatch::custom_function";
}

bool capture_everything(Draft& draft) {
  if (gives_sparse_gradient(draft)) return false;
  if (is_custom_function(draft.op()))
    draft.do_not_remember();  // its number says too little to a cell
  const bool gaps = keeps_gaps(draft.op().name);
  for (size_t i = 0; i < draft.num_arguments(); ++i) {
    const c10::IValue& argument = draft.argument(i);
    // A weight that was itself computed may be another one in each instance.
    const auto is_weight = [&](const at::Tensor& tensor) {
      return i < 64 && (draft.op().weight_arguments >> i & 1) != 0 && !draft.is_computed(tensor);
    };
    const auto key_of = [&](const Value& value) {
      draft.key(dtype_word(value) << 1 | (value.requires_grad ? 1 : 0));
      const Geometry* geometry = geometry_given(draft, value);
      draft.key(gaps ? geometry : geometry->canonical);
    };
    if (argument.isTensor()) {
      if (!draft.is_tensor(i)) {
        draft.absent(i);
        continue;
      }
      // A Python number: its dtype yields to tensors', so it can't be stacked into one.
      if (draft.tensor(i).unsafeGetTensorImpl()->is_wrapped_number()) {
        draft.number(i);
        continue;
      }
      key_of(is_weight(draft.tensor(i)) ? draft.weight(i) : draft.operand(i));
    } else if (argument.isTensorList()) {
      const auto tensors = argument.toTensorVector();
      draft.key(tensors.size());
      for (size_t e = 0; e < tensors.size(); ++e) {
        key_of(is_weight(tensors[e]) ? draft.weight(i, e) : draft.operand(i, e));
      }
    } else if (is_optional_tensor_list(draft, i)) {  // `x[i, :, j]`
      const auto list = argument.toListRef();
      draft.key(list.size());
      for (size_t e = 0; e < list.size(); ++e) {
        if (list[e].isNone() || !list[e].toTensor().defined()) {
          draft.absent(i, e);
        } else {
          key_of(draft.operand(i, e));
        }
      }
    } else if (!draft.constant(i)) {
      return false;
    }
  }
  return !draft.operands().empty();
}

}  // namespace autobatch
