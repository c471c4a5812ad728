// Compares the kernels of elementwise programs with ATen: the CPU kernel, and the CUDA kernel
// compiled for the CPU (cuda_on_cpu/).
#include "autobatch/kernels/cuda/elementwise_plan.h"
#include "autobatch/kernels/elementwise_device.h"
#include "cuda_on_cpu/kernels_on_cpu.h"
#include "gather_test.h"

#include "catch.h"

#include <cstring>
#include <functional>

namespace autobatch {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

int64_t launches_of(const ElementwiseProgram& program) {
  cuda::ElementwisePlan plan = cuda::plan_elementwise(program);
  std::vector<char> scratch(static_cast<size_t>(plan.scratch_bytes) + 16, static_cast<char>(0xff));
  if (plan.scratch_bytes > 0) {
    const auto at = reinterpret_cast<uintptr_t>(scratch.data());
    plan.task.scratch = scratch.data() + (16 - at % 16) % 16;
  }
  const int64_t before = cuda_on_cpu::launcher.launches;
  const auto steps = static_cast<int64_t>(plan.steps.size());
  REQUIRE(run_elementwise_on_cpu(plan.task, plan.steps.data(), steps) == 0);
  return cuda_on_cpu::launcher.launches - before;
}

// Returns the place of a tensor [rows, width] with dense rows.
ElementwisePlace rows_of(const Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.size(0) == 1 ? 0 : tensor.stride(0), 0};
}

struct Expected {
  ElementwiseOp op;
  std::function<Tensor(const Tensor& a, const Tensor& b)> by_aten;
};

const std::vector<Expected>& all_ops() {
  static const std::vector<Expected> ops = {
      {{ElementwiseCode::kCopy}, [](const Tensor& a, const Tensor&) { return a.clone(); }},
      {{ElementwiseCode::kNeg}, [](const Tensor& a, const Tensor&) { return a.neg(); }},
      {{ElementwiseCode::kAddNumber, 0.5, 2},
       [](const Tensor& a, const Tensor&) { return a * 2 + 0.5; }},
      {{ElementwiseCode::kMulNumber, 1.5}, [](const Tensor& a, const Tensor&) { return a * 1.5; }},
      {{ElementwiseCode::kAdd, 0, -0.5},
       [](const Tensor& a, const Tensor& b) { return a.sub(b, 0.5); }},
      {{ElementwiseCode::kDivNumber, 1.5}, [](const Tensor& a, const Tensor&) { return a / 1.5; }},
      {{ElementwiseCode::kMul}, [](const Tensor& a, const Tensor& b) { return a * b; }},
      {{ElementwiseCode::kDiv}, [](const Tensor& a, const Tensor& b) { return a / b; }},
#define INTO(...)
#define FUSED_ELEMENTWISE_OP(Name, op, reads, formula, gradient, forward, backward, ...)          \
  {{ElementwiseCode::k##Name},                                                                    \
   [](const Tensor& x, const Tensor&) -> Tensor {                                                 \
     Tensor o = at::empty_like(x);                                                                \
     return forward;                                                                              \
   }},                                                                                            \
      {{ElementwiseCode::k##Name##Backward}, [](const Tensor& g, const Tensor& value) -> Tensor { \
         [[maybe_unused]] const Tensor &x = value, &y = value;                                    \
         return backward;                                                                         \
       }},
#include "autobatch/kernels/elementwise_ops.inc"
#undef INTO
  };
  return ops;
}

void check_close(const Tensor& found, const Tensor& expected) {
  const bool half = found.element_size() == 2;
  const double tolerance = half ? 2e-2 : found.element_size() == 4 ? 1e-6 : 1e-14;
  CHECK(at::allclose(found, expected, tolerance, tolerance, /*equal_nan=*/true));
}

}  // namespace

TEST_CASE("elementwise: each op as vectors of the CPU", "[kernels]") {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    if (!has_elementwise_kernel(at::kCPU, dtype)) continue;
    for (const Expected& op : all_ops()) {
      const Tensor a = at::randn({700, 37}, dtype), b = at::randn({700, 37}, dtype);
      a[0][0] = std::numeric_limits<double>::quiet_NaN();
      b[0][1] = 0;
      const Tensor out = at::full_like(a, 9);
      const ElementwiseStep step{op.op, 1, 37, rows_of(out), rows_of(a), rows_of(b)};
      CAPTURE(static_cast<int>(op.op.code), dtype);
      run_elementwise({step, dtype, 700, 37, 0}, at::kCPU);
      check_close(out, op.by_aten(a, b));
    }
  }
}

TEST_CASE("elementwise on the CPU: each op in each type", "[kernels]") {
  for (const at::ScalarType dtype : kDtypes) {
    for (const Expected& op : all_ops()) {
      for (const int64_t rows : {1, 3, 700}) {
        const Tensor a = at::randn({rows, 37}).to(dtype), b = at::randn({rows, 37}).to(dtype);
        a[0][0] = std::numeric_limits<double>::quiet_NaN();
        a[0][1] = std::numeric_limits<double>::infinity();
        const Tensor out = at::full_like(a, 9);
        const ElementwiseStep step{op.op, 1, 37, rows_of(out), rows_of(a), rows_of(b)};
        CAPTURE(static_cast<int>(op.op.code), rows, dtype);
        CHECK(launches_of({step, dtype, rows, 37, 0}) == 1);
        check_close(out, op.by_aten(a, b));
      }
    }
  }
}

TEST_CASE("elementwise on the CPU: runs of wider rows, and a row that all share", "[kernels]") {
  const int64_t rows = 300, mid = 3, inner = 5;
  const Tensor a = at::randn({rows, mid, 8}), b = at::randn({1, mid, 6}),
               out = at::zeros({rows, mid, 7});
  const ElementwisePlace place_a{static_cast<float*>(a.mutable_data_ptr()) + 2, mid * 8, 8};
  const ElementwisePlace place_b{static_cast<float*>(b.mutable_data_ptr()) + 1, 0, 6};
  const ElementwisePlace place_out{out.mutable_data_ptr(), mid * 7, 7};
  const ElementwiseStep step{{ElementwiseCode::kMul}, mid, inner, place_out, place_a, place_b};
  CHECK(launches_of({step, at::kFloat, rows, mid * inner, 0}) == 1);
  check_close(out.narrow(2, 0, inner), a.narrow(2, 2, inner) * b.narrow(2, 1, inner));
  CHECK(out.narrow(2, inner, 2).count_nonzero().item<int64_t>() == 0);
}

TEST_CASE("elementwise on the CPU: the gradient of what is broadcast is a sum", "[kernels]") {
  const int64_t rows = 300, mid = 4, inner = 5;
  for (const at::ScalarType dtype : kDtypes) {
    const Tensor gradient = at::randn({rows, mid, inner}).to(dtype);
    const Tensor out = at::ones({rows, inner}).to(dtype);
    const ElementwisePlace to{out.mutable_data_ptr(), inner, 0};
    const ElementwisePlace from{gradient.mutable_data_ptr(), mid * inner, inner};
    const ElementwiseStep step{{ElementwiseCode::kAdd}, mid, inner, to, to, from};
    CHECK(launches_of({step, dtype, rows, mid * inner, 0}) == 1);
    check_close(out, gradient.to(at::kDouble).sum(1).add(1).to(dtype));
  }
}

TEST_CASE("elementwise on the CPU: temporaries, in shared memory and beside it", "[kernels]") {
  for (const int64_t width : {16, 9000}) {         // 2 * 9000 floats are more than 48 KB
    for (const int64_t turns : {1, 200}) {         // 200 turns of 2 steps need two launches
      const int64_t rows = width == 16 ? 600 : 5;  // several rows per block, or one
      const Tensor a = at::randn({rows, width}), out = at::empty({rows, width});
      const ElementwisePlace first{nullptr, width, 0, 0}, second{nullptr, width, 0, width};
      std::vector<ElementwiseStep> steps{
          {{ElementwiseCode::kTanh}, 1, width, first, rows_of(a), {}}};
      Tensor expected = a.tanh();
      for (int64_t turn = 0; turn < turns; ++turn) {
        steps.push_back({{ElementwiseCode::kMulNumber, 0.5}, 1, width, second, first, {}});
        steps.push_back({{ElementwiseCode::kAdd}, 1, width, first, second, rows_of(a)});
        expected = expected * 0.5 + a;
      }
      steps.push_back({{ElementwiseCode::kCopy}, 1, width, rows_of(out), first, {}});
      CAPTURE(width, turns);
      const auto count = static_cast<int64_t>(steps.size());
      CHECK(launches_of({steps, at::kFloat, rows, width * count, 2 * width}) ==
            (count > cuda::kMostKernelSteps ? 2 : 1));
      check_close(out, expected);
    }
  }
}

}  // namespace autobatch
