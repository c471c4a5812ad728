#include "autobatch/rules/generic.h"

#include "autobatch/rules/elementwise_layout.h"

namespace autobatch {
namespace {

bool is_optional_tensor_list(const NodeBuilder& builder, size_t i) {
  return autobatch::is_optional_tensor_list(*builder.op().handle.schema().arguments()[i].type());
}

// Whether the call is embedding(.., sparse=True). The gradient of this call is a sparse tensor, and
// slabs cannot hold sparse tensors.
bool gives_sparse_gradient(const NodeBuilder& builder) {
  return builder.op().name == "aten::embedding" && builder.argument(4).toBool();
}

// Whether the op's result has the strides of its operand, including gaps.
bool keeps_gaps(const std::string& op) {
  return op == "aten::select_scatter" || op == "aten::slice_scatter" ||
         op == "aten::diagonal_scatter";
}

}  // namespace

bool is_optional_tensor_list(const c10::Type& type) {
  return type.isSubtypeOf(*c10::ListType::ofOptionalTensors()) &&
         !type.isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_custom_function(const OpInfo& op) {
  return op.handle.operator_name().name == "autobatch::custom_function";
}

bool capture_all_arguments(NodeBuilder& builder) {
  if (gives_sparse_gradient(builder)) return false;
  if (is_custom_function(builder.op()))
    builder.do_not_cache();  // a cell must not reuse the number of a call of the Function
  const bool gaps = keeps_gaps(builder.op().name);
  for (size_t i = 0; i < builder.num_arguments(); ++i) {
    const c10::IValue& argument = builder.argument(i);
    // A computed weight may be a different tensor in each instance.
    const auto is_weight = [&](const at::Tensor& tensor) {
      return i < 64 && (builder.op().weight_arguments >> i & 1) != 0 &&
             !builder.is_computed(tensor);
    };
    const auto key_of = [&](const Value& value) {
      builder.key(dtype_word(value) << 1 | (value.requires_grad ? 1 : 0));
      const Geometry* geometry = given_geometry(builder.graph().tape(), value);
      builder.key(gaps ? geometry : geometry->canonical);
    };
    if (argument.isTensor()) {
      if (!builder.is_tensor(i)) {
        builder.absent(i);
        continue;
      }
      // A Python number cannot be stacked into a tensor. In type promotion, its dtype has a lower
      // priority than the dtype of a tensor.
      if (builder.tensor(i).unsafeGetTensorImpl()->is_wrapped_number()) {
        builder.python_number(i);
        continue;
      }
      key_of(is_weight(builder.tensor(i)) ? builder.weight(i) : builder.operand(i));
    } else if (argument.isTensorList()) {
      const auto tensors = argument.toTensorVector();
      builder.key(tensors.size());
      for (size_t e = 0; e < tensors.size(); ++e) {
        key_of(is_weight(tensors[e]) ? builder.weight(i, e) : builder.operand(i, e));
      }
    } else if (is_optional_tensor_list(builder, i)) {  // `x[i, :, j]`
      const auto list = argument.toListRef();
      builder.key(list.size());
      for (size_t e = 0; e < list.size(); ++e) {
        if (list[e].isNone() || !list[e].toTensor().defined()) {
          builder.absent(i, e);
        } else {
          key_of(builder.operand(i, e));
        }
      }
    } else if (!builder.constant(i)) {
      return false;
    }
  }
  return !builder.operands().empty();
}

RuleTable generic_exceptions() {
  return {
      {"aten::lstm_cell", &kernel_cell_rule()},
      // For prod of zeros and for infinite logits, functorch and eager compute different gradients.
      {"aten::prod", &differentiated_loop_rule()},
      {"aten::prod.dim_int", &differentiated_loop_rule()},
      {"aten::binary_cross_entropy_with_logits", &loop_rule()},
      // functorch treats mean and rstd as independent inputs. In eager, they depend on the input,
      // so the gradient of the input includes contributions through mean and rstd.
      {"aten::native_layer_norm_backward", &differentiated_loop_rule()},
      {"aten::native_group_norm_backward", &differentiated_loop_rule()},
      {"aten::native_batch_norm_backward", &differentiated_loop_rule()},
      // functorch applies padding_idx in the first instance only.
      {"aten::embedding", &loop_rule()},
      // functorch computes one result for all instances together, instead of one result for each
      // instance.
      {"aten::_is_all_true", &loop_rule()},
      {"aten::_is_any_true", &loop_rule()},
      // For infinite endpoints, functorch computes other steps than eager.
      {"aten::linspace.Tensor_Tensor", &loop_rule()},
      {"aten::linspace.Tensor_Scalar", &loop_rule()},
      {"aten::linspace.Scalar_Tensor", &loop_rule()},
      // The gradient of these random ops does not depend on the random numbers, so backward need
      // not draw new numbers.
      {"aten::bernoulli", &functorch_rule()},
      {"aten::bernoulli.p", &functorch_rule()},
      {"aten::multinomial", &functorch_rule()},
      {"aten::normal.Tensor_float", &functorch_rule()},
      {"aten::normal.float_Tensor", &functorch_rule()},
      {"aten::normal.Tensor_Tensor", &functorch_rule()},
      // functorch's gradient of `src` is wrong: it is multiplied by the width of `src` (PyTorch
      // 2.13).
      {"aten::select_scatter", &loop_rule()},
  };
}

const Rule& generic_rule(const OpInfo& op, bool random) {
  if (random) return loop_rule();
  return op.name == "aten::lstm_cell" ? functorch_lstm_cell_rule() : functorch_rule();
}

}  // namespace autobatch
