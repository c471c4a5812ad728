// Code for `x[index] = value` that depends on the version of PyTorch. This code is not in compat.h,
// because only one file needs this code.
#pragma once

#include <ATen/TensorIndexing.h>

namespace autobatch::compat {

namespace indexing {
using namespace at::indexing::impl;
template <class T>
concept AsksForStorage = requires(const T& tensor) { allowsScalarIndexOnDevice(tensor, tensor); };
}  // namespace indexing

// Whether PyTorch compares the storage of `x` with the storage of a zero-dimensional value to
// decide whether the index stays on its device. For a pending tensor this comparison would start a
// flush.
constexpr bool kSetItemAsksForStorage = indexing::AsksForStorage<at::Tensor>;  // true from 2.15

}  // namespace autobatch::compat
