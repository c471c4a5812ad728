#include "autobatch/graph/op_registry.h"

#include "autobatch/common/device_traits.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

struct Override {
  std::string_view op;  // "aten::outer": every overload; "aten::add.Tensor": one overload
  Action action;
};

// Ops for which the schema alone would give a wrong or an unnecessarily slow action.
constexpr Override kOverrides[] = {
    // Ops that write to running statistics, which their schemas do not declare.
    {"aten::batch_norm", Action::kMutate},
    {"aten::instance_norm", Action::kMutate},
    {"aten::native_batch_norm", Action::kMutate},
    {"aten::cudnn_batch_norm", Action::kMutate},
    {"aten::miopen_batch_norm", Action::kMutate},
    {"aten::_batch_norm_impl_index", Action::kMutate},
    {"aten::_batch_norm_with_update", Action::kMutate},
    // Ops that read only metadata.
    {"aten::size", Action::kMetadata},
    {"aten::stride", Action::kMetadata},
    {"aten::dim", Action::kMetadata},
    {"aten::numel", Action::kMetadata},
    {"aten::sym_size", Action::kMetadata},
    {"aten::sym_stride", Action::kMetadata},
    {"aten::sym_numel", Action::kMetadata},
    {"aten::is_same_size", Action::kMetadata},
    {"aten::is_floating_point", Action::kMetadata},
    {"aten::is_complex", Action::kMetadata},
    {"aten::is_signed", Action::kMetadata},
    {"aten::is_conj", Action::kMetadata},
    {"aten::is_neg", Action::kMetadata},
    {"aten::is_inference", Action::kMetadata},
    {"aten::result_type", Action::kMetadata},
    {"aten::can_cast", Action::kMetadata},
    // Ops that make new tensors from metadata.
    {"aten::zeros", Action::kFactory},
    {"aten::ones", Action::kFactory},
    {"aten::full", Action::kFactory},
    {"aten::empty", Action::kFactory},
    {"aten::zeros_like", Action::kFactory},
    {"aten::ones_like", Action::kFactory},
    {"aten::empty_like", Action::kFactory},
    {"aten::full_like", Action::kFactory},
    {"aten::rand_like", Action::kFactory},
    {"aten::randn_like", Action::kFactory},
    {"aten::randint_like", Action::kFactory},
    {"aten::new_zeros", Action::kFactory},
    {"aten::new_ones", Action::kFactory},
    {"aten::new_full", Action::kFactory},
    {"aten::new_empty", Action::kFactory},
    {"aten::new_empty_strided", Action::kFactory},
    // Ops that may return their argument or views of it. Some schemas do not declare that the
    // result may alias the argument.
    {"aten::resolve_conj", Action::kDecompose},
    {"aten::resolve_neg", Action::kDecompose},
    {"aten::conj_physical", Action::kDecompose},
    {"aten::prelu", Action::kDecompose},  // calls `_prelu_kernel`, which is elementwise
    {"aten::atleast_1d", Action::kDecompose},
    {"aten::atleast_2d", Action::kDecompose},
    {"aten::atleast_3d", Action::kDecompose},
    {"aten::broadcast_tensors", Action::kDecompose},
    {"aten::meshgrid", Action::kDecompose},
    {"aten::cartesian_prod", Action::kDecompose},
    {"aten::sum_to_size", Action::kDecompose},
    {"aten::type_as", Action::kDecompose},
    {"aten::unsafe_chunk", Action::kDecompose},
    {"aten::_unsafe_view", Action::kView},
    {"aten::unsafe_split", Action::kView},
    {"aten::unsafe_split_with_sizes", Action::kView},
    {"aten::feature_dropout", Action::kDecompose},
    // Composite ops without a batching rule that call ops with a batching rule.
    {"aten::column_stack", Action::kDecompose},
    {"aten::take_along_dim", Action::kDecompose},
    {"aten::tile", Action::kDecompose},
    {"aten::repeat_interleave.self_int", Action::kDecompose},
    {"aten::diff", Action::kDecompose},
    {"aten::kron", Action::kDecompose},
    {"aten::pairwise_distance", Action::kDecompose},
    {"aten::hstack", Action::kDecompose},
    {"aten::vstack", Action::kDecompose},
    {"aten::dstack", Action::kDecompose},
    {"aten::inner", Action::kDecompose},
    {"aten::__and__", Action::kDecompose},
    {"aten::__or__", Action::kDecompose},
    {"aten::__xor__", Action::kDecompose},
    {"aten::linalg_multi_dot", Action::kDecompose},
    {"aten::triplet_margin_loss", Action::kDecompose},
    {"aten::margin_ranking_loss", Action::kDecompose},
    {"aten::cosine_embedding_loss", Action::kDecompose},
    // Recurrent networks over packed rows.
    {"aten::lstm.data", Action::kDecompose},
    {"aten::gru.data", Action::kDecompose},
    {"aten::rnn_tanh.data", Action::kDecompose},
    {"aten::rnn_relu.data", Action::kDecompose},
    // Ops that call matrix products. The rules of matrix products accept operands of any size.
    {"aten::einsum", Action::kDecompose},
    {"aten::tensordot", Action::kDecompose},
    {"aten::outer", Action::kDecompose},
    {"aten::ger", Action::kDecompose},
    // Ops that return a view whose dtype or bits differ from those of its base.
    {"aten::view_as_real", Action::kAtOnce},
    {"aten::view_as_complex", Action::kAtOnce},
    {"aten::real", Action::kDecompose},
    {"aten::imag", Action::kDecompose},
    {"aten::_conj", Action::kAtOnce},
    {"aten::_neg_view", Action::kAtOnce},
    {"aten::_fw_primal", Action::kAtOnce},
    {"aten::_make_dual", Action::kAtOnce},
    {"aten::_unpack_dual", Action::kAtOnce},
    // Ops that address memory by absolute offsets. In a batch these offsets are different.
    {"aten::as_strided_copy", Action::kAtOnce},
    {"aten::as_strided_scatter", Action::kAtOnce},
    // The shape of the result of `index` depends on values only if an index is a mask. The Meta
    // kernel rejects masks.
    {"aten::index", Action::kDefer},
    // The op that stands for a custom autograd.Function.
    {"autobatch::custom_function", Action::kDefer},
    // Ops whose Meta kernels return other shapes than their CPU kernels.
    {"aten::_embedding_bag", Action::kAtOnce},
    {"aten::lift_fresh", Action::kAtOnce},
};

// Ops that are worth batching even if every argument is an ordinary tensor. A frozen model under
// no_grad must also be batched, and C++ cannot distinguish its parameters from other tensors.
constexpr std::string_view kAlwaysDefer[] = {
    "aten::mm",    "aten::matmul", "aten::addmm",  "aten::bmm",       "aten::baddbmm",
    "aten::addmv", "aten::mv",     "aten::einsum", "aten::tensordot", "aten::inner"};

// Ops whose kernels reject floating-point tensors, while their Meta kernels accept them.
constexpr std::string_view kIntegralOnly[] = {
    "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor", "aten::bitwise_not",
    "aten::__and__",     "aten::__or__",     "aten::__xor__"};

// Ops that copy memory in this library. In eager mode, their result shares this memory with the
// argument.
constexpr std::string_view kReinterpreting[] = {"autobatch::as_complex", "autobatch::as_real",
                                                "autobatch::conjugate"};

// Ops that behave differently if the argument is a result of `_conj`.
constexpr std::string_view kSeesConjugate[] = {"aten::is_conj", "aten::real",
                                               "aten::imag",    "aten::view_as_real",
                                               "aten::_conj",   "aten::_neg_view"};

// Ops that return one bool for a whole tensor.
constexpr std::string_view kVerdicts[] = {"aten::all", "aten::any", "aten::_is_all_true",
                                          "aten::_is_any_true"};

// Ops that fail for some values, and whose errors programs catch (`try: cholesky(k)`, `except
// LinAlgError: add jitter`).
constexpr std::string_view kFailForValues[] = {"aten::linalg_cholesky",
                                               "aten::cholesky",
                                               "aten::linalg_inv",
                                               "aten::inverse",
                                               "aten::linalg_solve",
                                               "aten::linalg_eigh",
                                               "aten::linalg_eigvalsh",
                                               "aten::linalg_eig",
                                               "aten::linalg_eigvals",
                                               "aten::linalg_svd",
                                               "aten::svd",
                                               "aten::linalg_svdvals",
                                               "aten::linalg_lu_factor",
                                               "aten::linalg_matrix_power",
                                               "aten::linalg_matrix_norm",
                                               "aten::linalg_matrix_rank",
                                               "aten::linalg_cond",
                                               "aten::linalg_pinv",
                                               "aten::linalg_tensorinv",
                                               "aten::linalg_tensorsolve",
                                               "aten::nuclear_norm",
                                               "aten::pinverse"};

// In-place ops whose autograd formulas differ from those of their functional counterparts.
constexpr std::pair<std::string_view, InPlaceFormula> kInPlaceFormulas[] = {
    {"aten::acosh_", InPlaceFormula::kNone},
    {"aten::asinh_", InPlaceFormula::kNone},
    {"aten::atanh_", InPlaceFormula::kNone},
    {"aten::leaky_relu_", InPlaceFormula::kOfPositiveSlope},
    {"aten::elu_", InPlaceFormula::kOfPositiveSlope},
    {"aten::celu_", InPlaceFormula::kOfPositiveSlope},
};

std::string full_name(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

template <class Table>
bool lists(const Table& table, std::string_view name) {
  return std::ranges::find(table, name) != std::end(table);
}

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

// Recognizes weights by the argument names in schemas: linear, conv, embedding, norms, rnn, cells.
bool is_weight_name(const std::string& name) {
  return name.find("weight") != std::string::npos || name == "bias" || name == "params" ||
         name.starts_with("w_") || name.starts_with("b_");
}

bool has_kernel(const c10::OperatorHandle& op, std::initializer_list<c10::DispatchKey> keys) {
  return std::any_of(keys.begin(), keys.end(),
                     [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

bool is_composite(const c10::OperatorHandle& op) {
  using enum c10::DispatchKey;
  return has_kernel(op, {CompositeImplicitAutograd}) &&
         !has_kernel(op, {CPU, CUDA, AutogradCPU, AutogradCUDA});
}

Action action_from_schema(const c10::OperatorHandle& op, const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return Action::kMutate;
  // Ops of other namespaces may have effects that no schema declares (printing, communication).
  if (op.operator_name().getNamespace() != std::optional<std::string_view>("aten")) {
    return Action::kAtOnce;
  }
  bool returns_alias = false;
  if (schema.returns().empty()) return Action::kAtOnce;
  for (const c10::Argument& result : schema.returns()) {
    if (!is_tensor_type(result.type())) return Action::kAtOnce;
    returns_alias = returns_alias || result.alias_info() != nullptr;
  }
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    return Action::kAtOnce;
  }
  if (!returns_alias) return Action::kDefer;
  return has_kernel(op, {c10::DispatchKey::CompositeImplicitAutograd}) ? Action::kDecompose
                                                                       : Action::kView;
}

// Whether the last argument of the op is the tensor to which it writes its result.
bool is_out_variant(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  const auto num_out = std::ranges::count_if(arguments, [](const auto& a) { return a.is_out(); });
  return num_out == 1 && arguments.back().is_out();
}

// Returns "aten::add" for "aten::add_", "aten::__or__" for "aten::__ior__", the same name for an
// out variant, and "" for other ops.
std::string functional_name(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  if (is_out_variant(op)) return name;
  if (name.starts_with("aten::__i")) return "aten::__" + name.substr(9);
  return name.ends_with("_") ? name.substr(0, name.size() - 1) : "";
}

// Whether the op returns the same values that `writing` writes, when both are called with the same
// arguments (without the argument `out`).
bool is_functional_of(const c10::OperatorHandle& op, const c10::OperatorHandle& writing) {
  if (!op.hasSchema() || op.schema().is_mutable()) return false;
  const auto& ours = writing.schema().arguments();
  const auto& theirs = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const size_t num_shared = ours.size() - (is_out_variant(writing) ? 1 : 0);
  if (num_shared != theirs.size() || returns.size() != 1) return false;
  for (size_t i = 0; i < num_shared; ++i) {
    if (*ours[i].type() != *theirs[i].type()) return false;
  }
  return is_tensor_type(returns[0].type()) && returns[0].alias_info() == nullptr;
}

// Returns the overload of the functional op that takes the same arguments. The name of the overload
// may differ: for pow_.Scalar it is pow.Tensor_Scalar.
std::optional<c10::OperatorHandle> find_functional(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  const std::string functional = functional_name(op);
  if (functional.empty()) return std::nullopt;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const auto same_name = dispatcher.findSchema({functional, name.overload_name});
  if (same_name.has_value() && is_functional_of(*same_name, op)) return same_name;
  for (const c10::OperatorName& other : dispatcher.getAllOpNames()) {
    if (other.name != functional) continue;
    const auto found = dispatcher.findSchema(other);
    if (found.has_value() && is_functional_of(*found, op)) return found;
  }
  return std::nullopt;
}

void describe_write(OpInfo& info) {
  const c10::OperatorHandle& op = info.handle;
  if (is_out_variant(op) && !op.hasTag(at::Tag::nondeterministic_seeded)) {
    info.functional = find_functional(op);
    if (info.functional.has_value()) info.write = WriteKind::kOut;
    return;
  }
  if (op.hasTag(at::Tag::inplace_view)) {
    info.functional = c10::Dispatcher::singleton().findSchema(
        {functional_name(op), op.operator_name().overload_name});
  }
  if (info.written_arguments != 1 || op.hasTag(at::Tag::inplace_view)) return;
  if (op.schema().returns().size() != 1) return;
  if (info.name == "aten::zero_") {
    info.write = WriteKind::kZero;
  } else if (info.name == "aten::copy_" || info.name.starts_with("aten::fill_.")) {
    info.write = WriteKind::kGiven;
  } else if (!op.hasTag(at::Tag::nondeterministic_seeded) || info.name == "aten::dropout_") {
    info.functional = find_functional(op);
    if (info.functional.has_value()) info.write = WriteKind::kCompute;
    for (const auto& [name, formula] : kInPlaceFormulas) {
      if (name == info.name) info.in_place_formula = formula;
    }
  }
}

// Fills in the members of `info` that follow from the names and types of the op's arguments.
void describe_arguments(OpInfo& info) {
  const c10::FunctionSchema& schema = info.handle.schema();
  for (size_t i = 0; i < std::min<size_t>(schema.arguments().size(), 64); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const uint64_t bit = uint64_t{1} << i;
    if (argument.name() == "dropout_p" || argument.name() == "dropout") {
      info.dropout_argument = static_cast<int>(i);
    }
    if (argument.name() == "indices" && i > 0 &&
        argument.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
      info.index_argument = static_cast<int>(i);
    }
    const bool is_flag = argument.name() == "training" || argument.name() == "use_input_stats";
    if (is_flag && !schema.is_mutable()) {
      info.writes_if_argument = static_cast<int>(i);
    }
    if (is_tensor_type(argument.type()) ||
        argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      if (is_weight_name(argument.name())) info.weight_arguments |= bit;
    }
    const bool is_statistic =
        info.action == Action::kMutate && argument.name().starts_with("running_");
    info.keeps_statistics |= is_statistic;
    if (is_statistic || (argument.alias_info() != nullptr && argument.alias_info()->isWrite())) {
      info.written_arguments |= bit;
    }
  }
}

std::unique_ptr<OpInfo> make_info(const c10::OperatorHandle& op) {
  auto info = std::make_unique<OpInfo>(op, full_name(op));
  if (!op.hasSchema()) return info;
  const c10::FunctionSchema& schema = op.schema();
  info->num_arguments = schema.arguments().size();
  info->cuts_gradient = op.operator_name().name == "aten::detach";
  info->conjugates = info->name == "autobatch::conjugate";
  info->reinterprets = lists(kReinterpreting, info->name);
  info->sees_conjugate = lists(kSeesConjugate, info->name);
  info->action = action_from_schema(op, schema);
  if (info->action != Action::kMutate) {
    info->view = find_view_function(info->name);
    info->rules = find_native_rules(info->name);
    const bool random = op.hasTag(at::Tag::nondeterministic_seeded);
    if (info->action == Action::kDefer && op.hasTag(at::Tag::pointwise) && !random) {
      info->rules.push_back(&rule_of_tagged_ops());
    }
    info->decompositions = find_decompositions(info->name);
    if (info->view != nullptr) info->action = Action::kView;
    if (!info->rules.empty()) info->action = Action::kDefer;
    for (const Override& entry : kOverrides) {
      if (entry.op == op.operator_name().name || entry.op == info->name) {
        info->action = entry.action;
      }
    }
  }
  info->unsafe_split =
      info->name.starts_with("aten::unsafe_") || info->name == "aten::_unsafe_view";
  info->integral_only = lists(kIntegralOnly, op.operator_name().name);
  info->is_verdict = lists(kVerdicts, info->name);
  info->fails_for_values = lists(kFailForValues, op.operator_name().name);
  info->always_defer = lists(kAlwaysDefer, op.operator_name().name);
  info->random = op.hasTag(at::Tag::nondeterministic_seeded);
  // A reinterpreting op must not be decomposed: the op that it calls would be captured as the
  // reinterpreting op again.
  info->composite = is_composite(op) && !info->reinterprets;
  // gru_cell is excluded, because it writes to pieces of a tensor that autograd does not treat as
  // views.
  info->decomposes = info->composite && info->name != "aten::gru_cell";
  info->is_dropout =
      info->random && !info->rules.empty() && info->name.find("dropout") != std::string::npos;
  info->is_cast = info->name == "aten::to.dtype";
  info->cast_on_cpu = has_kernel(op, {c10::DispatchKey::AutocastCPU});
  info->cast_on_cuda = has_kernel(op, {autocast_key_of_accelerator()});
  describe_arguments(*info);
  if (info->action == Action::kMutate) describe_write(*info);
  return info;
}

}  // namespace

Action OpInfo::action_on(at::ArrayRef<c10::IValue> arguments) const {
  if (action != Action::kMutate || writes_if_argument < 0) return action;
  if (!arguments[static_cast<size_t>(writes_if_argument)].toBool()) return Action::kDefer;
  for (size_t i = 0; i < num_arguments && i < 64; ++i) {
    const c10::IValue& to = arguments[i];
    const bool is_given = to.isTensor() && to.toTensor().defined();
    if ((written_arguments >> i & 1) != 0 && is_given) return Action::kMutate;
  }
  return Action::kDefer;  // the call updates no statistics
}

namespace {

const OpInfo* shared_info(const c10::OperatorHandle& op, const void* key) {
  static std::mutex mutex;
  static auto* table = new std::unordered_map<const void*, std::unique_ptr<OpInfo>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<OpInfo>& entry = (*table)[key];
  if (entry == nullptr) entry = make_info(op);
  return entry.get();
}

}  // namespace

const OpInfo& op_info(const c10::OperatorHandle& op) {
  // The name is stored in the dispatcher's entry for the op, so the name's address identifies the
  // op.
  const void* key = &op.operator_name();
  struct Entry {
    const void* key = nullptr;
    const OpInfo* info = nullptr;
  };
  static thread_local std::array<Entry, 512> cache;
  Entry& entry = cache[(reinterpret_cast<uintptr_t>(key) >> 6) % cache.size()];
  if (entry.key != key) entry = {key, shared_info(op, key)};
  return *entry.info;
}

const OpInfo& find_op(const char* name, const char* overload) {
  return op_info(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

}  // namespace autobatch
