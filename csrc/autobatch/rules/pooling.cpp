// Pooling over one or two dimensions, with one call for all instances of one size. As in eager,
// pooling over one dimension uses the kernels for two dimensions, with a second dimension of size
// 1.
#include "autobatch/rules/by_shape.h"
#include "autobatch/rules/decompositions.h"

#include <ATen/ATen.h>

namespace autobatch {
namespace {

using at::Tensor;

enum class Kind : uint8_t { kMax, kAverage, kAdaptiveMax, kAdaptiveAverage };

struct Pool {
  const char* op;
  size_t dims;
  Kind kind;
};

// The pooling window of a call, for height and width.
struct Window {
  int64_t kernel[2] = {1, 1}, stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
  bool ceil = false;
  bool count_padding = true;
  std::optional<int64_t> divisor;
};

// Reads an argument into the last `dims` elements of `out`. The argument contains one number for
// each dimension, or a single number for all dimensions. Returns false if the argument has another
// form or a number is below `least`.
bool read(const c10::IValue& value, size_t dims, int64_t least, int64_t (&out)[2]) {
  if (!value.isIntList()) return false;
  const auto list = value.toIntVector();
  if (list.size() != 1 && list.size() != dims) return false;
  for (size_t d = 0; d < dims; ++d) {
    out[d + 2 - dims] = list[list.size() == 1 ? 0 : d];
    if (out[d + 2 - dims] < least) return false;
  }
  return true;
}

// Reads the window of max_pool(x, kernel, stride, padding, dilation, ceil), avg_pool(x, kernel,
// stride, padding, ceil, count_include_pad, divisor) or adaptive_pool(x, sizes). For adaptive_pool,
// the sizes are stored as the kernel. Returns false if the arguments are unusual or invalid. The op
// then checks the arguments itself.
bool read(const Pool& entry, at::ArrayRef<c10::IValue> arguments, Window& window) {
  const size_t dims = entry.dims;
  if (!read(arguments[1], dims, 1, window.kernel)) return false;
  if (entry.kind == Kind::kAdaptiveMax || entry.kind == Kind::kAdaptiveAverage) return true;
  const bool stride_given = !arguments[2].isIntList() || !arguments[2].toIntVector().empty();
  if (!read(arguments[stride_given ? 2 : 1], dims, 1, window.stride)) return false;
  if (!read(arguments[3], dims, 0, window.padding)) return false;
  if (entry.kind == Kind::kMax) {
    window.ceil = arguments[5].toBool();
    return read(arguments[4], dims, 1, window.dilation);
  }
  window.ceil = arguments[4].toBool();
  window.count_padding = arguments[5].toBool();
  if (dims == 2) window.divisor = arguments[6].toOptional<int64_t>();
  return window.divisor != 0;
}

// Returns the result's size in dimension `d`. The returned size is zero or less if eager raises an
// error.
int64_t result_length(const Window& w, size_t d, int64_t length) {
  const int64_t reach = w.dilation[d] * (w.kernel[d] - 1) + 1;
  if (2 * w.padding[d] > (w.dilation[d] > 1 ? reach : w.kernel[d])) return 0;
  const int64_t room = length + 2 * w.padding[d] - reach + (w.ceil ? w.stride[d] - 1 : 0);
  if (room < 0) return 0;
  const int64_t out = room / w.stride[d] + 1;
  // The last window must begin inside the instance or inside its left padding.
  return w.ceil && (out - 1) * w.stride[d] >= length + w.padding[d] ? out - 1 : out;
}

class PoolRule final : public Rule {
 public:
  explicit PoolRule(const Pool& entry) : entry_(entry) {}

  bool reads_result(uint32_t k) const override { return k == 1; }  // the indices of the maxima

  bool capture(NodeBuilder& builder) const override {
    const Value x = builder.operand(0);
    const auto rank = static_cast<size_t>(x.geometry->dim());
    if (rank != entry_.dims + 1 && rank != entry_.dims + 2) return false;
    // If one window covers the instance, a decomposition computes pooling as a reduction.
    if (decomposition_of(builder.op(), builder.arguments()) != nullptr) return false;
    if (!is_float(x) || !row_major(x) || x.geometry->numel == 0) return false;
    Window window;
    if (!read(entry_, builder.arguments(), window)) return false;
    for (size_t i = 1; i < builder.num_arguments(); ++i) {
      if (!builder.constant(i)) return false;
    }
    at::DimVector sizes(x.geometry->sizes.begin(), x.geometry->sizes.end());
    for (size_t d = 0; d < entry_.dims; ++d) {
      const size_t of = d + 2 - entry_.dims;  // 0: height, 1: width
      int64_t& length = sizes[rank - entry_.dims + d];
      length = is_adaptive() ? window.kernel[of] : result_length(window, of, length);
      if (length <= 0) return false;
    }
    builder.key(dtype_word(x) << 8 | rank);
    builder.result(sizes, x.dtype);
    if (entry_.kind == Kind::kAdaptiveMax) builder.result(sizes, at::kLong);
    if (entry_.kind == Kind::kMax) builder.hidden(sizes, at::kLong);
    return true;
  }

  void forward(Batch& batch) const override {
    const Window w = window_of(batch);
    for (const Members& members : groups_of(batch)) {
      const Tensor x = images(stacked_of(batch, 0, members));
      Tensor out, indices;
      switch (entry_.kind) {
        case Kind::kMax:
          std::tie(out, indices) =
              at::max_pool2d_with_indices(x, w.kernel, w.stride, w.padding, w.dilation, w.ceil);
          break;
        case Kind::kAverage:
          out =
              at::avg_pool2d(x, w.kernel, w.stride, w.padding, w.ceil, w.count_padding, w.divisor);
          break;
        case Kind::kAdaptiveMax:
          std::tie(out, indices) = at::adaptive_max_pool2d(x, w.kernel);
          break;
        case Kind::kAdaptiveAverage:
          out = at::_adaptive_avg_pool2d(x, w.kernel);
          break;
      }
      put_results(batch, 0, members, out);
      if (indices.defined()) put_results(batch, 1, members, indices);
    }
  }

  void backward(BackwardBatch& batch) const override {
    const Window w = window_of(batch);
    for (const Members& members : groups_of(batch)) {
      const Tensor x = images(stacked_of(batch, 0, members));
      const Tensor g = images(gradients_of(batch, 0, members));
      Tensor gx;
      switch (entry_.kind) {
        case Kind::kMax:
          gx = at::max_pool2d_with_indices_backward(g, x, w.kernel, w.stride, w.padding, w.dilation,
                                                    w.ceil, indices(batch, members));
          break;
        case Kind::kAverage:
          gx = at::avg_pool2d_backward(g, x, w.kernel, w.stride, w.padding, w.ceil, w.count_padding,
                                       w.divisor);
          break;
        case Kind::kAdaptiveMax:
          gx = at::adaptive_max_pool2d_backward(g, x, indices(batch, members));
          break;
        case Kind::kAdaptiveAverage:
          gx = at::_adaptive_avg_pool2d_backward(g, x);
          break;
      }
      add_gradients(batch, 0, members, gx);
    }
  }

 private:
  bool is_adaptive() const {
    return entry_.kind == Kind::kAdaptiveMax || entry_.kind == Kind::kAdaptiveAverage;
  }

  Window window_of(const BatchView& batch) const {
    Window window;
    read(entry_, batch.signature().arguments, window);
    return window;
  }

  // Reshapes [n, (N,) C, (H,) W] to [n N, C, H, W].
  Tensor images(Tensor t) const {
    if (t.dim() == static_cast<int64_t>(entry_.dims) + 3) t = t.flatten(0, 1);
    if (entry_.dims == 1) t = t.unsqueeze(2);
    return t.contiguous();
  }

  Tensor indices(const BatchView& batch, const Members& members) const {
    return images(results_of(batch, 1, members));
  }

  const Pool& entry_;
};

constexpr Pool kPools[] = {
    {"aten::max_pool1d", 1, Kind::kMax},
    {"aten::max_pool2d", 2, Kind::kMax},
    {"aten::avg_pool1d", 1, Kind::kAverage},
    {"aten::avg_pool2d", 2, Kind::kAverage},
    {"aten::adaptive_max_pool1d", 1, Kind::kAdaptiveMax},
    {"aten::adaptive_max_pool2d", 2, Kind::kAdaptiveMax},
    {"aten::adaptive_avg_pool1d", 1, Kind::kAdaptiveAverage},
    {"aten::adaptive_avg_pool2d", 2, Kind::kAdaptiveAverage},
};

}  // namespace

RuleTable pool_rules() {
  RuleTable table;
  for (const Pool& entry : kPools) table.push_back({entry.op, new PoolRule(entry)});
  return table;
}

}  // namespace autobatch
