// Helpers for the tests of scopes.
#pragma once

#include "autobatch/autobatch.h"
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace autobatch {

using at::Tensor;
using Tensors = std::vector<Tensor>;

inline bool is_pending(const Tensor& tensor) {
  const PendingTensor* pending = as_pending(tensor);
  return pending != nullptr && pending->is_pending();
}

inline Tensor constant(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }
inline Tensor leaf(at::IntArrayRef sizes) { return constant(sizes).requires_grad_(true); }

inline Tensors constants(size_t count, at::IntArrayRef sizes) {
  Tensors out;
  for (size_t i = 0; i < count; ++i) out.push_back(constant(sizes));
  return out;
}
inline Tensors leaves(size_t count, at::IntArrayRef sizes) {
  Tensors out;
  for (size_t i = 0; i < count; ++i) out.push_back(leaf(sizes));
  return out;
}
inline Tensors joined(std::initializer_list<Tensors> lists) {
  Tensors out;
  for (const Tensors& list : lists) out.insert(out.end(), list.begin(), list.end());
  return out;
}

// Returns the weighted sum of all elements of the values that require grad. The weights differ from
// element to element.
inline Tensor loss_of(const Tensors& values) {
  Tensor loss = at::zeros({}, at::kDouble);
  double phase = 0;
  for (const Tensor& value : values) {
    const Tensor weights = at::arange(value.numel(), at::kDouble).add(phase++).cos();
    if (value.requires_grad()) loss = loss + (value.reshape({-1}) * weights).sum();
  }
  return loss;
}

inline Tensors gradients(const Tensor& loss, const Tensors& inputs) {
  return torch::autograd::grad({loss}, inputs, {}, std::nullopt, false, /*allow_unused=*/true);
}

inline void check_same(const Tensor& ours, const Tensor& eager) {
  REQUIRE(ours.defined() == eager.defined());
  if (!eager.defined()) return;
  CHECK(ours.sizes() == eager.sizes());
  CHECK(ours.scalar_type() == eager.scalar_type());
  CHECK(at::allclose(ours, eager, 1e-9, 1e-12, /*equal_nan=*/true));
}

inline void check_same(const Tensors& ours, const Tensors& eager) {
  REQUIRE(ours.size() == eager.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    check_same(ours[i], eager[i]);
  }
}

using Program = std::function<Tensors()>;

// Runs the program eagerly and in a scope. Checks that both give the same values, the same
// gradients of `inputs`, and the same metadata both before and after the values are computed.
// Returns the scope's report.
inline Report check_program(const Tensors& inputs, const Program& program,
                            const ScopeOptions& options = {}) {
  const Tensors eager = program();
  const Tensors eager_grads = inputs.empty() ? Tensors() : gradients(loss_of(eager), inputs);
  Tensors ours;
  Report report;
  {
    BatchScope scope(options);
    ours = program();
    REQUIRE(ours.size() == eager.size());
    for (size_t i = 0; i < ours.size(); ++i) {
      CAPTURE(i);
      CHECK(ours[i].sizes() == eager[i].sizes());
      CHECK(ours[i].strides() == eager[i].strides());
      CHECK(ours[i].requires_grad() == eager[i].requires_grad());
    }
    scope.flush();
    report = scope.report();
  }
  for (const Tensor& value : ours) CHECK(as_pending(value) == nullptr);
  check_same(ours, eager);
  if (!inputs.empty()) check_same(gradients(loss_of(ours), inputs), eager_grads);
  return report;
}

// Returns the sum of the report's rows for `op`.
inline SignatureReport row_of(const Report& report, std::string_view op) {
  SignatureReport sum;
  for (const SignatureReport& row : report.signatures) {
    if (row.op != op) continue;
    sum.instances += row.instances;
    sum.batches += row.batches;
    sum.launches += row.launches;
    sum.largest = std::max(sum.largest, row.largest);
  }
  return sum;
}

}  // namespace autobatch
