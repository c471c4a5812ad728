// Tests the copies of weights that are kept for later flushes.
#include "autobatch/graph/graph.h"
#include "autobatch/kernels/cpu_dispatch.h"
#include "autobatch/kernels/packed_weights.h"

#include <torch/torch.h>

#include "catch.h"

using autobatch::GraphInput;
using autobatch::WeightCopies;

namespace {

GraphInput input_of(const at::Tensor& weight) {
  GraphInput input;
  input.tensor = weight;
  input.data = weight.detach();
  input.counter = weight.unsafeGetTensorImpl()->version_counter();
  input.version = input.counter.current_version();
  input.counted = true;
  return input;
}

// Uses the weight in a flush with 100 rows, and returns the copy.
at::Tensor flush(WeightCopies& copies, const GraphInput& weight) {
  copies.drop_changed();
  REQUIRE(copies.keep(weight, 0));
  return copies.by_row(weight.data.t(), 100);
}

}  // namespace

TEST_CASE("a copy is made when enough rows have used the weight, and is kept") {
  if (autobatch::cpu_kernels() == nullptr) return;
  const at::Tensor weight = torch::randn({32, 16});
  const GraphInput input = input_of(weight);
  WeightCopies copies;
  CHECK(!flush(copies, input).defined());
  const at::Tensor copy = flush(copies, input);
  REQUIRE(copy.defined());
  CHECK(copy.is_contiguous());
  CHECK(torch::equal(copy, weight.t()));
  CHECK(flush(copies, input).is_same(copy));
}

TEST_CASE("copies are dropped after a write to the weight") {
  if (autobatch::cpu_kernels() == nullptr) return;
  const at::Tensor weight = torch::randn({32, 16});
  const GraphInput input = input_of(weight);
  WeightCopies copies;
  const auto use = [&] {
    flush(copies, input);
    return flush(copies, input);
  };
  REQUIRE(use().defined());

  SECTION("that changes the version counter") {
    weight.mul_(2);
    CHECK(!flush(copies, input).defined());
  }
  SECTION("that is reported") {
    copies.forget(torch::zeros({3}));
    CHECK(flush(copies, input).defined());
    copies.forget(weight.view({-1}));
    CHECK(!flush(copies, input).defined());
  }
  SECTION("by the end of the scope") {
    copies.clear();
    CHECK(!flush(copies, input).defined());
  }
  CHECK(torch::equal(use(), weight.t()));
}

TEST_CASE("copies of a weight without a version counter are not kept") {
  GraphInput input = input_of(torch::randn({32, 16}));
  input.counted = false;
  WeightCopies copies;
  CHECK(!copies.keep(input, 0));
}

TEST_CASE("copies of a weight whose storage has another user are not kept") {
  const at::Tensor flat = torch::randn({1024});
  at::Tensor weight = torch::randn({32, 16});
  weight.set_data(flat.narrow(0, 0, 512).view({32, 16}));
  WeightCopies copies;
  CHECK(!copies.keep(input_of(weight), 0));
}
