// Tests that need a CUDA device: they compare CUDA kernels with CPU kernels, and run scopes. Tagged
// [cuda]. Without a device each test prints a warning and passes.
#include "gather_test.h"
#include "scope_test.h"

#include <ATen/Context.h>

namespace autobatch {
namespace {

#define NEEDS_CUDA()                                           \
  if (!at::hasCUDA()) {                                        \
    WARN("skipped: needs a CUDA device, and torch sees none"); \
    return;                                                    \
  }                                                            \
  static_assert(true, "a semicolon follows")

const auto kDevice = at::Device(at::kCUDA, 0);

// The regions of `memory`, in copies of its buffers on the device.
class OnDevice {
 public:
  explicit OnDevice(TestMemory& memory) {
    for (const Tensor& buffer : memory.buffers()) buffers_.push_back(buffer.to(kDevice));
    for (Region region : memory.regions) {
      for (size_t b = 0; b < buffers_.size(); ++b) {
        if (region.buffer == &memory.buffers()[b]) {
          region.buffer = &buffers_[b];
          break;
        }
      }
      regions.push_back(region);
    }
  }

  std::vector<Tensor> buffers() const {
    std::vector<Tensor> all;
    for (const Tensor& buffer : buffers_) all.push_back(buffer.cpu());
    return all;
  }

  Regions regions;

 private:
  std::deque<Tensor> buffers_;
};

TEST_CASE("cuda: gather_into and scatter_add do what the CPU's do", "[gather][cuda]") {
  NEEDS_CUDA();
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    TestMemory memory;
    add_all_kinds(memory, memory.buffer(integers({64}, type)));
    add_all_kinds(memory, memory.buffer(integers({80}, type)));
    const OnDevice device(memory);
    const Tensor expected = gathered(memory.regions);
    const Tensor found = at::empty(expected.sizes(), expected.options().device(kDevice));
    gather_into(device.regions, found);
    CHECK(at::equal(found.cpu(), expected));

    const Tensor values = integers({memory.numel()}, type);
    const auto sums = scattered(memory, values);
    scatter_add(values.to(kDevice), device.regions);
    const auto buffers = device.buffers();
    for (size_t b = 0; b < sums.size(); ++b) CHECK(at::equal(buffers[b], sums[b]));
  }
}

TEST_CASE("cuda: sums are the same each time under use_deterministic_algorithms",
          "[gather][cuda]") {
  NEEDS_CUDA();
  const bool before = at::globalContext().deterministicAlgorithms();
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::zeros({16}));
  for (int m = 0; m < 200; ++m) memory.add(buffer, m % 3, {4});
  const Tensor values = at::randn({memory.numel()});
  Tensor first;
  for (int round = 0; round < 5; ++round) {
    const OnDevice device(memory);
    scatter_add(values.to(kDevice), device.regions);
    const Tensor found = device.buffers()[0];
    if (round == 0) first = found;
    CHECK(at::equal(found, first));
  }
  at::globalContext().setDeterministicAlgorithms(before, /*warn_only=*/false);
}

TEST_CASE("cuda: a scope batches, with eager's values and gradients", "[scope][cuda]") {
  NEEDS_CUDA();
  const auto options = at::TensorOptions().dtype(at::kDouble).device(kDevice);
  const Tensor weight = at::randn({4, 4}, options).requires_grad_();
  const Tensor bias = at::randn({4}, options).requires_grad_();
  std::vector<Tensor> xs;
  for (int i = 0; i < 6; ++i) xs.push_back(at::randn({4}, options).requires_grad_());
  const auto loss = [&] {
    Tensor total = at::zeros({}, options);
    for (size_t n = 1; n <= xs.size(); ++n) {
      Tensor h = xs[0];
      for (size_t t = 0; t < n; ++t) h = at::tanh(at::linear(h + xs[t], weight, bias));
      total = total + h.sum();
    }
    return total;
  };
  std::vector<Tensor> of = xs;
  of.insert(of.end(), {weight, bias});
  const auto gradients = [&](const Tensor& total) {
    total.backward();
    std::vector<Tensor> all = {total.detach().cpu()};
    for (Tensor& tensor : of) {
      all.push_back(tensor.grad().cpu());
      tensor.mutable_grad().reset();
    }
    return all;
  };
  const auto expected = gradients(loss());
  BatchScope scope;
  const Tensor total = loss();
  scope.close();
  const auto found = gradients(total);
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(at::allclose(found[i], expected[i], 1e-9, 1e-12));
  }
  const auto report = scope.report();
  CHECK(report.batches * 2 < report.nodes);
}

}  // namespace
}  // namespace autobatch
