#include "scope_test.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace autobatch {
namespace {

// Options of the factories.
const at::TensorOptions kDoubles = at::TensorOptions().dtype(at::kDouble);

TEST_CASE("memory: factories are captured, and are one batch whatever their sizes", "[memory]") {
  const Tensors x = {leaf({2}), leaf({5}), leaf({3})};
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(t);
      const int64_t n = h.size(0);
      out.push_back(at::zeros({n, 2}, kDoubles) + h.unsqueeze(1));
      out.push_back(at::ones({n}, kDoubles) * h);
      out.push_back(at::full({n}, 2.5, kDoubles) * h);
      out.push_back(at::zeros_like(h) + h);
      out.push_back(at::ones_like(h) * h);
      out.push_back(at::full_like(h, -3) * h);
      out.push_back(h.new_zeros({2, n}) + h);
      out.push_back(h.new_ones({n}) * h);
      out.push_back(h.new_full({n}, 4) * h);
    }
    return out;
  });
  CHECK(report.at_once.empty());
  for (const char* op :
       {"aten::zeros", "aten::ones", "aten::full", "aten::zeros_like", "aten::ones_like",
        "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"}) {
    CAPTURE(op);
    CHECK(row_of(report, op).instances == 3);
    CHECK(row_of(report, op).batches == 1);
  }
}

TEST_CASE("memory: fill values and types are told apart", "[memory]") {
  const Report report = check_program({}, [&] {
    return Tensors{at::full({2}, 1.5),         at::full({2}, 2.5),
                   at::full({2}, 1),           at::full({2}, true),
                   at::zeros({2}, at::kFloat), at::zeros({2}, at::kLong),
                   at::ones({2}, at::kBool),   at::full({2}, c10::complex<double>(1, 2)),
                   at::ones({2}, at::kHalf),   at::full({2}, 3, at::kByte)};
  });
  CHECK(row_of(report, "aten::full").batches == 6);
  CHECK(row_of(report, "aten::zeros").batches == 2);
}

TEST_CASE("memory: factories that are not captured are eager's", "[memory]") {
  const Tensor x = leaf({2, 3, 4, 5});
  check_program({}, [&] {
    const Tensor h = at::tanh(x);
    return Tensors{at::zeros_like(h.permute({0, 2, 3, 1})),
                   at::ones({1, 2, 3, 4}, kDoubles.memory_format(at::MemoryFormat::ChannelsLast)),
                   at::zeros_like(h, {}, at::MemoryFormat::ChannelsLast), at::zeros({0}),
                   at::ones({})};
  });
  BatchScope scope;
  CHECK_THROWS_AS(at::zeros({-1}), c10::Error);
  const Tensor sparse = at::zeros({2}, kDoubles.layout(at::kSparse));
  CHECK(sparse.is_sparse());
}

TEST_CASE("memory: a read of a fresh factory runs nothing else", "[memory]") {
  const Tensor x = leaf({3});
  BatchScope scope;
  const Tensor pending = at::tanh(x);
  const Tensor made = at::full({3}, 2.0, kDoubles);
  REQUIRE(is_pending(made));
  CHECK(made.const_data_ptr<double>()[2] == 2.0);
  CHECK_FALSE(is_pending(made));
  CHECK(is_pending(pending));
  CHECK(scope.report().flushes.empty());
  CHECK(scope.report().nodes == 0);
  const Tensor sum = made + at::tanh(x);
  scope.flush();
  check_same(sum, at::full({3}, 2.0, kDoubles) + at::tanh(x));
}

TEST_CASE("memory: a factory that was written to is not fresh", "[memory]") {
  const Tensor x = leaf({3});
  BatchScope scope;
  Tensor made = at::zeros({2, 3}, kDoubles);
  const Tensor part = made[1];
  made[0].copy_(at::tanh(x));
  CHECK(made.sum().item<double>() == Approx(at::tanh(x).sum().item<double>()));
  CHECK(at::equal(part, at::zeros({3}, kDoubles)));
}

TEST_CASE("memory: a factory that something reads may still be made alone", "[memory]") {
  const Tensor x = leaf({3});
  Tensor made, sum;
  {
    BatchScope scope;
    made = at::ones({3}, kDoubles);
    sum = made + at::tanh(x);
    CHECK(made.const_data_ptr<double>()[0] == 1.0);
    const at::NoGradGuard no_grad;
    made.fill_(100);
  }
  check_same(sum, at::ones({3}, kDoubles) + at::tanh(x));
  check_same(made, at::full({3}, 100.0, kDoubles));
}

TEST_CASE("memory: a factory made a leaf is differentiated as one", "[memory]") {
  const Tensor x = leaf({3});
  Tensor made, loss;
  {
    BatchScope scope;
    made = at::ones({3}, kDoubles).requires_grad_(true);
    loss = (made * at::tanh(x)).sum();
  }
  CHECK(made.is_leaf());
  loss.backward();
  check_same(made.grad(), at::tanh(x).detach());
}

TEST_CASE("memory: assembling keeps the gradient of what was not overwritten", "[memory]") {
  const Tensors x = leaves(3, {2, 3});
  const Tensors y = leaves(3, {2});
  const Report report = check_program(joined({x, y}), [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      Tensor h = x[i] * 2;
      h.select(1, static_cast<int64_t>(i)).copy_(at::tanh(y[i]));
      out.push_back(h * h);
    }
    return out;
  });
  CHECK(row_of(report, "autobatch::assemble").batches == 1);
}

TEST_CASE("memory: assembling, where only some members are differentiated", "[memory]") {
  const Tensors x = leaves(4, {2, 3});
  const Tensors y = leaves(4, {3});
  const auto program = [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      Tensor h = x[i] * 2;
      h[0].copy_(i % 2 == 0 ? at::tanh(y[i]) : at::tanh(y[i].detach()));
      out.push_back(h);
    }
    return out;
  };
  const Tensors inputs = joined({x, y});
  const Tensors eager = program();
  Tensors ours;
  {
    BatchScope scope;
    ours = program();
  }
  check_same(gradients((ours[1] + ours[2]).sum(), inputs),
             gradients((eager[1] + eager[2]).sum(), inputs));
  check_same(gradients((ours[0].sum() + ours[3][1].sum()), inputs),
             gradients((eager[0].sum() + eager[3][1].sum()), inputs));
}

TEST_CASE("memory: assembling memories of several types, sizes and strides", "[memory]") {
  const Tensors x = {leaf({2, 3}), leaf({4, 3}), leaf({3, 3})};
  check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor turned = (t * 2).t().contiguous().t();
      turned[1].copy_(t[0]);
      Tensor halves = t.to(at::kFloat) * 2;
      halves.slice(1, 0, 3, 2).fill_(1);
      Tensor complex = at::complex(t * 2, t * 3);
      complex[0].zero_();
      out.insert(out.end(), {turned, halves, at::real(complex)});
    }
    return out;
  });
}

TEST_CASE("memory: a tensor of the program's own numbers is created immediately", "[memory]") {
  // Does what torch::tensor({i, 2 * i}) does.
  const auto make = [](int64_t i) {
    const Tensor made = [] {
      const at::AutoDispatchBelowAutograd below;
      return at::empty({2}, at::kLong);
    }();
    const at::NoGradGuard no_grad;
    made[0].fill_(i);
    made[1].fill_(2 * i);
    return made;
  };
  const Tensor w = leaf({40, 3});
  const Report report = check_program({w}, [&] {
    Tensors out;
    for (int64_t i = 0; i < 6; ++i) {
      const Tensor index = make(i);
      CHECK_FALSE(is_pending(index));
      out.push_back(at::embedding(w, index).tanh());
    }
    return out;
  });
  CHECK(report.nodes == 12);
  CHECK(report.batches == 2);
  // The factories of namespace torch and of Python use this guard. They are still captured.
  BatchScope scope;
  const at::AutoDispatchBelowADInplaceOrView below;
  CHECK(is_pending(at::zeros({3})));
}

}  // namespace
}  // namespace autobatch
