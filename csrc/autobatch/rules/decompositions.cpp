#include "autobatch/rules/decompositions.h"

#include "autobatch/common/device_traits.h"
#include "autobatch/graph/pending_tensor.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = Decomposition::Arguments;

// --- copies ---

bool covers_repeat(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const auto repeats = arguments[1].toIntVector();
  return x.numel() > 0 && static_cast<int64_t>(repeats.size()) >= x.dim() &&
         std::ranges::all_of(repeats, [](int64_t n) { return n > 0; });
}

// repeat(x, repeats) makes one copy of a view of x. In this view, a dimension of size `repeats[d]`
// and stride 0 precedes each dimension d.
Tensor repeat(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const auto repeats = arguments[1].toIntVector();
  const size_t new_dims = repeats.size() - static_cast<size_t>(x.dim());
  Tensor view = x;
  at::DimVector expanded, sizes;
  for (size_t d = 0; d < repeats.size(); ++d) {
    const int64_t size = d < new_dims ? 1 : x.size(static_cast<int64_t>(d - new_dims));
    sizes.push_back(size * repeats[d]);
    if (d < new_dims) {
      expanded.push_back(repeats[d]);  // expand() adds leading dimensions by itself
      continue;
    }
    if (repeats[d] > 1) {
      view = view.unsqueeze(static_cast<int64_t>(expanded.size() - new_dims));
      expanded.push_back(repeats[d]);
    }
    expanded.push_back(size);
  }
  return row_major_copy(view.expand(expanded), sizes);
}

// --- products of matrices that belong to the instance ---

// Whether all tensors have the same dtype, and this dtype is precise enough for an addition after
// the product.
bool have_exact_dtype(const Tensor& a, const Tensor& b, const Tensor& c) {
  const auto dtype = a.scalar_type();
  return b.scalar_type() == dtype && c.scalar_type() == dtype &&
         (dtype == at::kFloat || dtype == at::kDouble || c10::isComplexType(dtype));
}

bool broadcasts_to(at::IntArrayRef from, at::IntArrayRef to) {
  if (from.size() > to.size()) return false;
  for (size_t d = 0; d < from.size(); ++d) {
    const int64_t size = from[from.size() - 1 - d];
    if (size != 1 && size != to[to.size() - 1 - d]) return false;
  }
  return true;
}

// Covers addmm(x, a, b, beta, alpha) and baddbmm(x, a, b, beta, alpha), which return beta x + alpha
// a b.
template <int64_t dim>
bool covers_sum_with_product(Arguments arguments) {
  const bool sparse = dim == 2 && is_sparse_product(arguments[1], arguments[2]);
  if (!sparse && !is_strided(arguments[1], dim)) return false;
  if (!is_strided(arguments[0]) || !is_strided(arguments[2], dim)) return false;
  const Tensor &x = arguments[0].toTensor(), &a = arguments[1].toTensor(),
               &b = arguments[2].toTensor();
  if (!have_exact_dtype(x, a, b)) return false;
  if (a.size(-1) != b.size(-2) || a.numel() == 0 || b.numel() == 0) return false;
  at::DimVector sizes(a.sizes());
  sizes.back() = b.size(-1);
  return (dim == 2 || a.size(0) == b.size(0)) && broadcasts_to(x.sizes(), sizes);
}

Tensor sum_with(Arguments arguments, Tensor product) {
  const c10::Scalar beta = arguments[3].toScalar(), alpha = arguments[4].toScalar();
  if (!alpha.equal(1)) product = product.mul(alpha);
  Tensor x = arguments[0].toTensor();
  if (!beta.equal(1)) x = x.mul(beta);
  if (beta.equal(0)) x = x.nan_to_num(0);  // as in eager, x is ignored, even NaN and infinity
  return at::add(product, x);
}

Tensor addmm(Arguments arguments) {
  return sum_with(arguments, at::mm(arguments[1].toTensor(), arguments[2].toTensor()));
}
Tensor baddbmm(Arguments arguments) {
  return sum_with(arguments, at::bmm(arguments[1].toTensor(), arguments[2].toTensor()));
}

bool covers_bilinear(Arguments arguments) {
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  if (!is_strided(arguments[2], 3) || x.dim() == 0 || x.dim() != y.dim()) return false;
  const Tensor& weight = arguments[2].toTensor();
  if (!have_exact_dtype(x, y, weight) || !weight.is_contiguous() || x.numel() == 0) return false;
  if (weight.size(1) != x.size(-1) || weight.size(2) != y.size(-1)) return false;
  if (is_given(arguments[3])) {
    const Tensor& bias = arguments[3].toTensor();
    if (bias.dim() != 1 || bias.size(0) != weight.size(0)) return false;
  }
  return x.sizes().slice(0, x.dim() - 1) == y.sizes().slice(0, y.dim() - 1);
}

// bilinear(x, y, weight, bias) first multiplies y by the weight, viewed as [outputs * width of x,
// width of y]. The product is then multiplied by x and summed over the width of x.
Tensor bilinear(Arguments arguments) {
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor(),
               &weight = arguments[2].toTensor();
  const int64_t outputs = weight.size(0), width = weight.size(1);
  const Tensor product = at::linear(y, weight.view({outputs * width, weight.size(2)}));
  const Tensor result = (product.unflatten(-1, {outputs, width}) * x.unsqueeze(-2)).sum(-1);
  return is_given(arguments[3]) ? result + arguments[3].toTensor() : result;
}

// Returns all sizes of x except the last two.
at::IntArrayRef leading(const Tensor& x) { return x.sizes().slice(0, x.dim() - 2); }

// Whether matmul(x, y) multiplies one matrix x, which is a weight or data, by the columns of y.
// Returns false if the instance computes x, or if y is a weight and x is not.
bool has_shared_left(const Tensor& x, const Tensor& y) {
  if (x.dim() != 2 || as_pending(x) != nullptr) return false;
  return x.requires_grad() || !y.requires_grad() || as_pending(y) != nullptr;
}

// Covers matmul(x, y) where an operand has more dimensions than the native rules accept. The
// operands are x [.., n, d] and a vector y [d], or a matrix x [m, d] and y [.., d, n], or they have
// dimensions before the last two that are broadcast.
bool covers_matmul(Arguments arguments) {
  if (!is_strided(arguments[0]) || !is_strided(arguments[1])) return false;
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  if (x.scalar_type() != y.scalar_type() || !c10::isFloatingType(x.scalar_type())) return false;
  if (x.numel() == 0 || y.numel() == 0) return false;
  if (y.dim() == 1) return x.dim() > 2 && x.size(-1) == y.size(0);
  if (x.dim() < 2 || y.dim() < 3 || x.size(-1) != y.size(-2)) return false;
  return has_shared_left(x, y) ||
         (leading(x) != leading(y) && at::are_expandable(leading(x), leading(y)) &&
          has_host_memory(x.device()));
}

Tensor product(Arguments arguments) {
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  if (y.dim() == 1) {
    at::DimVector sizes(x.sizes());
    sizes.pop_back();
    return at::_unsafe_view(at::mv(x.reshape({-1, x.size(-1)}), y), sizes);
  }
  if (has_shared_left(x, y)) {
    return at::linear(y.mT(), x).mT().clone(at::MemoryFormat::Contiguous);
  }
  // The kernels of `matmul` read expanded matrices in place.
  const auto sizes = at::infer_size_dimvector(leading(x), leading(y));
  const auto expanded = [&](const Tensor& matrix) {
    std::vector<int64_t> all(sizes.begin(), sizes.end());
    all.push_back(matrix.size(-2));
    all.push_back(matrix.size(-1));
    // Without autograd, expand() makes a new tensor from a weight in each call, so the weight would
    // not be recognised.
    return matrix.sizes() == at::IntArrayRef(all) ? matrix : matrix.expand(all);
  };
  return at::matmul(expanded(x), expanded(y));
}

// --- ops with a tensor without dimensions ---

// Covers add(x, y, ..), sub, mul and div where y has no dimensions and its dtype is not the dtype
// of x. The dtype of y does not affect the dtype of the result.
bool covers_number_operand(Arguments arguments) {
  if (!is_strided(arguments[0]) || !is_strided(arguments[1], 0)) return false;
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  const auto dtype = x.scalar_type();
  return x.dim() > 0 && (dtype == at::kFloat || dtype == at::kDouble) && y.scalar_type() != dtype &&
         c10::isFloatingType(y.scalar_type()) && y.device() == x.device() &&
         !y.unsafeGetTensorImpl()->is_wrapped_number();
}

Decomposition::Results with_number_operand(const OpInfo& op, Arguments arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[1] = arguments[1].toTensor().to(arguments[0].toTensor().scalar_type());
  return call_with(op, std::move(stack));
}

constexpr Decomposition kWithNumberOperand = {
    [](const OpInfo&, Arguments arguments) { return covers_number_operand(arguments); },
    with_number_operand};

// --- norms ---

// Covers layer_norm(x, sizes, weight, bias, eps, ..) with a weight that was computed in the block.
bool covers_layer_norm(Arguments arguments) {
  if (!is_strided(arguments[0]) || !is_strided(arguments[2])) return false;
  const Tensor &x = arguments[0].toTensor(), &weight = arguments[2].toTensor();
  return x.numel() > 0 && as_pending(weight) != nullptr && have_exact_dtype(x, weight, x) &&
         (!is_given(arguments[3]) || have_exact_dtype(x, arguments[3].toTensor(), x)) &&
         x.is_contiguous();
}

Tensor layer_norm(Arguments arguments) {
  const Tensor normalized = at::layer_norm(arguments[0].toTensor(), arguments[1].toIntVector(), {},
                                           {}, arguments[4].toDouble());
  const Tensor scaled = normalized * arguments[2].toTensor();
  return is_given(arguments[3]) ? scaled + arguments[3].toTensor() : scaled;
}

// Covers linalg_norm(x, ord, dim, keepdim, dtype) over one dimension, with the default norm.
bool covers_linalg_norm(Arguments arguments) {
  return is_strided(arguments[0]) && arguments[1].isNone() && arguments[2].isIntList() &&
         arguments[2].toIntVector().size() == 1;
}

Tensor linalg_norm(Arguments arguments) {
  return at::linalg_vector_norm(arguments[0].toTensor(), 2, arguments[2].toIntVector(),
                                arguments[3].toBool(), arguments[4].toOptional<at::ScalarType>());
}

// --- distances ---

bool have_one_float_dtype(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() &&
         (a.scalar_type() == at::kFloat || a.scalar_type() == at::kDouble);
}

bool broadcast_together(const Tensor& a, const Tensor& b) {
  const int64_t shared = std::min(a.dim(), b.dim());
  for (int64_t d = 1; d <= shared; ++d) {
    if (a.size(-d) != b.size(-d) && a.size(-d) != 1 && b.size(-d) != 1) return false;
  }
  return true;
}

bool covers_elementwise_pair(Arguments arguments) {
  if (!is_strided(arguments[0]) || !is_strided(arguments[1])) return false;
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  return have_one_float_dtype(x, y) && x.numel() > 0 && y.numel() > 0 && broadcast_together(x, y);
}

// Computes dist(x, y, p).
Tensor distance(Arguments arguments) {
  return (arguments[0].toTensor() - arguments[1].toTensor()).norm(arguments[2].toScalar());
}

// Adds leading dimensions of size 1 to x until x has `rank` dimensions.
Tensor with_rank(Tensor x, int64_t rank) {
  while (x.dim() < rank) x = x.unsqueeze(0);
  return x;
}

// Covers cosine_similarity(x, y, dim, eps).
bool covers_cosine(Arguments arguments) {
  if (!covers_elementwise_pair(arguments)) return false;
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  const int64_t rank = std::max(x.dim(), y.dim()), dim = arguments[2].toInt();
  if (dim >= rank || dim < -rank) return false;
  const int64_t from_end = dim < 0 ? dim : dim - rank;
  return -from_end <= std::min(x.dim(), y.dim()) && x.size(from_end) == y.size(from_end);
}

// Divides x by its norm. A norm below eps is replaced by eps, but the gradient of the norm is not
// changed, as in eager.
Tensor normalized(const Tensor& x, int64_t dim, double eps) {
  const Tensor norm = at::linalg_vector_norm(x, 2, dim, /*keepdim=*/true);
  return x / (norm + (norm.clamp_min(eps) - norm).detach());
}

Tensor cosine(Arguments arguments) {
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  const int64_t rank = std::max(x.dim(), y.dim()), dim = arguments[2].toInt();
  const double eps = arguments[3].toDouble();
  return (normalized(with_rank(x, rank), dim, eps) * normalized(with_rank(y, rank), dim, eps))
      .sum(dim);
}

// Covers cdist(x [.., n, d], y [.., m, d], p, compute_mode).
bool covers_pairs(Arguments arguments) {
  if (!is_strided(arguments[0]) || !is_strided(arguments[1])) return false;
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  return have_one_float_dtype(x, y) && x.dim() >= 2 && x.dim() == y.dim() && x.numel() > 0 &&
         y.numel() > 0 && x.size(-1) == y.size(-1) && arguments[2].toDouble() == 2 &&
         x.sizes().slice(0, x.dim() - 2) == y.sizes().slice(0, y.dim() - 2);
}

// Whether eager computes the distances by a matrix product, which has larger rounding errors.
bool uses_product(const Tensor& x, const Tensor& y, const c10::IValue& mode) {
  constexpr int64_t kMany = 25;
  const int64_t chosen = mode.isNone() ? 0 : mode.toInt();
  return chosen == 1 || (chosen == 0 && (x.size(-2) > kMany || y.size(-2) > kMany));
}

Tensor distances_of_pairs(Arguments arguments) {
  const Tensor &x = arguments[0].toTensor(), &y = arguments[1].toTensor();
  if (!uses_product(x, y, arguments[3])) {
    return at::linalg_vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), 2, -1);
  }
  const Tensor xx = x.square().sum(-1, true), yy = y.square().sum(-1, true);
  const Tensor left = at::cat({x.mul(-2), xx, at::ones_like(xx)}, -1);
  const Tensor right = at::cat({y, at::ones_like(yy), yy}, -1);
  const Tensor squares = at::matmul(left, right.mT());
  // The gradient of a distance of 0 is 0.
  const Tensor none = squares <= 0;
  return squares.masked_fill(none, 1).sqrt().masked_fill(none, 0);
}

// --- pooling with one window, which contains all elements of a channel ---

bool all_equal(at::IntArrayRef numbers, int64_t number) {
  return std::ranges::all_of(numbers, [number](int64_t n) { return n == number; });
}

// Whether the list has one number for each dimension or a single number for all dimensions.
bool fits(at::IntArrayRef numbers, int64_t dims) {
  return numbers.size() == 1 || static_cast<int64_t>(numbers.size()) == dims;
}

// Whether the list has `number` for each dimension.
bool is_each(const c10::IValue& list, int64_t dims, int64_t number) {
  const auto numbers = list.toIntVector();
  return fits(numbers, dims) && all_equal(numbers, number);
}

// Whether the kernel is as large as the last `dims` dimensions of the tensor. Strides must be valid
// or absent.
bool is_one_window(Arguments arguments, int64_t dims) {
  const auto kernel = arguments[1].toIntVector(), strides = arguments[2].toIntVector();
  const at::IntArrayRef all_sizes = arguments[0].toTensor().sizes();
  const at::IntArrayRef sizes = all_sizes.slice(all_sizes.size() - static_cast<size_t>(dims));
  if (!strides.empty() && !fits(strides, dims)) return false;
  if (!std::ranges::all_of(strides, [](int64_t n) { return n > 0; })) return false;
  return kernel.size() == 1 ? all_equal(sizes, kernel[0]) : sizes == at::IntArrayRef(kernel);
}

template <int64_t dims>
bool is_image(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  return (x.dim() == dims + 1 || x.dim() == dims + 2) && x.numel() > 0 &&
         (dims == 1 || x.is_contiguous()) && c10::isFloatingType(x.scalar_type());
}

// Covers max_pool(x, kernel, stride, padding, dilation, ceil).
template <int64_t dims>
bool covers_max_pool(Arguments arguments) {
  return is_image<dims>(arguments) && is_one_window(arguments, dims) &&
         is_each(arguments[3], dims, 0) && is_each(arguments[4], dims, 1);
}

// Covers avg_pool(x, kernel, stride, padding, ceil, count_include_pad, divisor).
template <int64_t dims>
bool covers_average_pool(Arguments arguments) {
  return is_image<dims>(arguments) && is_one_window(arguments, dims) &&
         is_each(arguments[3], dims, 0) && (dims == 1 || arguments[6].isNone());
}

// Covers adaptive_avg_pool(x, sizes).
template <int64_t dims>
bool covers_adaptive_pool(Arguments arguments) {
  return is_image<dims>(arguments) && is_each(arguments[1], dims, 1);
}

// If several elements are equal to the maximum, both max() and max_pool() pass the gradient to the
// first of these elements.
template <int64_t dims, bool is_max>
Tensor pool(Arguments arguments) {
  Tensor x = arguments[0].toTensor().flatten(-dims);
  // If x is a transposed sequence, x is transposed back, because the native rules reduce only
  // row-major tensors.
  const bool transposed = !x.is_contiguous() && x.mT().is_contiguous();
  if (transposed) x = x.mT();
  const int64_t dim = transposed ? -2 : -1;
  const Tensor result = is_max ? std::get<0>(at::max(x, dim, true)) : x.mean(dim, true);
  if (dims == 1) return transposed ? result.mT() : result;
  at::DimVector sizes(arguments[0].toTensor().sizes());
  std::fill_n(sizes.end() - dims, dims, 1);
  return at::_unsafe_view(result, sizes);  // for autograd, the result is not a view
}

// --- gated linear units ---

// Covers glu(x, dim) of tensors that are not row-major. Half precision is not covered, because
// eager does not round the sigmoid.
bool covers_glu(Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  const int64_t dim = arguments[1].toInt();
  const auto dtype = x.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && dim >= -x.dim() && dim < x.dim() &&
         x.size(dim) % 2 == 0;
}

Tensor glu(Arguments arguments) {
  const auto halves = arguments[0].toTensor().chunk(2, arguments[1].toInt());
  return halves[0] * halves[1].sigmoid();
}

// --- losses of sequences and images ---

// Covers cross_entropy_loss(x, target, weight?, ..) and nll_loss_nd(x, target, weight?, ..) where x
// is [N, C, ..] and the target [N, ..] contains labels.
bool covers_class_loss(Arguments arguments) {
  if (!is_strided(arguments[0]) || !is_strided(arguments[1])) return false;
  const Tensor &x = arguments[0].toTensor(), &target = arguments[1].toTensor();
  if (x.dim() < 3 || x.numel() == 0 || !c10::isFloatingType(x.scalar_type())) return false;
  at::DimVector sizes(x.sizes());
  sizes.erase(sizes.begin() + 1);
  return target.scalar_type() == at::kLong && target.sizes() == sizes;
}

// Moves the classes to the last dimension. The resulting rows have the same losses, and the same
// mean loss, as the original call.
Decomposition::Results class_loss(const OpInfo& op, Arguments arguments) {
  const Tensor &x = arguments[0].toTensor(), &target = arguments[1].toTensor();
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack[0] = x.movedim(1, -1).reshape({-1, x.size(1)});
  stack[1] = target.reshape({-1});
  const Tensor loss = call_with(op, std::move(stack))[0];
  return {loss.dim() == 0 ? loss : loss.view(target.sizes())};
}

constexpr Decomposition kClassLoss = {
    [](const OpInfo&, Arguments arguments) { return covers_class_loss(arguments); }, class_loss};

// --- traces ---

bool covers_trace(Arguments arguments) {
  return is_strided(arguments[0], 2) && arguments[0].toTensor().numel() > 0;
}
Tensor trace(Arguments arguments) { return arguments[0].toTensor().diagonal().sum(); }

constexpr DecompositionEntry kEntries[] = {
    {"aten::repeat", one<covers_repeat, repeat>},
    {"aten::addmm", one<covers_sum_with_product<2>, addmm>},
    {"aten::_sparse_addmm", one<covers_sum_with_product<2>, addmm>},
    {"aten::baddbmm", one<covers_sum_with_product<3>, baddbmm>},
    {"aten::bilinear", one<covers_bilinear, bilinear>},
    {"aten::matmul", one<covers_matmul, product>},
    {"aten::add.Tensor", kWithNumberOperand},
    {"aten::sub.Tensor", kWithNumberOperand},
    {"aten::mul.Tensor", kWithNumberOperand},
    {"aten::div.Tensor", kWithNumberOperand},
    {"aten::layer_norm", one<covers_layer_norm, layer_norm>},
    {"aten::linalg_norm", one<covers_linalg_norm, linalg_norm>},
    {"aten::dist", one<covers_elementwise_pair, distance>},
    {"aten::cosine_similarity", one<covers_cosine, cosine>},
    {"aten::cdist", one<covers_pairs, distances_of_pairs>},
    {"aten::max_pool1d", one<covers_max_pool<1>, pool<1, true>>},
    {"aten::max_pool2d", one<covers_max_pool<2>, pool<2, true>>},
    {"aten::avg_pool1d", one<covers_average_pool<1>, pool<1, false>>},
    {"aten::avg_pool2d", one<covers_average_pool<2>, pool<2, false>>},
    {"aten::adaptive_avg_pool1d", one<covers_adaptive_pool<1>, pool<1, false>>},
    {"aten::adaptive_avg_pool2d", one<covers_adaptive_pool<2>, pool<2, false>>},
    {"aten::glu", one<covers_glu, glu>},
    {"aten::cross_entropy_loss", kClassLoss},
    {"aten::nll_loss_nd", kClassLoss},
    {"aten::trace", one<covers_trace, trace>},
};

}  // namespace

Decomposition::Results call_with(const OpInfo& op, torch::jit::Stack arguments) {
  op.handle.callBoxed(arguments);
  Decomposition::Results results;
  for (const c10::IValue& value : arguments) results.push_back(value.toTensor());
  return results;
}

std::vector<const Decomposition*> find_decompositions(std::string_view op) {
  std::vector<const Decomposition*> found;
  for (const DecompositionTable table :
       {DecompositionTable(kEntries), complex_decompositions(), sparse_decompositions(),
        layout_decompositions(), packed_decompositions(), rearranging_decompositions()}) {
    for (const DecompositionEntry& entry : table) {
      if (entry.op == op) found.push_back(&entry.decomposition);
    }
  }
  return found;
}

}  // namespace autobatch
