// Ops that copy or rearrange the elements of sequences and images: padding with elements of the
// tensor, windows, pixel shuffles, and nearest-neighbor upsampling.
#include "autobatch/rules/decompositions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = Decomposition::Arguments;

// --- padding with elements of the tensor ---

// Returns the elements to insert before or after x in dimension d. `count` is at least 1.
using Border = Tensor (*)(const Tensor& x, int64_t d, int64_t count, bool before);

Tensor reflected(const Tensor& x, int64_t d, int64_t count, bool before) {
  return x.narrow(d, before ? 1 : x.size(d) - 1 - count, count).flip(d);
}

Tensor replicated(const Tensor& x, int64_t d, int64_t count, bool before) {
  at::DimVector sizes(x.sizes());
  sizes[static_cast<size_t>(d)] = count;
  return x.narrow(d, before ? 0 : x.size(d) - 1, 1).expand(sizes);
}

Tensor wrapped_around(const Tensor& x, int64_t d, int64_t count, bool before) {
  return x.narrow(d, before ? x.size(d) - count : 0, count);
}

Border border_of(std::string_view mode) {
  return mode == "reflect"     ? reflected
         : mode == "replicate" ? replicated
         : mode == "circular"  ? wrapped_around
                               : nullptr;
}

// Returns the largest number of elements that a border can have in a dimension of this size.
int64_t largest_border(std::string_view mode, int64_t size) {
  return mode == "reflect" ? size - 1 : mode == "circular" ? size : INT64_MAX;
}

// Covers pad(x, pad, mode, value) where all dimensions of x except the first one or two are padded.
bool covers_pad(Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  const std::string_view mode = arguments[2].toStringRef();
  const auto pads = arguments[1].toIntVector();
  const auto padded = static_cast<int64_t>(pads.size() / 2);
  if (border_of(mode) == nullptr || !arguments[3].isNone() || x.numel() == 0) return false;
  if (pads.size() % 2 != 0 || padded == 0) return false;
  if (x.dim() != padded + 1 && x.dim() != padded + 2) return false;
  // In eager, the result of a channels-last image is channels-last.
  if (padded > 1 && !x.is_contiguous()) return false;
  for (size_t i = 0; i < pads.size(); ++i) {
    const int64_t size = x.size(x.dim() - 1 - static_cast<int64_t>(i / 2));
    if (pads[i] < 0 || pads[i] > largest_border(mode, size)) return false;
  }
  return true;
}

Tensor pad(Arguments arguments) {
  Tensor x = arguments[0].toTensor();
  const Border border = border_of(arguments[2].toStringRef());
  const auto pads = arguments[1].toIntVector();
  for (size_t i = 0; i < pads.size(); i += 2) {
    const int64_t d = x.dim() - 1 - static_cast<int64_t>(i / 2);
    c10::SmallVector<Tensor, 3> pieces;
    if (pads[i] > 0) pieces.push_back(border(x, d, pads[i], true));
    pieces.push_back(x);
    if (pads[i + 1] > 0) pieces.push_back(border(x, d, pads[i + 1], false));
    if (pieces.size() > 1) x = at::cat(at::TensorList(pieces), d);
  }
  // If all padding numbers are 0, the result is a copy of x, as in eager.
  return x.is_same(arguments[0].toTensor()) ? x.clone() : x;
}

// --- rolling ---

// Covers roll(x, shifts, dims) over one dimension.
bool covers_roll(Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  const auto dims = arguments[2].toIntVector();
  return x.numel() > 0 && arguments[1].toIntVector().size() == 1 && dims.size() == 1 &&
         dims[0] >= -x.dim() && dims[0] < x.dim() &&
         x.suggest_memory_format() == at::MemoryFormat::Contiguous;
}

Tensor roll(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const int64_t d = arguments[2].toIntVector()[0], size = x.size(d);
  const int64_t first = ((arguments[1].toIntVector()[0] % size) + size) % size;  // not negative
  if (first == 0) return x.clone(at::MemoryFormat::Contiguous);
  return at::cat({x.narrow(d, size - first, first), x.narrow(d, 0, size - first)}, d);
}

// --- windows ---

// Covers im2col(x, kernel, dilation, padding, stride) for images [N, C, H, W] or [C, H, W].
bool covers_windows(Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  if ((x.dim() != 3 && x.dim() != 4) || x.numel() == 0) return false;
  const auto kernel = arguments[1].toIntVector(), dilation = arguments[2].toIntVector(),
             padding = arguments[3].toIntVector(), stride = arguments[4].toIntVector();
  for (const auto& list : {kernel, dilation, padding, stride}) {
    if (list.size() != 2) return false;
  }
  for (size_t d = 0; d < 2; ++d) {
    if (dilation[d] != 1 || padding[d] < 0 || stride[d] <= 0 || kernel[d] <= 0) return false;
    if (x.size(x.dim() - 2 + static_cast<int64_t>(d)) + 2 * padding[d] < kernel[d]) return false;
  }
  return true;
}

Tensor windows(Arguments arguments) {
  Tensor x = arguments[0].toTensor().contiguous();
  const auto kernel = arguments[1].toIntVector(), padding = arguments[3].toIntVector(),
             stride = arguments[4].toIntVector();
  const bool is_batch = x.dim() == 4;
  if (!is_batch) x = x.unsqueeze(0);
  if (padding[0] > 0 || padding[1] > 0) {
    x = at::constant_pad_nd(x, {padding[1], padding[1], padding[0], padding[0]});
  }
  x = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]);
  const int64_t rows = x.size(1) * kernel[0] * kernel[1], columns = x.size(2) * x.size(3);
  x = row_major_copy(x.permute({0, 1, 4, 5, 2, 3}), {x.size(0), rows, columns});
  return is_batch ? x : x.squeeze(0);
}

// --- pixel shuffles ---

// Covers pixel_shuffle(x [.., C r^2, H, W], r), which returns [.., C, H r, W r].
bool covers_shuffle(Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  const int64_t factor = arguments[1].toInt();
  return x.dim() >= 3 && x.numel() > 0 && x.is_contiguous() && factor > 0 &&
         x.size(-3) % (factor * factor) == 0;
}

Tensor shuffle(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const int64_t r = arguments[1].toInt(), channels = x.size(-3) / (r * r);
  at::DimVector sizes(x.sizes().slice(0, static_cast<size_t>(x.dim() - 3)));
  sizes.append({channels, x.size(-2) * r, x.size(-1) * r});
  const Tensor parts = x.reshape({-1, channels, r, r, x.size(-2), x.size(-1)});
  return row_major_copy(parts.permute({0, 1, 4, 2, 5, 3}), sizes);
}

// Covers pixel_unshuffle(x [.., C, H r, W r], r), which returns [.., C r^2, H, W].
bool covers_unshuffle(Arguments arguments) {
  if (!is_strided(arguments[0])) return false;
  const Tensor& x = arguments[0].toTensor();
  const int64_t factor = arguments[1].toInt();
  return x.dim() >= 3 && x.numel() > 0 && x.is_contiguous() && factor > 0 &&
         x.size(-2) % factor == 0 && x.size(-1) % factor == 0;
}

Tensor unshuffle(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const int64_t r = arguments[1].toInt(), height = x.size(-2) / r, width = x.size(-1) / r;
  at::DimVector sizes(x.sizes().slice(0, static_cast<size_t>(x.dim() - 3)));
  sizes.append({x.size(-3) * r * r, height, width});
  const Tensor parts = x.reshape({-1, x.size(-3), height, r, width, r});
  return row_major_copy(parts.permute({0, 1, 3, 5, 2, 4}), sizes);
}

// --- upsampling ---

// Returns the index of the operand's element that eager's kernel copies to position i of the
// result. `scale` is the scale factor of the call, or 0.
int64_t nearest(int64_t i, int64_t size, int64_t result_size, double scale) {
  const float step = scale > 0 ? static_cast<float>(1 / scale)
                               : static_cast<float>(size) / static_cast<float>(result_size);
  return std::min(static_cast<int64_t>(std::floor(static_cast<float>(i) * step)), size - 1);
}

// The arguments of upsample_nearest1d(x, sizes, scale), upsample_nearest2d(x, sizes, scale, scale),
// and their overloads `vec` (x, sizes?, scales?).
struct Upsampling {
  at::DimVector sizes;                 // sizes of the result's last dimensions
  c10::SmallVector<double, 2> scales;  // by dimension; 0: not given
};

Upsampling read_upsampling(Arguments arguments, size_t dims) {
  const at::IntArrayRef of_x = arguments[0].toTensor().sizes().slice(2);
  Upsampling result;
  for (size_t d = 0; d < dims; ++d) {
    const bool is_list = arguments[2].isDoubleList();
    const c10::IValue scale = is_list ? c10::IValue(arguments[2].toDoubleVector().at(d))
                                      : arguments[std::min(2 + d, arguments.size() - 1)];
    result.scales.push_back(scale.isNone() ? 0 : scale.toDouble());
    result.sizes.push_back(
        arguments[1].isIntList()
            ? arguments[1].toIntVector().at(d)
            : static_cast<int64_t>(static_cast<double>(of_x[d]) * result.scales[d]));
  }
  return result;
}

// Covers upsampling that repeats each element the same number of times.
template <size_t dims>
bool covers_nearest(Arguments arguments) {
  if (!is_strided(arguments[0], dims + 2)) return false;
  const Tensor& x = arguments[0].toTensor();
  if (x.numel() == 0 || (dims > 1 && !x.is_contiguous())) return false;  // channels-last
  for (size_t i = 1; i < 3; ++i) {
    if (arguments[i].isList() && arguments[i].toListRef().size() != dims) return false;
  }
  if (arguments[1].isNone() && !arguments[2].isDoubleList()) return false;
  const Upsampling upsampling = read_upsampling(arguments, dims);
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = x.size(2 + static_cast<int64_t>(d)), result_size = upsampling.sizes[d];
    if (result_size <= 0 || result_size % size != 0) return false;
    const int64_t factor = result_size / size;
    for (int64_t i = 0; factor > 2 && i < result_size; ++i) {  // factors 1 and 2 need no check
      if (nearest(i, size, result_size, upsampling.scales[d]) != i / factor) return false;
    }
  }
  return true;
}

template <size_t dims>
Tensor repeat_each(Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const Upsampling upsampling = read_upsampling(arguments, dims);
  at::DimVector expanded{x.size(0), x.size(1)}, merged{x.size(0), x.size(1)};
  Tensor view = x;
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = x.size(2 + static_cast<int64_t>(d)), result_size = upsampling.sizes[d];
    view = view.unsqueeze(3 + 2 * static_cast<int64_t>(d));
    expanded.append({size, result_size / size});
    merged.push_back(result_size);
  }
  return row_major_copy(view.expand(expanded), merged);
}

constexpr DecompositionEntry kEntries[] = {
    {"aten::pad", one<covers_pad, pad>},
    {"aten::roll", one<covers_roll, roll>},
    {"aten::im2col", one<covers_windows, windows>},
    {"aten::pixel_shuffle", one<covers_shuffle, shuffle>},
    {"aten::pixel_unshuffle", one<covers_unshuffle, unshuffle>},
    {"aten::upsample_nearest1d", one<covers_nearest<1>, repeat_each<1>>},
    {"aten::upsample_nearest1d.vec", one<covers_nearest<1>, repeat_each<1>>},
    {"aten::upsample_nearest2d", one<covers_nearest<2>, repeat_each<2>>},
    {"aten::upsample_nearest2d.vec", one<covers_nearest<2>, repeat_each<2>>},
};

}  // namespace

DecompositionTable rearranging_decompositions() { return kEntries; }

}  // namespace autobatch
