#include "scope_test.h"

namespace autobatch {
namespace {

// --- ops that DyNet puts into one batch by mistake ---

// Checks all `ops` in one scope, and then each op in a separate scope, because signatures outlive
// scopes. Then repeats both with the ops in reverse order.
void check_apart(const Tensors& inputs, std::vector<std::function<Tensor(const Tensor&)>> ops) {
  const auto apply = [&](const auto& op) {
    Tensors out;
    for (const Tensor& x : inputs) out.push_back(op(at::tanh(x)));
    return out;
  };
  for (int order = 0; order < 2; ++order) {
    CAPTURE(order);
    check_program(inputs, [&] {
      Tensors out;
      for (const auto& op : ops) {
        for (const Tensor& value : apply(op)) out.push_back(value);
      }
      return out;
    });
    for (size_t i = 0; i < ops.size(); ++i) {
      CAPTURE(i);
      check_program(inputs, [&] { return apply(ops[i]); });
    }
    std::reverse(ops.begin(), ops.end());
  }
}

TEST_CASE("scope: relu, elu and silu stay apart", "[scope][dynet]") {
  check_apart(
      leaves(3, {6}),
      {[](const Tensor& x) { return at::relu(x); }, [](const Tensor& x) { return at::elu(x); },
       [](const Tensor& x) { return at::silu(x); }, [](const Tensor& x) { return at::gelu(x); }});
}

TEST_CASE("scope: parameters of an activation keep it apart", "[scope][dynet]") {
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::elu(x, 1.0); },
                               [](const Tensor& x) { return at::elu(x, 0.5); },
                               [](const Tensor& x) { return at::elu(x, 1.0, 2.0); },
                               [](const Tensor& x) { return at::elu(x, 1.0, 1.0, 2.0); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::leaky_relu(x, 0.1); },
                               [](const Tensor& x) { return at::leaky_relu(x, 0.2); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::gelu(x, "none"); },
                               [](const Tensor& x) { return at::gelu(x, "tanh"); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::hardtanh(x, -0.1, 0.2); },
                               [](const Tensor& x) { return at::hardtanh(x, -0.2, 0.2); }});
}

TEST_CASE("scope: softmax over different axes", "[scope][dynet]") {
  const auto over = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::softmax(x, dim); };
  };
  const auto log_over = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::log_softmax(x, dim); };
  };
  check_apart(leaves(3, {3, 3, 3}), {over(0), over(1), over(2), over(-2)});
  check_apart(leaves(3, {4, 4}), {log_over(0), log_over(1), log_over(-1), log_over(-2)});
}

TEST_CASE("scope: softmax of vectors and of matrices of the same width", "[scope][dynet]") {
  check_apart({leaf({4, 3})}, {[](const Tensor& x) { return at::softmax(x[0], 0); },
                               [](const Tensor& x) { return at::softmax(x, 1); },
                               [](const Tensor& x) { return at::softmax(x.unsqueeze(0), -1); }});
}

TEST_CASE("scope: cat and stack over different axes", "[scope][dynet]") {
  const auto cat = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::cat({x, x * 2.0}, dim); };
  };
  const auto stack = [](int64_t dim) {
    return [dim](const Tensor& x) { return at::stack({x, x * 2.0, x}, dim); };
  };
  check_apart(leaves(3, {4, 4}), {cat(0), cat(1), cat(-1), cat(-2)});
  check_apart(leaves(3, {4, 4}), {stack(0), stack(1), stack(2), stack(-1)});
}

TEST_CASE("scope: cat of vectors and of matrices, over the last axis", "[scope][dynet]") {
  check_apart({leaf({4, 3}), leaf({2, 3})},
              {[](const Tensor& x) { return at::cat({x[0], x[1]}, -1); },
               [](const Tensor& x) { return at::cat({x, x}, -1); },
               [](const Tensor& x) { return at::cat({x[0], x[1]}, 0); },
               [](const Tensor& x) { return at::cat({x, x}, 0); }});
}

TEST_CASE("scope: cat of any number of pieces is one batch", "[scope]") {
  const Tensors x = leaves(6, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (size_t i = 1; i <= x.size(); ++i) {
      out.push_back(at::cat(Tensors(x.begin(), x.begin() + static_cast<int64_t>(i))));
    }
    return out;
  });
  CHECK(row_of(report, "aten::cat").batches == 1);
}

TEST_CASE("scope: picks of different places, over different axes", "[scope][dynet]") {
  const auto pick = [](int64_t dim, int64_t i) {
    return [dim, i](const Tensor& x) { return at::exp(x.select(dim, i)); };
  };
  check_apart(leaves(3, {3, 3}), {pick(0, 0), pick(0, 2), pick(1, 0), pick(1, 2)});
}

TEST_CASE("scope: an index that is data does not split a batch", "[scope]") {
  const Tensors x = leaves(4, {5, 3});
  const Tensor w = leaf({7, 3});
  const Report report = check_program(joined({x, {w}}), [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::exp(at::tanh(x[i])[static_cast<int64_t>(i)]));
      out.push_back(at::embedding(w, at::full({2}, static_cast<int64_t>(i), at::kLong)));
    }
    return out;
  });
  CHECK(row_of(report, "aten::exp").batches == 1);
  CHECK(row_of(report, "aten::embedding").batches == 1);
}

TEST_CASE("scope: reductions over different axes, with and without keepdim", "[scope][dynet]") {
  const auto sum = [](std::vector<int64_t> dims, bool keepdim) {
    return [=](const Tensor& x) { return at::sum(x, dims, keepdim); };
  };
  const auto mean = [](std::vector<int64_t> dims, bool keepdim) {
    return [=](const Tensor& x) { return at::mean(x, dims, keepdim); };
  };
  check_apart(leaves(3, {3, 3, 3}),
              {sum({0}, false), sum({1}, false), sum({2}, false), sum({0}, true), sum({1}, true),
               sum({0, 1}, false), sum({0, 2}, false), sum({-1, -2}, false), sum({0, 1, 2}, true)});
  check_apart(leaves(3, {3, 3}), {mean({0}, false), mean({1}, false), mean({0}, true),
                                  mean({1}, true), mean({0, 1}, false), mean({-2}, false)});
}

TEST_CASE("scope: constants are part of a signature by value and by kind", "[scope][dynet]") {
  const auto times = [](at::Scalar s) { return [s](const Tensor& x) { return x * s; }; };
  const auto over = [](at::Scalar s) { return [s](const Tensor& x) { return x / s; }; };
  check_apart(leaves(3, {6}), {times(1.5), times(2.5), times(2), times(-2.5), times(true)});
  check_apart(leaves(3, {6}), {over(0.0), over(-0.0)});  // infinities of both signs
  check_apart(leaves(3, {6}),
              {[](const Tensor& x) { return x + 1.0; }, [](const Tensor& x) { return x + 2.0; },
               [](const Tensor& x) { return x - 1.0; }, [](const Tensor& x) { return 1.0 - x; },
               [](const Tensor& x) { return at::add(x, 1.0, 3.0); },
               [](const Tensor& x) { return at::sub(x, 1.0, 3.0); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::add(x, x); },
                               [](const Tensor& x) { return at::add(x, x, 0.5); },
                               [](const Tensor& x) { return at::sub(x, x, 0.5); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::pow(x, 2); },
                               [](const Tensor& x) { return at::pow(x, 3); },
                               [](const Tensor& x) { return at::pow(x, 0); }});
  check_apart(leaves(3, {6}), {[](const Tensor& x) { return at::clamp(x, -0.5, 0.5); },
                               [](const Tensor& x) { return at::clamp(x, -0.2, 0.5); }});
}

TEST_CASE("scope: a number on either side", "[scope][dynet]") {
  const Tensor two = c10::scalar_to_tensor(2.0);
  two.unsafeGetTensorImpl()->set_wrapped_number(true);  // as Python's numbers are passed
  const Tensor three = c10::scalar_to_tensor(3.0);
  three.unsafeGetTensorImpl()->set_wrapped_number(true);
  check_apart(leaves(3, {6}), {[&](const Tensor& x) { return at::div(x, two); },
                               [&](const Tensor& x) { return at::div(two, x); },
                               [&](const Tensor& x) { return at::div(three, x); },
                               [&](const Tensor& x) { return at::sub(x, three); },
                               [&](const Tensor& x) { return at::sub(three, x); }});
}

TEST_CASE("scope: dtypes stay apart", "[scope]") {
  const Tensors x = leaves(4, {3});
  const Tensors y = {at::randn({3}).requires_grad_(true), at::randn({3}).requires_grad_(true)};
  const Report report = check_program(joined({x, y}), [&] {
    Tensors out;
    for (const Tensor& t : joined({x, y})) out.push_back(at::sigmoid(t).to(at::kDouble));
    return out;
  });
  CHECK(row_of(report, "aten::sigmoid").batches == 2);
}

TEST_CASE("scope: a weight that a batched op produced gets its gradient", "[scope][dynet]") {
  const Tensor p = leaf({4, 3}), q = leaf({4, 3}), b = leaf({4});
  const Tensors x = leaves(5, {3});
  const Tensors rows = leaves(5, {2, 3});
  const Report report = check_program(joined({{p, q, b}, x, rows}), [&] {
    Tensors out;
    const Tensor w = at::tanh(p);  // in one batch with the next line
    const Tensor u = at::tanh(q);
    const Tensor bias = at::tanh(b);
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::linear(x[i], w, bias));
      out.push_back(at::mv(u, x[i]));
      out.push_back(at::mm(rows[i], w.t()));
      out.push_back(at::matmul(at::tanh(rows[i]), u.t()));
    }
    return out;
  });
  CHECK(row_of(report, "aten::linear").batches == 1);
  CHECK(row_of(report, "aten::mv").batches == 1);
  CHECK(row_of(report, "aten::mm").batches == 1);
}

TEST_CASE("scope: a shared argument that is not the first member's", "[scope][dynet]") {
  const Tensors x = leaves(5, {3}), own = leaves(5, {3});
  const Tensor shared = leaf({3});
  const size_t odd = GENERATE(0, 2, 4);  // index of the instance with a different argument
  check_program(joined({x, own, {shared}}), [&] {
    Tensors out;
    const Tensor s = at::sigmoid(shared);
    for (size_t i = 0; i < x.size(); ++i) {
      const Tensor& graph_input = i == odd ? own[i] : shared;
      const Tensor computed = i == odd ? at::sigmoid(own[i]) : s;
      out.push_back(at::tanh(x[i]) * graph_input);
      out.push_back(at::tanh(x[i]) / computed);
      out.push_back(graph_input - at::tanh(x[i]));
    }
    return out;
  });
}

TEST_CASE("scope: one argument shared by all, of a smaller shape", "[scope]") {
  const Tensors x = leaves(4, {2, 3});
  const Tensor row = leaf({3}), one = leaf({}), column = leaf({2, 1});
  const Report report = check_program(joined({x, {row, one, column}}), [&] {
    Tensors out;
    for (const Tensor& t : x) {
      out.push_back(at::tanh(t) * row);
      out.push_back(one / (at::tanh(t) + 2.0));
      out.push_back(at::tanh(t) - column);
    }
    return out;
  });
  CHECK(row_of(report, "aten::mul.Tensor").batches == 1);
  CHECK(row_of(report, "aten::div.Tensor").batches == 1);
  CHECK(row_of(report, "aten::sub.Tensor").batches == 1);
}

TEST_CASE("scope: operands whose lengths differ, and repeat along the rows", "[scope]") {
  Tensors x;
  for (const int64_t rows : {2, 5, 1}) x.push_back(leaf({rows, 3}));
  const Tensors row = leaves(3, {3});
  const Tensor shared = leaf({3});
  check_program(joined({x, row, {shared}}), [&] {
    Tensors out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(at::tanh(x[i]) * at::tanh(row[i]));
      out.push_back(at::tanh(row[i]) - at::tanh(x[i]));
      out.push_back(at::tanh(x[i]) + shared);
    }
    return out;
  });
}

TEST_CASE("scope: one value used by all instances gets the sum of their gradients", "[scope]") {
  const Tensor x = leaf({3});
  const Tensors y = leaves(4, {3});
  check_program(joined({{x}, y}), [&] {
    const Tensor h = at::tanh(x);
    Tensors out;
    for (const Tensor& t : y) out.push_back(h * at::tanh(h * t) + h);
    return out;
  });
}

TEST_CASE("scope: ops without a native rule", "[scope]") {
  const Tensors x = leaves(4, {3, 3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(t);
      out.push_back(at::cumsum(h, 1));
      out.push_back(at::tril(h));
      out.push_back(at::atan2(h, t));
      out.push_back(std::get<0>(at::max(h, 1)));
    }
    return out;
  });
  for (const char* op : {"aten::cumsum", "aten::tril", "aten::atan2", "aten::max.dim"}) {
    CAPTURE(op);
    CHECK(row_of(report, op).instances == 4);
    CHECK(row_of(report, op).batches == 1);
  }
}

TEST_CASE("scope: an op whose Meta kernel only Python registers", "[scope]") {
  const Tensors x = leaves(4, {3, 3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::logsumexp(at::tanh(t), at::IntArrayRef{0}));
    return out;
  });
  CHECK(report.flushes.size() == 1);
  CHECK(row_of(report, "aten::logsumexp").batches == 1);
}

TEST_CASE("scope: empty instances among others", "[scope]") {
  Tensors x;
  for (const int64_t rows : {2, 0, 3}) x.push_back(leaf({rows, 3}));
  const Tensor w = leaf({4, 3});
  check_program(joined({x, {w}}), [&] {
    Tensors out;
    for (const Tensor& t : x) {
      const Tensor h = at::tanh(at::linear(at::tanh(t), w));
      out.push_back(h * 2.0);
      out.push_back(at::sum(h, at::IntArrayRef{0}));
    }
    return out;
  });
}

TEST_CASE("scope: the same program in many scopes", "[scope]") {
  // Interned objects outlive a scope. The ids of weights and the constants kept with signatures
  // must not.
  const Tensors x = constants(3, {3});
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    const Tensors w = leaves(3, {3, 3});
    const Report report = check_program(w, [&] {
      Tensors out;
      for (size_t i = 0; i < x.size(); ++i) {
        Tensor h = x[i];
        for (size_t layer = 0; layer < w.size(); ++layer) {
          h = at::tanh(at::linear(h, w[(layer + static_cast<size_t>(step)) % w.size()]));
        }
        out.push_back(h);
      }
      return out;
    });
    CHECK(report.batches == 6);
  }
}

TEST_CASE("scope: the report is text for people", "[scope]") {
  const Tensors x = leaves(3, {4});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) out.push_back(at::tanh(t));
    return out;
  });
  const std::string text = report.to_string();
  CAPTURE(text);
  CHECK(text.find("aten::tanh") != std::string::npos);
  CHECK(text.find("lower bound") != std::string::npos);
  CHECK(text.find("[4]") != std::string::npos);
}

}  // namespace
}  // namespace autobatch
