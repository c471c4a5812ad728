#include "scope_test.h"

namespace autobatch {
namespace {

// A reader of a tensor. The tests write to the tensor after the read and run backward through the
// reader, in a scope and eagerly: both raise, or both give the same gradients.
struct Case {
  const char* name;
  std::function<Tensor(const Tensor& h)> read;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"add", [](const Tensor& h) { return h + 1; }},
      {"mul by a number", [](const Tensor& h) { return h * 2; }},
      {"mul", [](const Tensor& h) { return h * h; }},
      {"exp", [](const Tensor& h) { return at::exp(h); }},
      {"tanh", [](const Tensor& h) { return at::tanh(h); }},
      {"relu", [](const Tensor& h) { return at::relu(h); }},
      {"sin", [](const Tensor& h) { return at::sin(h); }},
      {"sum", [](const Tensor& h) { return h.sum(); }},
      {"square", [](const Tensor& h) { return h.square(); }},
      {"softmax", [](const Tensor& h) { return at::softmax(h, 0); }},
      {"cat", [](const Tensor& h) { return at::cat({h, h}); }},
      {"linear", [](const Tensor& h) { return at::linear(h, at::ones({2, 3}, at::kDouble)); }},
      {"mm", [](const Tensor& h) { return at::mm(h.view({1, 3}), h.view({3, 1})); }},
      {"where", [](const Tensor& h) { return at::where(h > 0, h, h * 2); }},
      {"cumsum", [](const Tensor& h) { return at::cumsum(h, 0); }},
      {"logsumexp", [](const Tensor& h) { return at::logsumexp(h, 0); }},
      {"a view", [](const Tensor& h) { return h.narrow(0, 1, 2).sin(); }},
  };
  return all;
}

enum class Written { kOperand, kResult, kPartOfOperand };

struct Outcome {
  bool raised = false;
  Tensor gradient;
};

Outcome differentiate(const Tensor& y, const Tensor& x) {
  try {
    return {false, gradients(y.sum(), {x})[0]};
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    CAPTURE(what);
    CHECK(what.find("modified by an inplace operation") != std::string::npos);
    return {true, {}};
  }
}

void write(Tensor tensor, Written written) {
  if (written == Written::kPartOfOperand) tensor = tensor.narrow(0, 0, 1);
  tensor.add_(3);
}

void check_case(const Case& c, Written written, bool in_block) {
  const Tensor x = at::tensor({0.5, -0.3, 0.9}, at::kDouble).requires_grad_(true);
  const auto run = [&](Tensor& h) {
    h = x * 2;
    return c.read(h);
  };
  Tensor h;
  const Tensor eager_y = run(h);
  write(written == Written::kResult ? eager_y : h, written);
  const Outcome eager = differentiate(eager_y, x);
  Tensor y;
  {
    BatchScope scope;
    y = run(h);
    if (in_block) write(written == Written::kResult ? y : h, written);
  }
  if (!in_block) write(written == Written::kResult ? y : h, written);
  const Outcome ours = differentiate(y, x);
  CHECK(ours.raised == eager.raised);
  if (!ours.raised && !eager.raised) check_same(ours.gradient, eager.gradient);
}

TEST_CASE("saved: a write after a read is eager's error, or none", "[saved]") {
  const auto written = GENERATE(Written::kOperand, Written::kResult, Written::kPartOfOperand);
  const bool in_block = GENERATE(true, false);
  for (const Case& c : cases()) {
    CAPTURE(c.name, static_cast<int>(written), in_block);
    check_case(c, written, in_block);
  }
}

TEST_CASE("saved: writes that save what they write to, and a write after them", "[saved]") {
  const Tensor x = at::tensor({0.5, 0.3, 0.9}, at::kDouble).requires_grad_(true);
  const std::vector<std::pair<const char*, std::function<void(Tensor)>>> writes = {
      {"mul_ by another", [&](Tensor h) { h.mul_(x); }},
      {"mul_ by a number", [](Tensor h) { h.mul_(2); }},
      {"add_ itself", [](Tensor h) { h.add_(h); }},
      {"div_ by another", [&](Tensor h) { h.div_(x); }},
      {"pow_", [](Tensor h) { h.pow_(3); }},
      {"square_", [](Tensor h) { h.square_(); }},
      {"sin_", [](Tensor h) { h.sin_(); }},
      {"exp_", [](Tensor h) { h.exp_(); }},
      {"tanh_", [](Tensor h) { h.tanh_(); }},
      {"sigmoid_", [](Tensor h) { h.sigmoid_(); }},
      {"relu_", [](Tensor h) { h.relu_(); }},
      {"sqrt_", [](Tensor h) { h.sqrt_(); }},
      {"clamp_", [](Tensor h) { h.clamp_(0.7, 1.5); }},
      {"addcmul_", [&](Tensor h) { h.addcmul_(x, x); }},
      {"copy_", [&](Tensor h) { h.copy_(at::sin(x)); }},
      {"masked_fill_", [](Tensor h) { h.masked_fill_(h.detach() > 1, 3); }},
      {"a part", [&](Tensor h) { h.narrow(0, 1, 2).mul_(x.narrow(0, 0, 2)); }},
  };
  const bool again = GENERATE(false, true);
  for (const auto& [name, write] : writes) {
    CAPTURE(name, again);
    const auto run = [&] {
      const Tensor h = x * 2;
      write(h);
      if (again) Tensor(h).add_(1);
      return h;
    };
    const Outcome eager = differentiate(run(), x);
    Tensor y;
    {
      BatchScope scope;
      y = run();
    }
    const Outcome ours = differentiate(y, x);
    CHECK(ours.raised == eager.raised);
    if (!ours.raised && !eager.raised) check_same(ours.gradient, eager.gradient);
  }
}

// The test does not run the program eagerly: in eager mode the saved tensor and its autograd node
// own each other, and neither is ever freed.
TEST_CASE("saved: a tensor that is multiplied by itself in place is eager's error", "[saved]") {
  const Tensor x = leaf({3});
  Tensor h;
  {
    BatchScope scope;
    h = x * 2;
    h.mul_(h);
  }
  CHECK_THROWS_WITH(gradients(h.sum(), {x}), ContainsSubstring("modified by an inplace operation"));
}

TEST_CASE("saved: a write before a read is none", "[saved]") {
  const Tensor x = leaf({3});
  check_program({x}, [&] {
    Tensor h = x * 2;
    h.add_(3);
    return Tensors{at::sin(h), h * h};
  });
}

TEST_CASE("saved: a parameter that was stepped between forward and backward", "[saved]") {
  const Tensor x = leaf({3});
  Tensor w = leaf({2, 3}), b = leaf({2});
  Tensor y;
  {
    BatchScope scope;
    y = at::linear(x * 1, w, b).sum();
  }
  {
    const at::NoGradGuard no_grad;
    b.add_(1);
  }
  check_same(torch::autograd::grad({y}, {b}, {}, true)[0], at::ones({2}, at::kDouble));
  {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  CHECK_THROWS_WITH(gradients(y, {x}), ContainsSubstring("modified by an inplace operation"));
}

TEST_CASE("saved: only the instances whose memory was written to", "[saved]") {
  const Tensors x = leaves(3, {3});
  Tensors h, y;
  {
    BatchScope scope;
    for (const Tensor& t : x) {
      h.push_back(at::tanh(t));
      y.push_back(h.back().sin().sum());
    }
  }
  h[1].mul_(2);
  for (const size_t i : {0, 2}) {
    check_same(gradients(y[i], {x[i]})[0], gradients(at::tanh(x[i]).sin().sum(), {x[i]})[0]);
  }
  CHECK_THROWS_AS(gradients(y[1], {x[1]}), c10::Error);
}

}  // namespace
}  // namespace autobatch
