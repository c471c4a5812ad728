// The part of compat.h for `x[index] = value`. Only one file needs it.
#pragma once

#include <ATen/TensorIndexing.h>

namespace autobatch::compat {

namespace indexing {
using namespace at::indexing::impl;
template <class T>
concept AsksForStorage = requires(const T& tensor) { allowsScalarIndexOnDevice(tensor, tensor); };
}  // namespace indexing

// Whether PyTorch compares the storage of `x` with the storage of a zero-dimensional value, in
// order to leave the index on its device. For a pending tensor this comparison would start a flush.
constexpr bool kSetItemAsksForStorage = indexing::AsksForStorage<at::Tensor>;  // from 2.15 on

}  // namespace autobatch::compat
