#include "autobatch/capture/shape_inference.h"

#include "autobatch/capture/record_call.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/generic.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

namespace autobatch {
namespace {

using torch::jit::Stack;

// Ops whose kernels raise an error or crash on zeros (LAPACK uses a pivot as an index).
constexpr std::string_view kNotOnZeros[] = {"aten::linalg_ldl_", "aten::linalg_lu", "aten::lu_"};

// Ops that would fail with any values other than the values of the call. The Meta kernels of these
// ops import no Python modules.
constexpr std::string_view kNeverTried[] = {"aten::segment_reduce"};

// The largest number of operand elements for which an op runs on stand-ins. The first limit applies
// if the op's Meta kernel can be used instead. The second limit applies to all other ops.
constexpr int64_t kLargestTrial = 1 << 20;
constexpr int64_t kLargestNeededTrial = 1 << 26;

template <class Table>
bool lists(const Table& table, std::string_view op) {
  return std::any_of(std::begin(table), std::end(table),
                     [&](std::string_view prefix) { return op.starts_with(prefix); });
}

// The values of a stand-in. With kFirst, integers are zeros, because they may be indices, and other
// dtypes are ones. With kIdentity, floating-point matrices are nearly equal to the identity (so no
// reshaped matrix is singular), and other tensors are ones.
enum class Filling : uint8_t { kNoData, kZeros, kOnes, kTwos, kFirst, kIdentity };

// Returns a tensor with the metadata of `tensor`. The returned tensor either has no data (Meta
// device), or has the values of `filling`.
at::Tensor stand_in(const at::Tensor& tensor, Filling filling) {
  if (!tensor.defined()) return tensor;  // an omitted index, as in `x[:, i]`
  // Kernels of every device accept a Python number unchanged.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  at::Tensor out;
  if (filling == Filling::kNoData) {
    out = at::empty_strided(tensor.sizes(), tensor.strides(),
                            tensor.options().device(at::kMeta).requires_grad(false));
  } else {
    int64_t extent = tensor.numel() == 0 ? 0 : 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
    const bool identity = filling == Filling::kIdentity && is_matrix(tensor);
    const bool index =
        filling == Filling::kFirst && at::isIntegralType(tensor.scalar_type(), false);
    const int value = filling == Filling::kZeros || identity || index ? 0
                      : filling == Filling::kTwos                     ? 2
                                                                      : 1;
    out = at::full({std::max<int64_t>(extent, 0)}, value, tensor.options().requires_grad(false))
              .as_strided(tensor.sizes(), tensor.strides());
    if (identity) fill_with_identity(out);
  }
  if (tensor.requires_grad() && c10::GradMode::is_enabled()) out.set_requires_grad(true);
  return out;
}

// Returns the filling for an index of `x[index]`. An index other than 0 may be out of range.
Filling filling_of_index(const c10::IValue& index, Filling filling) {
  if (filling == Filling::kNoData || !index.toTensor().defined()) return filling;
  const c10::ScalarType type = index.toTensor().scalar_type();
  return type == at::kLong || type == at::kInt ? Filling::kZeros : filling;
}

c10::IValue stand_in(const c10::IValue& value, Filling filling) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(stand_in(value.toTensor(), filling)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      out.push_back(stand_in(tensor, filling));
    }
    return out;
  }
  if (value.isList() && value.toListRef().size() > 0 &&
      value.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
    c10::List<std::optional<at::Tensor>> out;
    for (const c10::IValue& item : value.toListRef()) {
      std::optional<at::Tensor> index;
      if (!item.isNone()) index = stand_in(item.toTensor(), filling_of_index(item, filling));
      out.push_back(std::move(index));
    }
    return out;
  }
  return value;
}

thread_local int trials_under_way = 0;

// Hides a trial run from the user: restores the state of the random generator and drops warnings.
// (The op raises the warnings when it runs later.)
class Unseen {
 public:
  explicit Unseen(bool random) {
    if (random) state_ = generator_.get_state();
    ++trials_under_way;
  }
  ~Unseen() {
    --trials_under_way;
    if (state_.defined()) generator_.set_state(state_);
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;

 private:
  class Silent final : public c10::WarningHandler {
   public:
    void process(const c10::Warning&) override {}
  };

  Silent silent_;
  const c10::WarningUtils::WarningHandlerGuard guard_{&silent_};
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  at::Tensor state_;
};

// The outcome of running the op on stand-ins instead of its arguments.
struct Outcome {
  enum Kind : uint8_t { kDone, kRaised, kSingular, kNoKernel };
  Kind kind = kDone;
  Stack arguments, results;
};

Outcome run_on_stand_ins(const NodeBuilder& builder, Filling filling) {
  Outcome out;
  try {
    for (const c10::IValue& argument : builder.arguments()) {
      const bool to_meta = filling == Filling::kNoData && argument.isDevice();
      out.arguments.push_back(to_meta ? c10::Device(c10::kMeta) : stand_in(argument, filling));
    }
    out.results = out.arguments;
    builder.op().handle.callBoxed(out.results);
  } catch (const c10::NotImplementedError&) {
    out.kind = Outcome::kNoKernel;
  } catch (const c10::LinAlgError&) {
    out.kind = Outcome::kSingular;
  } catch (const std::exception&) {
    out.kind = Outcome::kRaised;  // most likely the arguments are wrong: eager raises the error
  }
  return out;
}

// Whether the op returned an argument or a view of an argument. Some schemas do not declare that
// the op may return an argument.
bool is_argument(const at::Tensor& result, const Stack& arguments) {
  bool found = false;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      found = found || (tensor.has_storage() && result.is_alias_of(tensor));
    });
  }
  return found;
}

bool add_result(const NodeBuilder& builder, const at::Tensor& tensor, const Stack& arguments,
                bool on_meta, std::vector<ResultMeta>& results) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided || tensor.is_nested()) return false;
  if (!fits_slab(tensor.scalar_type(), tensor.requires_grad())) return false;
  if (tensor.is_meta() != on_meta || tensor.is_conj() || tensor.is_neg()) return false;
  if (is_argument(tensor, arguments)) return false;
  auto& geometries = const_cast<NodeBuilder&>(builder).graph().geometries();
  const Geometry* geometry = geometries.intern(tensor.sizes(), tensor.strides());
  // A result may overlap itself without a stride of 0. In this case the op has kept the strides of
  // an argument that overlaps itself (slice_scatter of unfold).
  const bool odd =
      std::find(geometry->strides.begin(), geometry->strides.end(), 0) == geometry->strides.end();
  if (geometry->overlapping && odd) return false;
  if (geometry->overlapping) geometry = geometries.intern_contiguous(tensor.sizes());
  results.push_back({geometry, tensor.scalar_type(), builder.device(), tensor.requires_grad()});
  return true;
}

bool read_results(const NodeBuilder& builder, const Outcome& outcome, bool on_meta,
                  std::vector<ResultMeta>& results, bool& list) {
  results.clear();
  list = false;
  for (const c10::IValue& value : outcome.results) {
    if (value.isTensor()) {
      if (!add_result(builder, value.toTensor(), outcome.arguments, on_meta, results)) return false;
    } else if (value.isTensorList() && outcome.results.size() == 1) {
      list = true;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (!add_result(builder, tensor, outcome.arguments, on_meta, results)) return false;
      }
    } else {
      return false;
    }
  }
  return !results.empty();
}

using Sizes = std::vector<std::vector<int64_t>>;
Sizes sizes_of(const Outcome& outcome) {
  Sizes sizes;
  for (const c10::IValue& value : outcome.results) {
    for_each_tensor(value, [&](const at::Tensor& t) { sizes.push_back(t.sizes().vec()); });
  }
  return sizes;
}

// Whether the results are on the same device as the operands.
bool stays_on_device(const NodeBuilder& builder) {
  return std::all_of(builder.arguments().begin(), builder.arguments().end(),
                     [&](const auto& argument) {
                       return !argument.isDevice() || argument.toDevice() == builder.device();
                     });
}

struct Extent {
  int64_t elements = 0;
  bool contiguous = true;
};
Extent operands_of(const NodeBuilder& builder) {
  Extent extent;
  for (size_t s = 0; s < builder.operands().size(); ++s) {
    if (builder.operands()[s] == kNone) continue;
    const Geometry& geometry = *builder.operand_value(s).geometry;
    extent.elements += geometry.numel;
    extent.contiguous = extent.contiguous && geometry.contiguous;
  }
  return extent;
}

// Whether the result sizes cannot depend on values. If an op has a Meta kernel, the sizes cannot
// depend on values, because a Meta kernel has no access to values. A composite op has no separate
// Meta kernel.
bool tells_without_data(const OpInfo& op) {
  return op.handle.hasKernelForDispatchKey(c10::DispatchKey::Meta) &&
         !op.handle.hasTag(at::Tag::dynamic_output_shape);
}

bool has_mask(const NodeBuilder& builder) {
  bool found = false;
  for (size_t s = 0; s < builder.operands().size(); ++s) {
    found |=
        builder.operands()[s] != kNone && builder.operand_value(s).dtype == c10::ScalarType::Bool;
  }
  return found;
}

// Infers the results by running eager's own kernels on zeros and on ones. If one run is not
// sufficient, the result sizes of the two runs must agree. If the runs raise an error, other values
// are tried. If a matrix is singular, the identity is tried.
bool infer_by_trials(const NodeBuilder& builder, std::vector<ResultMeta>& results, bool& list) {
  const bool not_on_zeros = lists(kNotOnZeros, builder.op().name);
  const int needed = not_on_zeros || tells_without_data(builder.op()) ? 1 : 2;
  const Unseen unseen(builder.op().random);
  bool singular = not_on_zeros;
  int agreed = 0;
  const auto is_of_use = [&](Filling filling) {
    if (filling == Filling::kIdentity) return singular;
    if (filling == Filling::kTwos || filling == Filling::kFirst) {
      return agreed == 1 && !singular && !has_mask(builder);
    }
    return !not_on_zeros;
  };
  Sizes sizes;
  for (const Filling filling :
       {Filling::kZeros, Filling::kOnes, Filling::kTwos, Filling::kFirst, Filling::kIdentity}) {
    if (!is_of_use(filling)) continue;
    const Outcome trial = run_on_stand_ins(builder, filling);
    if (trial.kind == Outcome::kNoKernel) return false;
    singular = singular || trial.kind == Outcome::kSingular;
    // An error that only these values cause (a division by zero) may not occur with other values.
    if (trial.kind != Outcome::kDone) continue;
    if (agreed == 0) {
      if (!read_results(builder, trial, false, results, list)) return false;
      sizes = sizes_of(trial);
    } else if (sizes_of(trial) != sizes) {
      return false;  // the sizes depend on the values (x[mask])
    }
    if (++agreed == needed) return true;
  }
  return singular && agreed > 0;  // for an op that fails for singular matrices, one run is enough
}

void ask_meta_kernel(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, ViewResult& result) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const at::AutoGradMode no_grad(false);
  const at::Tensor& self = arguments[0].toTensor();
  const int64_t offset = self.unsafeGetTensorImpl()->storage_offset();
  int64_t end = offset + 1;
  for (int64_t d = 0; d < self.dim(); ++d) {
    end += std::max<int64_t>(self.size(d) - 1, 0) * self.stride(d);
  }
  const at::Tensor base = at::empty({end}, self.options().device(at::kMeta).requires_grad(false));
  Stack stack(arguments.begin(), arguments.end());
  stack[0] = base.as_strided(self.sizes(), self.strides(), offset);
  for (size_t i = 1; i < stack.size(); ++i) {
    if (stack[i].isTensor()) return;  // the op reads another tensor
  }
  op.handle.callBoxed(stack);
  result.list = stack.size() == 1 && stack[0].isTensorList();
  const auto views = result.list ? stack[0].toTensorVector() : std::vector<at::Tensor>{};
  const auto give = [&](const at::Tensor& view) {
    if (!view.is_alias_of(base) || view.scalar_type() != self.scalar_type() || view.is_conj() ||
        view.is_neg()) {
      return false;
    }
    ViewGeometry g;
    g.sizes.assign(view.sizes().begin(), view.sizes().end());
    g.strides.assign(view.strides().begin(), view.strides().end());
    g.offset = view.storage_offset();
    result.views.push_back(std::move(g));
    return true;
  };
  bool all = true;
  if (result.list) {
    for (const at::Tensor& view : views) all = all && give(view);
  } else {
    all = stack.size() == 1 && stack[0].isTensor() && give(stack[0].toTensor());
  }
  result.outcome = all ? ViewOutcome::kViews : ViewOutcome::kAsk;
}

// Infers the views that the op would make if argument 0 had the geometry and the offset of `of`.
// Returns an empty list if the op works on addresses instead of elements, or if the views cannot be
// inferred.
std::vector<ElementMap> views_of_element_map(const OpInfo& op, at::ArrayRef<c10::IValue> arguments,
                                             const ElementMap& of, GeometryTable& geometries) {
  if (op.name == "aten::as_strided" || op.name == "aten::_reshape_alias") return {};
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  const auto options = arguments[0].toTensor().options().device(at::kMeta).requires_grad(false);
  Stack stack(arguments.begin(), arguments.end());
  stack[0] = at::empty({of.offset + of.geometry->extent}, options)
                 .as_strided(of.geometry->sizes, of.geometry->strides, of.offset);
  ViewResult result;
  infer_views(op, stack, result);
  if (result.outcome != ViewOutcome::kViews) return {};
  std::vector<ElementMap> out;
  for (const ViewGeometry& view : result.views) {
    out.push_back({of.of, geometries.intern(view.sizes, view.strides), view.offset});
  }
  return out;
}

}  // namespace

bool is_matrix(const at::Tensor& tensor) {
  return tensor.dim() >= 2 && (tensor.is_floating_point() || tensor.is_complex());
}

void fill_with_identity(const at::Tensor& matrices) {
  at::Tensor filled = matrices;
  for (int64_t d = 0; d < matrices.dim(); ++d) {
    if (matrices.stride(d) == 0) filled = filled.narrow(d, 0, std::min<int64_t>(filled.size(d), 1));
  }
  const at::Tensor odd = at::arange(filled.numel(), at::kDouble).square_().sin_();
  filled.copy_(odd.mul_(1e-3).view(filled.sizes()));
  filled.diagonal(0, -2, -1).add_(1);
}

bool is_trying() { return trials_under_way > 0; }

bool infer_results(const NodeBuilder& builder, std::vector<ResultMeta>& results, bool& list) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  if (!stays_on_device(builder)) return false;
  const OpInfo& op = builder.op();
  const Extent operands = operands_of(builder);
  const bool large = operands.elements > kLargestTrial;
  const bool never_tried =
      lists(kNeverTried, op.name) || (op.random && !has_host_memory(builder.device()));
  // Autocast does not cast Meta tensors, and a custom function may not support them.
  const bool cast = op.casts(builder.context()) || op.may_cast_within(builder.context());
  const bool has_meta = !cast && !is_custom_function(op);
  if (never_tried || (large && has_meta && host_may_ask_meta())) {
    const Outcome meta = run_on_stand_ins(builder, Filling::kNoData);
    if (meta.kind != Outcome::kNoKernel) {
      if (meta.kind != Outcome::kDone || !read_results(builder, meta, true, results, list)) {
        return false;
      }
      // For operands that are not row-major, the CPU's kernels often return other strides.
      if (never_tried || operands.contiguous) return true;
    }
  }
  if (never_tried || operands.elements > kLargestNeededTrial) return false;
  return infer_by_trials(builder, results, list);
}

void infer_views(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, ViewResult& result) {
  if (op.view != nullptr) op.view(arguments, result);
  if (result.outcome != ViewOutcome::kAsk || op.name == "aten::as_strided") return;
  result.views.clear();
  try {
    ask_meta_kernel(op, arguments, result);
  } catch (const std::exception&) {
    result.outcome = ViewOutcome::kAsk;  // eager raises the error
  }
}

bool infer_element_maps(const OpInfo& op, at::ArrayRef<c10::IValue> arguments, Graph& graph,
                        c10::SmallVectorImpl<CachedCall::View>& views) {
  const at::Tensor& self = arguments[0].toTensor();
  const PendingTensor* pending = as_pending(self);
  if (pending == nullptr || !self.requires_grad()) return true;
  const Tape& tape = graph.tape();
  const ValueId id = pending->value();
  const Geometry* geometry = tape.values[id].geometry;
  ElementMaps of;
  const auto known = tape.element_maps.find(id);
  if (known != tape.element_maps.end()) of = known->second;
  if (geometry->overlapping && tape.counted_in(id) == id) {
    of.push_back({kNone, graph.geometries().intern_contiguous(geometry->sizes), 0});
  }
  for (const ElementMap& from : of) {
    const std::vector<ElementMap> found =
        views_of_element_map(op, arguments, from, graph.geometries());
    if (found.size() != views.size()) continue;
    for (size_t k = 0; k < found.size(); ++k) views[k].element_maps.push_back(found[k]);
  }
  return known == tape.element_maps.end();
}

}  // namespace autobatch
