// The part of compat.h about `x[index] = value`, for the one file that needs it.
#pragma once

#include <ATen/TensorIndexing.h>

namespace autobatch::compat {

namespace indexing {
using namespace at::indexing::impl;
template <class T>
concept AsksForStorage = requires(const T& tensor) { allowsScalarIndexOnDevice(tensor, tensor); };
}  // namespace indexing

// Whether PyTorch compares the storages of `x` and of a zero-dimensional value, so that an index
// may stay on its device. The comparison would compute pending tensors.
constexpr bool kSetItemAsksForStorage = indexing::AsksForStorage<at::Tensor>;  // from 2.15 on

}  // namespace autobatch::compat
