#include "scope_test.h"

namespace autobatch {
namespace {

// Returns gradients that can be differentiated again.
Tensors with_graph(const Tensor& loss, const Tensors& inputs) {
  return torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, /*create_graph=*/true,
                               /*allow_unused=*/true);
}

Tensor squares_of(const Tensors& values) {
  Tensor sum = at::zeros({}, at::kDouble);
  for (const Tensor& value : values) {
    if (value.defined()) sum = sum + value.square().sum();
  }
  return sum;
}

// Checks that `derive` gives the same for values of a scope and for eager values.
template <class Derive>
void check_derived(const Program& program, const Derive& derive) {
  const Tensors eager = derive(program());
  Tensors ours;
  {
    BatchScope scope;
    ours = program();
  }
  check_same(derive(ours), eager);
}

// Checks derivatives of first, second and third order.
void check_orders(const Tensors& inputs, const Program& program) {
  check_derived(program, [&](const Tensors& values) {
    const Tensors first = with_graph(loss_of(values), inputs);
    const Tensors second = with_graph(squares_of(first), inputs);
    const Tensors third = gradients(squares_of(second), inputs);
    return joined({first, second, third});
  });
}

TEST_CASE("replay: second and third derivatives", "[replay]") {
  const Tensors x = leaves(3, {4});
  const Tensor w = leaf({4, 4}), b = leaf({4});
  check_orders(joined({x, {w, b}}), [&] {
    Tensors out;
    for (const Tensor& t : x) {
      out.push_back(at::sigmoid(at::linear(at::tanh(at::linear(t, w, b)), w)) * t);
    }
    return out;
  });
}

TEST_CASE("replay: values held on the way, and views of them", "[replay]") {
  const Tensors x = leaves(3, {6});
  check_orders(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(t);
      const Tensor part = h.narrow(0, 2, 3);
      const Tensor cubes = part * part * part;
      out.insert(out.end(), {h, part, cubes, cubes.sum() * h, h.view({2, 3}).t()});
    }
    return out;
  });
}

TEST_CASE("replay: with respect to a held value", "[replay]") {
  const Tensor x = leaf({3});
  const auto program = [&] {
    const Tensor h = at::tanh(x);
    return Tensors{h, (h * h * h).sum()};
  };
  check_derived(program, [&](const Tensors& values) {
    const Tensors first = with_graph(values[1], {values[0]});
    return joined({first, gradients(first[0].square().sum(), {values[0], x})});
  });
}

TEST_CASE("replay: memory that was written to", "[replay]") {
  const Tensors x = leaves(3, {3});
  check_orders(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor rows = at::zeros({2, 3}, at::kDouble);
      rows[0].copy_(at::tanh(t));
      rows[1].copy_(t * t);
      Tensor sum = t * 2;
      sum.add_(rows[0] * rows[1]);
      out.push_back(rows), out.push_back(sum);
    }
    return out;
  });
}

TEST_CASE("replay: a penalty on the gradient, inside the block", "[replay]") {
  const Tensors x = constants(3, {4});
  const Tensor w = leaf({4, 4});
  const auto penalty = [&] {
    Tensor total = at::zeros({}, at::kDouble);
    for (const Tensor& t : x) {
      const Tensor loss = at::tanh(at::linear(t, w)).sum();
      total = total + with_graph(loss, {w})[0].square().sum() + loss;
    }
    return total;
  };
  const Tensor eager = penalty();
  const Tensors eager_grads = gradients(eager, {w});
  Tensor ours;
  {
    BatchScope scope;
    ours = penalty();
  }
  check_same(ours, eager);
  check_same(gradients(ours, {w}), eager_grads);
}

TEST_CASE("replay: a graph deeper than the stack", "[replay]") {
  const Tensor x = leaf({});
  Tensor h;
  {
    BatchScope scope;
    h = x * 1;
    for (int i = 0; i < 20000; ++i) h = h + x;
  }
  const Tensors first = with_graph(h * x, {x});
  CHECK(first[0].item<double>() == Approx(2 * 20001 * x.item<double>()));
}

TEST_CASE("replay: dropout draws nothing anew", "[replay]") {
  const Tensor x = leaf({50});
  Tensor y;
  {
    BatchScope scope;
    y = at::dropout(x * 2, 0.5, true) * x;
  }
  const Tensor kept = (y / (x * x)).detach();  // 0 or 4
  check_same(with_graph(y.sum(), {x})[0].detach(), 2 * kept * x.detach());
}

TEST_CASE("replay: what has been freed, or written to, is eager's error", "[replay]") {
  Tensor x = leaf({3});
  Tensor y, z;
  {
    BatchScope scope;
    y = at::exp(x).sum();
    z = (x * x).sum();
  }
  y.backward();
  CHECK_THROWS_WITH(with_graph(y, {x}), ContainsSubstring("a second time"));
  {
    const at::NoGradGuard no_grad;
    x.mul_(2);
  }
  CHECK_THROWS_WITH(with_graph(z, {x}), ContainsSubstring("modified by an inplace operation"));
}

}  // namespace
}  // namespace autobatch
