// Convolutions. If all instances have the same weight, instances of one size, [C, ..] or [N, C,
// ..], run as one call over the batch dimension. Instances whose sizes differ in one dimension
// (sequences, lines of text) also run as one call. For this call, all instances are copied into one
// buffer, one after another in this dimension, each together with its padding. Results whose window
// covers parts of two instances are discarded. If each instance has its own weight, instances of
// one size run as one call with a group of channels for each instance.
#include "autobatch/common/device_traits.h"
#include "autobatch/rules/by_shape.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>

namespace autobatch {
namespace {

using at::Tensor;

struct Convolution {
  const char* op;
  size_t dims;  // number of spatial dimensions
  bool transposed = false;
  bool named_padding = false;  // whether the padding is "valid" or "same"
};

// Images are joined if at most this many elements per instance are copied, on average. These copies
// take about as long as a call of a convolution takes without its arithmetic.
constexpr int64_t kMostCopied = 8192;

constexpr size_t kInput = 0, kWeight = 1, kBias = 2;  // argument and operand numbers

// The stride, padding and similar arguments of a call, one number for each spatial dimension.
struct Window {
  at::DimVector stride, padding, dilation, output_padding;
  int64_t groups = 1;
};

// Reads a list that has one number for each dimension or a single number for all dimensions.
// Returns false if the list has another form or a number is less than `least`.
bool read(const c10::IValue& value, size_t dims, int64_t least, at::DimVector& out) {
  if (!value.isIntList()) return false;
  const auto list = value.toIntVector();
  if (list.size() != 1 && list.size() != dims) return false;
  for (size_t d = 0; d < dims; ++d) {
    out.push_back(list[list.size() == 1 ? 0 : d]);
    if (out.back() < least) return false;
  }
  return true;
}

// Converts padding that is given by name to one number for each dimension. Returns false if the two
// sides of a dimension have different padding, or if eager raises an error.
bool read_name(const c10::IValue& value, const std::vector<int64_t>& weight, Window& window) {
  const std::string& name = value.toStringRef();
  if (name != "valid" && name != "same") return false;
  for (size_t d = 0; d < window.stride.size(); ++d) {
    const int64_t both = name == "same" ? window.dilation[d] * (weight[d + 2] - 1) : 0;
    if (both % 2 != 0 || (name == "same" && window.stride[d] != 1)) return false;
    window.padding.push_back(both / 2);
  }
  return true;
}

// Reads the arguments of conv(input, weight, bias, stride, padding, dilation, groups) or
// conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation). Returns
// false for values that the op itself must check.
bool read(const Convolution& entry, at::ArrayRef<c10::IValue> arguments,
          const std::vector<int64_t>& weight, Window& window) {
  const size_t dims = entry.dims;
  if (!read(arguments[3], dims, 1, window.stride)) return false;
  if (!read(arguments[entry.transposed ? 7 : 5], dims, 1, window.dilation)) return false;
  if (!entry.transposed) {
    window.output_padding.assign(dims, 0);
  } else if (!read(arguments[5], dims, 0, window.output_padding)) {
    return false;
  }
  window.groups = arguments[6].toInt();
  if (window.groups < 1) return false;
  return entry.named_padding ? read_name(arguments[4], weight, window)
                             : read(arguments[4], dims, 0, window.padding);
}

// Returns the length of the result in dimension d. The length is zero or negative if eager raises
// an error.
int64_t result_length(const Convolution& entry, const Window& w, size_t d, int64_t length,
                      int64_t kernel) {
  const int64_t reach = w.dilation[d] * (kernel - 1) + 1;
  if (entry.transposed) {
    return (length - 1) * w.stride[d] - 2 * w.padding[d] + reach + w.output_padding[d];
  }
  const int64_t room = length + 2 * w.padding[d] - reach;
  return room < 0 ? 0 : room / w.stride[d] + 1;
}

// The positions of images that are joined in one buffer [1, C, ..], and the positions of their
// results in a buffer [1, C', ..]. An image is [C, ..]; a member has one or several images. There
// are zeros before and after each image. The zeros before an image start at a multiple of the
// stride.
struct Joined {
  size_t dim = 0;  // number of the spatial dimension in which the images are joined
  std::vector<int64_t> starts, result_starts;  // by image: its position
  int64_t total = 0, result_total = 0;         // the buffers' sizes in this dimension
};

// Returns how many images a tensor with these sizes has.
int64_t num_images(const std::vector<int64_t>& sizes, size_t dims) {
  return sizes.size() == dims + 2 ? sizes[0] : 1;
}

Joined join(const BatchView& batch, const Window& window, size_t dim) {
  const size_t dims = window.stride.size();
  Joined joined{.dim = dim, .starts = {}, .result_starts = {}};
  const int64_t stride = window.stride[dim], padding = window.padding[dim];
  for (int64_t m = 0; m < batch.size(); ++m) {
    const auto& x = batch.operand_value(m, kInput).geometry->sizes;
    const int64_t length = x[x.size() - dims + dim];
    for (int64_t i = 0; i < num_images(x, dims); ++i) {
      joined.starts.push_back(joined.total + padding);
      joined.result_starts.push_back(joined.total / stride);
      joined.total += (length + 2 * padding + stride - 1) / stride * stride;
    }
  }
  const int64_t kernel = batch.operand_value(0, kWeight).geometry->sizes[2 + dim];
  joined.result_total = (joined.total - window.dilation[dim] * (kernel - 1) - 1) / stride + 1;
  return joined;
}

// Returns the sizes [1, channels, ..] of a buffer. The sizes of `member` are [(N,) C, ..].
at::DimVector buffer_sizes(const std::vector<int64_t>& member, const Joined& joined, size_t dims,
                           int64_t total) {
  at::DimVector sizes{1};
  sizes.append(member.end() - static_cast<int64_t>(dims) - 1, member.end());
  sizes[2 + joined.dim] = total;
  return sizes;
}

// Pairs of regions. The first region of a pair is an image's place in `buffer`, [1, C, ..]. The
// second region is the image's place in its member, [C, ..].
struct Pairs {
  GeometryTable geometries;
  Regions joined, members;

  // Adds the images of one member. `whole` is the member's region, [(N,) C, ..]. starts[next] is
  // the position of the member's first image. The function increases `next` by the number of the
  // member's images.
  void add(const Tensor& buffer, const Region& whole, size_t dim,
           const std::vector<int64_t>& starts, size_t& next) {
    const Geometry& g = *whole.geometry;
    const auto dims = static_cast<size_t>(buffer.dim()) - 2;
    const bool has_images = g.sizes.size() == dims + 2;
    const at::IntArrayRef sizes = at::IntArrayRef(g.sizes).slice(has_images ? 1 : 0);
    const at::IntArrayRef strides = at::IntArrayRef(g.strides).slice(has_images ? 1 : 0);
    const at::IntArrayRef joined_strides = buffer.strides().slice(1);
    for (int64_t i = 0; i < num_images(g.sizes, dims); ++i) {
      const int64_t offset = has_images ? i * g.strides[0] : 0;
      joined.push_back({&buffer, starts[next++] * joined_strides[dim + 1],
                        geometries.intern(sizes, joined_strides)});
      members.push_back({whole.buffer, whole.offset + offset, geometries.intern(sizes, strides)});
    }
  }
};

class ConvolutionRule final : public Rule {
 public:
  explicit ConvolutionRule(const Convolution& entry) : entry_(entry) {}

  bool heavy() const override { return true; }
  bool reads(size_t slot) const override { return slot != kBias; }
  bool reads_result(uint32_t) const override { return false; }
  bool gains_if_shared(size_t slot) const override { return slot != kInput; }

  bool capture(NodeBuilder& builder) const override {
    if (!builder.is_tensor(kInput) || !builder.is_tensor(kWeight)) return false;
    const Value x = builder.operand(kInput);
    const Value w = operand_or_weight(builder, kWeight);
    const auto rank = static_cast<size_t>(x.geometry->dim());
    if ((rank != entry_.dims + 1 && rank != entry_.dims + 2) ||
        w.geometry->sizes.size() != entry_.dims + 2) {
      return false;
    }
    if (x.dtype != w.dtype || !is_float(x) || !row_major_result(x)) return false;
    if (!w.geometry->contiguous || x.geometry->numel == 0 || w.geometry->numel == 0) return false;
    Window window;
    if (!read(entry_, builder.arguments(), w.geometry->sizes, window)) return false;
    for (size_t i = 3; i < builder.num_arguments(); ++i) {
      if (!builder.constant(i)) return false;
    }
    at::DimVector sizes(x.geometry->sizes.begin(), x.geometry->sizes.end());
    if (!to_result(window, w.geometry->sizes, sizes)) return false;
    if (!bias(builder, x, sizes[rank - entry_.dims - 1])) return false;
    builder.key(dtype_word(x) << 8 | rank);
    builder.result(sizes, x.dtype);
    return true;
  }

  void forward(Batch& batch) const override {
    if (!has_one_weight(batch)) return forward_each(batch);
    const Window window = window_of(batch);
    const Tensor weight = batch.single(kWeight);
    std::optional<Tensor> bias;
    if (batch.given(kBias)) bias = batch.single(kBias);
    const auto convolve = [&](const Tensor& x, at::IntArrayRef padding) {
      return at::convolution(x, weight, bias, window.stride, padding, window.dilation,
                             entry_.transposed, window.output_padding, window.groups);
    };
    if (const std::optional<size_t> dim = joined_dim(batch)) {
      const Joined joined = join(batch, window, *dim);
      const Tensor x = joined_input(batch, joined);
      const Tensor out = convolve(x, without_padding(window, *dim)).contiguous();
      Pairs pairs;
      size_t next = 0;
      for (int64_t m = 0; m < batch.size(); ++m) {
        const Region place = batch.result_region(m, 0);
        pairs.add(out, place, *dim, joined.result_starts, next);
      }
      copy_regions(pairs.joined, pairs.members);
      return;
    }
    for (const Members& members : groups_of(batch)) {
      put_results(batch, 0, members, convolve(input(batch, members), window.padding));
    }
  }

  void backward(BackwardBatch& batch) const override {
    if (!has_one_weight(batch)) return backward_each(batch);
    const Window window = window_of(batch);
    const Tensor weight = batch.single(kWeight);
    const int64_t outputs = batch.result_value(0, 0).geometry->sizes[channel_of(batch)];
    const std::array<bool, 3> wanted{batch.needs(kInput), batch.needs(kWeight),
                                     batch.given(kBias) && batch.needs(kBias)};
    // Adds the gradients of weight and bias. Returns the gradient of the input.
    const auto differentiate = [&](const Tensor& g, const Tensor& x, at::IntArrayRef padding) {
      auto [gx, gw, gb] = at::convolution_backward(
          g, x, weight, at::IntArrayRef(outputs), window.stride, padding, window.dilation,
          entry_.transposed, window.output_padding, window.groups, wanted);
      if (wanted[1]) batch.add_single(kWeight, gw);
      if (wanted[2]) batch.add_single(kBias, gb);
      return gx;
    };
    std::optional<size_t> dim = joined_dim(batch);
    Joined joined;
    Tensor joined_x;
    if (dim.has_value()) {
      joined = join(batch, window, *dim);
      joined_x = joined_input(batch, joined);
      if (!is_finite(weight) || !is_finite(joined_x)) dim.reset();
    }
    if (!dim.has_value()) {
      for (const Members& members : groups_of(batch)) {
        const Tensor g = merged(gradients_of(batch, 0, members)).contiguous();
        const Tensor gx = differentiate(g, input(batch, members), window.padding);
        if (wanted[0]) add_gradients(batch, kInput, members, gx);
      }
      return;
    }
    const auto& result = batch.result_value(0, 0).geometry->sizes;
    const Tensor g =
        at::zeros(buffer_sizes(result, joined, entry_.dims, joined.result_total), weight.options());
    Pairs results;
    size_t next = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      results.add(g, batch.grad_region(m, 0), *dim, joined.result_starts, next);
    }
    copy_regions(results.members, results.joined);
    const Tensor gx = differentiate(g, joined_x, without_padding(window, *dim));
    if (wanted[0]) add_joined(batch, joined, gx.contiguous());
  }

 private:
  Window window_of(const BatchView& batch) const {
    Window window;
    read(entry_, batch.signature().arguments, batch.operand_value(0, kWeight).geometry->sizes,
         window);
    return window;
  }

  size_t channel_of(const BatchView& batch) const {
    return batch.operand_value(0, kInput).geometry->sizes.size() - entry_.dims - 1;
  }

  // Whether eager's result is row-major. This is true for row-major inputs. It is also true for
  // transposed matrices, because eager copies them first.
  bool row_major_result(const Value& x) const {
    if (row_major(x)) return true;
    return entry_.dims == 1 && x.geometry->sizes[x.geometry->sizes.size() - 2] > 1 &&
           (x.geometry->dim() == 2 || x.geometry->sizes[0] == 1);
  }

  // Converts the sizes of the input, [(N,) C, ..], to the sizes of the result. Returns false if
  // eager raises an error.
  bool to_result(const Window& window, const std::vector<int64_t>& w, at::DimVector& sizes) const {
    const size_t channel = sizes.size() - entry_.dims - 1;
    if (sizes[channel] != (entry_.transposed ? w[0] : w[1] * window.groups)) return false;
    if (w[0] % window.groups != 0) return false;
    sizes[channel] = entry_.transposed ? w[1] * window.groups : w[0];
    for (size_t d = 0; d < entry_.dims; ++d) {
      if (window.output_padding[d] > 0 &&
          window.output_padding[d] >= std::max(window.stride[d], window.dilation[d])) {
        return false;
      }
      int64_t& length = sizes[channel + 1 + d];
      length = result_length(entry_, window, d, length, w[d + 2]);
      if (length <= 0) return false;
    }
    return true;
  }

  // Captures argument i as a weight, or as an operand if the block computes it. A computed argument
  // can have a different value in each instance.
  static Value operand_or_weight(NodeBuilder& builder, size_t i) {
    if (!builder.is_computed(i)) return builder.weight(i);
    const Value value = builder.operand(i);
    for (const int64_t size : value.geometry->sizes) builder.key(static_cast<uint64_t>(size));
    return value;
  }

  static bool bias(NodeBuilder& builder, const Value& x, int64_t outputs) {
    if (!builder.is_tensor(kBias)) {
      builder.absent(kBias);
      return true;
    }
    const Value b = operand_or_weight(builder, kBias);
    return b.dtype == x.dtype && b.geometry->dim() == 1 && b.geometry->sizes[0] == outputs;
  }

  // Reshapes [n, N, C, ..] to [n N, C, ..].
  Tensor merged(const Tensor& t) const {
    return t.dim() == static_cast<int64_t>(entry_.dims) + 3 ? t.flatten(0, 1) : t;
  }

  Tensor input(const BatchView& batch, const Members& members) const {
    return merged(stacked_of(batch, kInput, members)).contiguous();
  }

  // --- a separate weight for each instance: the channels of each instance are a group ---

  static bool has_one_weight(BatchView& batch) {
    return batch.shared(kWeight) && (!batch.given(kBias) || batch.shared(kBias));
  }

  // Reshapes [n, N, C, ..] to [N, n C, ..], and [n, C, ..] to [1, n C, ..].
  Tensor side_by_side(const Tensor& t) const {
    const bool has_batches = t.dim() == static_cast<int64_t>(entry_.dims) + 3;
    return has_batches ? t.transpose(0, 1).flatten(1, 2) : t.flatten(0, 1).unsqueeze(0);
  }
  // Reshapes [N, n C, ..] to [n, N, C, ..].
  static Tensor taken_apart(const Tensor& t, const Members& members) {
    return t.unflatten(1, {static_cast<int64_t>(members.size()), -1}).transpose(0, 1);
  }

  void forward_each(Batch& batch) const {
    const Window w = window_of(batch);
    for (const Members& members : groups_of(batch)) {
      const auto count = static_cast<int64_t>(members.size());
      std::optional<Tensor> bias;
      if (batch.given(kBias)) bias = stacked_of(batch, kBias, members).flatten();
      const Tensor out = at::convolution(side_by_side(stacked_of(batch, kInput, members)),
                                         stacked_of(batch, kWeight, members).flatten(0, 1), bias,
                                         w.stride, w.padding, w.dilation, entry_.transposed,
                                         w.output_padding, w.groups * count);
      put_results(batch, 0, members, taken_apart(out, members));
    }
  }

  void backward_each(BackwardBatch& batch) const {
    const Window w = window_of(batch);
    const int64_t outputs = batch.result_value(0, 0).geometry->sizes[channel_of(batch)];
    const std::array<bool, 3> wanted{batch.needs(kInput), batch.needs(kWeight),
                                     batch.given(kBias) && batch.needs(kBias)};
    for (const Members& members : groups_of(batch)) {
      const auto count = static_cast<int64_t>(members.size());
      const auto [gx, gw, gb] = at::convolution_backward(
          side_by_side(gradients_of(batch, 0, members)),
          side_by_side(stacked_of(batch, kInput, members)),
          stacked_of(batch, kWeight, members).flatten(0, 1), at::IntArrayRef{outputs * count},
          w.stride, w.padding, w.dilation, entry_.transposed, w.output_padding, w.groups * count,
          wanted);
      if (wanted[0]) add_gradients(batch, kInput, members, taken_apart(gx, members));
      if (wanted[1]) add_gradients(batch, kWeight, members, gw);
      if (wanted[2]) add_gradients(batch, kBias, members, gb);
    }
  }

  // --- instances whose sizes differ in one spatial dimension ---

  // Returns the number of the dimension in which the instances are joined. Returns nothing if all
  // sizes are equal or differ in several spatial dimensions, or if the copies would take longer
  // than a call for each size.
  std::optional<size_t> joined_dim(const BatchView& batch) const {
    if (entry_.transposed || batch.uniform_result(0)) return {};
    // In lower precision, kernels also read elements outside a window, and multiply them by zero.
    // An infinity in one instance would make results of another instance NaN.
    if (c10::isReducedFloatingType(batch.operand_value(0, kInput).dtype)) return {};
    if (entry_.dims > 1 && copied_elements(batch) > batch.size() * kMostCopied) return {};
    std::optional<size_t> found;
    const auto& first = batch.operand_value(0, kInput).geometry->sizes;
    for (size_t d = 0; d < entry_.dims; ++d) {
      const size_t at = first.size() - entry_.dims + d;
      bool differs = false;
      for (int64_t m = 1; m < batch.size() && !differs; ++m) {
        differs = batch.operand_value(m, kInput).geometry->sizes[at] != first[at];
      }
      if (differs && found.has_value()) return {};
      if (differs) found = d;
    }
    return found.value_or(0);
  }

  // Whether a tensor has neither infinities nor NaN. The gradients of results whose window covers
  // parts of two instances are zero, and zero times infinity is NaN. On other devices, the host
  // would have to wait for the answer, so the tensor is assumed to be finite.
  static bool is_finite(const Tensor& x) {
    return !has_host_memory(x.device()) || std::isfinite(x.sum().item<double>());
  }

  // Returns the number of elements that are copied into and out of the buffers.
  static int64_t copied_elements(const BatchView& batch) {
    int64_t copied = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      copied += batch.operand_value(m, kInput).geometry->numel;
      copied += batch.result_value(m, 0).geometry->numel;
    }
    return copied;
  }

  // Returns the padding for the call on the buffer. In dimension `dim` it is zero, because the
  // buffer itself contains this padding.
  static at::DimVector without_padding(const Window& window, size_t dim) {
    at::DimVector padding = window.padding;
    padding[dim] = 0;
    return padding;
  }

  Tensor joined_input(const BatchView& batch, const Joined& joined) const {
    const auto& x = batch.operand_value(0, kInput).geometry->sizes;
    const Tensor out = at::zeros(buffer_sizes(x, joined, entry_.dims, joined.total),
                                 batch.operand_value(0, kWeight).options());
    Pairs pairs;
    size_t next = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const Region region = batch.operand_region(m, kInput);
      pairs.add(out, region, joined.dim, joined.starts, next);
    }
    copy_regions(pairs.members, pairs.joined);
    return out;
  }

  void add_joined(BackwardBatch& batch, const Joined& joined, const Tensor& gradient) const {
    Pairs pairs;
    size_t next = 0;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const ValueId id = batch.operand(m, kInput);
      const auto& sizes = batch.operand_value(m, kInput).geometry->sizes;
      if (batch.wanted(id)) {
        pairs.add(gradient, batch.target(m, id), joined.dim, joined.starts, next);
      } else {
        next += static_cast<size_t>(num_images(sizes, entry_.dims));
      }
    }
    add_regions(pairs.joined, pairs.members);
  }

  const Convolution& entry_;
};

constexpr Convolution kConvolutions[] = {
    {"aten::conv1d", 1},
    {"aten::conv2d", 2},
    {"aten::conv3d", 3},
    {"aten::conv1d.padding", 1, false, true},
    {"aten::conv2d.padding", 2, false, true},
    {"aten::conv3d.padding", 3, false, true},
    {"aten::conv_transpose1d", 1, true},
    {"aten::conv_transpose2d.input", 2, true},
    {"aten::conv_transpose3d.input", 3, true},
};

}  // namespace

RuleTable conv_rules() {
  RuleTable table;
  for (const Convolution& entry : kConvolutions) {
    table.push_back({entry.op, new ConvolutionRule(entry)});
  }
  return table;
}

}  // namespace autobatch
