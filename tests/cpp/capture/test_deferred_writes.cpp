#include "scope_test.h"

namespace autobatch {
namespace {

// Checks that writes were deferred: no op ran before the flush at the end.
void check_deferred(const Report& report) {
  CHECK(report.at_once.empty());
  CHECK(report.flushes.size() == 1);
}

uint64_t assembled(const Report& report) { return row_of(report, "autobatch::assemble").instances; }

Tensor zeros(at::IntArrayRef sizes) { return at::zeros(sizes, at::kDouble); }

// --- writes to a whole tensor ---

TEST_CASE("writes: accumulating in place is one sum for all instances", "[writes]") {
  const Tensors x = leaves(4, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor sum = zeros({3});
      for (int step = 1; step <= 3; ++step) sum.add_(at::tanh(t * step));
      out.push_back(sum);
    }
    return out;
  });
  check_deferred(report);
  CHECK(assembled(report) == 0);
  CHECK(row_of(report, "aten::add.Tensor").batches == 1);
}

TEST_CASE("writes: what was read before a write keeps its value and gradient", "[writes]") {
  const Tensors x = leaves(3, {4});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor h = t + 1;
      const Tensor before = h + t;
      h.add_(before);
      const Tensor after = h * 2;
      h.mul_(3);
      out.insert(out.end(), {before, after, h, h + 1});
    }
    return out;
  });
  check_deferred(report);
}

TEST_CASE("writes: fill, zero and copy", "[writes]") {
  const Tensors x = leaves(3, {2, 3});
  const Tensor row = leaf({3});
  const Report report = check_program(joined({x, {row}}), [&] {
    Tensors out;
    for (const Tensor& t : x) {
      out.push_back((t * 2).fill_(7));
      out.push_back((t * 2).zero_());
      out.push_back((t * 2).copy_(at::tanh(t)));
      out.push_back((t * 2).copy_(row));              // expanded
      out.push_back((t * 2).fill_(at::sum(t)));       // 0-dimensional
      out.push_back(zeros({3, 2}).t().copy_(t * 3));  // into a transposed tensor
    }
    return out;
  });
  check_deferred(report);
}

TEST_CASE("writes: in another type than what is written", "[writes]") {
  const Tensors x = leaves(3, {4});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      out.push_back(at::zeros({4}, at::kFloat).copy_(t * 2));
      out.push_back(at::zeros({4}, at::kLong).copy_((t * 10).detach()));
      out.push_back(at::ones({4}, at::kFloat).add_(t * 2));
      out.push_back(at::ones({4}, at::kBool).copy_((t * 0).detach()));
    }
    return out;
  });
  CHECK(report.flushes.size() == 1);
}

TEST_CASE("writes: a result that does not fit the type is eager's error", "[writes]") {
  BatchScope scope;
  Tensor count = at::zeros({3}, at::kLong);
  const Tensor x = at::tanh(leaf({3}));
  CHECK_THROWS_AS(count.add_(x), c10::Error);
  CHECK_THROWS_AS(count.add_(at::ones({2}, at::kLong)), c10::Error);
  scope.flush();
  CHECK(at::equal(count, at::zeros({3}, at::kLong)));
}

TEST_CASE("writes: masked_fill_ and friends", "[writes]") {
  const Tensors x = leaves(3, {4});
  const Tensor mask = at::tensor({1, 0, 1, 0}).to(at::kBool);
  check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      out.push_back((t * 2).masked_fill_(mask, -1));
      out.push_back((t + 1).clamp_min_(0.5));
      out.push_back((t * 2).neg_().div_(3).sub_(t).exp_());
      out.push_back((t * 2).addcmul_(t, t));
      out.push_back((t * 2).index_fill_(0, at::tensor({1}, at::kLong), 5));
    }
    return out;
  });
}

// --- parts of a memory ---

TEST_CASE("writes: rows filled one by one are put together once", "[writes]") {
  const Tensors x = leaves(4, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor rows = zeros({5, 3});
      for (int64_t i = 0; i < 4; ++i) rows[i].copy_(at::tanh(t + i));
      out.push_back(rows);
    }
    return out;
  });
  check_deferred(report);
  CHECK(assembled(report) == 4);
  CHECK(row_of(report, "autobatch::assemble").batches == 1);
}

TEST_CASE("writes: columns lie between one another and do not overlap", "[writes]") {
  const Tensors x = leaves(4, {5});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor columns = zeros({5, 3});
      for (int64_t i = 0; i < 3; ++i) columns.select(1, i).copy_(at::tanh(t + i));
      out.push_back(columns);
    }
    return out;
  });
  check_deferred(report);
  CHECK(assembled(report) == 4);
}

TEST_CASE("writes: parts that overlap are put together in between", "[writes]") {
  const Tensors x = leaves(4, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor memory = zeros({6});
      memory.narrow(0, 0, 3).copy_(t * 2);
      memory.narrow(0, 2, 3).copy_(t * 3);
      memory.slice(0, 0, 6, 2).copy_(t * 5);
      out.push_back(memory);
    }
    return out;
  });
  check_deferred(report);
  CHECK(assembled(report) == 3 * 4);
}

TEST_CASE("writes: a part written twice keeps the later, and the earlier has a gradient of zero",
          "[writes]") {
  const Tensors x = leaves(4, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor memory = zeros({2, 3});
      memory[0].copy_(at::exp(t));
      memory[0].copy_(at::tanh(t));
      out.push_back(memory);
    }
    return out;
  });
  check_deferred(report);
  CHECK(assembled(report) == 8);
  CHECK(row_of(report, "aten::exp").instances == 4);  // eager's graph has the overwritten value
}

TEST_CASE("writes: the part that was written is read without putting together", "[writes]") {
  const Tensors x = leaves(4, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor memory = t.repeat({2, 1});
      memory[0].copy_(at::tanh(t));
      out.push_back(at::exp(memory[0]));
      out.push_back(at::exp(memory[1]));
    }
    return out;
  });
  check_deferred(report);
  CHECK(assembled(report) <= 4);
}

TEST_CASE("writes: every view sees every write", "[writes]") {
  const Tensors x = leaves(3, {3});
  const Report report = check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor base = t.repeat({4, 1});
      const Tensor before = base.narrow(0, 1, 2);
      const Tensor of_view = before.t()[2];
      base.add_(t);
      Tensor after = base[2];
      after.mul_(t);
      before[0].zero_();
      out.insert(out.end(), {base, before, of_view, after, base.view({12}), of_view * 2});
    }
    return out;
  });
  check_deferred(report);
}

TEST_CASE("writes: from another part of the same memory", "[writes]") {
  const Tensors x = leaves(3, {6});
  check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor apart = t * 2;
      apart.narrow(0, 0, 3).copy_(apart.narrow(0, 3, 3));
      apart.narrow(0, 1, 4).copy_(apart.narrow(0, 0, 4).clone());
      Tensor itself = t * 3;
      itself.add_(itself);
      Tensor between = t * 5;
      between.slice(0, 0, 6, 2).add_(between.slice(0, 1, 6, 2));
      out.insert(out.end(), {apart, itself, between});
    }
    return out;
  });
}

TEST_CASE("writes: nothing is written to no elements", "[writes]") {
  const Tensors x = leaves(2, {3});
  check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor h = t * 2;
      h.narrow(0, 1, 0).copy_(h.narrow(0, 0, 0));
      h.narrow(0, 3, 0).fill_(1);
      out.push_back(h);
    }
    return out;
  });
}

// --- what autograd sees ---

TEST_CASE("writes: requires_grad reaches all that share the memory, at once", "[writes]") {
  const Tensor x = leaf({3});
  const auto program = [&] {
    const Tensor base = zeros({2, 3});
    const Tensor earlier = base.view({6});
    const bool before = base.requires_grad() || earlier.requires_grad();
    base[0].copy_(at::tanh(x));
    CHECK_FALSE(before);
    CHECK(base.requires_grad());
    CHECK(earlier.requires_grad());
    CHECK(base[1].requires_grad());
    return Tensors{base, earlier, base[1], base * 2};
  };
  const Report report = check_program({x}, program);
  check_deferred(report);
}

TEST_CASE("writes: versions are counted as in eager", "[writes]") {
  const Tensors x = leaves(2, {3});
  const auto program = [&] {
    Tensor a = x[0] * 2, b = at::stack({x[0], x[1]}), c = x[0] * 5;
    a.add_(1).mul_(x[1]);
    b[0].copy_(x[0]);
    b[1].copy_(x[1]);
    b.add_(1);
    return Tensors{a, b, b[1], c};
  };
  const Tensors eager = program();
  Tensors ours;
  {
    BatchScope scope;
    ours = program();
  }
  for (size_t i = 0; i < eager.size(); ++i) {
    CAPTURE(i);
    CHECK(ours[i]._version() == eager[i]._version());
  }
}

TEST_CASE("writes: what eager refuses is refused", "[writes]") {
  const Tensor x = leaf({4});
  const std::vector<std::function<void()>> wrong = {
      [&] { at::chunk(x * 2, 2)[0].add_(1); },  // one of several views
      [&] { at::unbind(x * 2)[0].fill_(1); },   // one of several views
      [&] { (x * 2).expand({3, 4}).add_(1); },  // overlapping memory
      [&] { (x * 2).add_(leaf({2, 4})); },      // broadcasting would enlarge the result
      [&] { (x * 2).copy_(leaf({3})); },        // other sizes
      [&] { Tensor(x).add_(1); },               // a leaf
      [&] { x.view({2, 2})[0].zero_(); },       // a view of a leaf
  };
  for (size_t i = 0; i < wrong.size(); ++i) {
    CAPTURE(i);
    CHECK_THROWS_AS(wrong[i](), c10::Error);
    BatchScope scope;
    const Tensor h = at::tanh(x);
    CHECK_THROWS_AS(wrong[i](), c10::Error);
    check_same(h, at::tanh(x));
  }
}

TEST_CASE("writes: under no_grad the history stays", "[writes]") {
  const Tensor x = leaf({3});
  check_program({x}, [&] {
    Tensor h = x * 2;
    {
      const at::NoGradGuard no_grad;
      h.add_(1);
    }
    return Tensors{h, h * 3};
  });
}

TEST_CASE("writes: through detached tensors", "[writes]") {
  const Tensor x = leaf({3});
  check_program({x}, [&] {
    const Tensor h = x * 2;
    h.detach().mul_(5);
    Tensor plain = zeros({3});
    plain.detach().add_(1);
    Tensor joined_later = zeros({3});
    const Tensor detached = joined_later.detach();
    joined_later.add_(x);
    return Tensors{h, h + 1, plain, joined_later, detached};
  });
}

TEST_CASE("writes: to a tensor from outside", "[writes]") {
  const Tensor x = leaf({3});
  check_program({x}, [&] {
    Tensor buffer = at::ones({2, 3}, at::kDouble).clone();
    const Tensor before = buffer + x;
    buffer[0].copy_(at::tanh(x.detach()));
    const Tensor after = buffer + x;
    buffer.add_(x);
    return Tensors{before, after, buffer};
  });
}

TEST_CASE("writes: in inference mode", "[writes]") {
  const Tensor w = constant({3, 3});
  const Tensors x = constants(3, {3});
  const c10::InferenceMode guard;
  check_program({}, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor h = at::linear(t, w);
      h.add_(1)[0].mul_(2);
      out.push_back(h);
    }
    return out;
  });
}

TEST_CASE("writes: what eager copies for its backward may be written to", "[writes]") {
  const Tensors x = leaves(3, {3});
  check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor h = t * 2;
      out.push_back(h.mul_(t).add_(1));
      out.push_back((t * 3).pow_(2).add_(1));
    }
    return out;
  });
}

// --- writes before and after a flush ---

TEST_CASE("writes: go on after a read", "[writes]") {
  const Tensors x = leaves(3, {3});
  check_program(x, [&] {
    Tensors out;
    for (const Tensor& t : x) {
      Tensor rows = zeros({3, 3});
      rows[0].copy_(t * 2);
      const Tensor unread = t * 7;
      const Tensor later = rows.view({9}) + 1;
      (void)rows[0].sum().item();
      rows[1].copy_(t * 3);
      rows[0].add_(unread);
      out.insert(out.end(), {rows, later, unread});
    }
    return out;
  });
}

TEST_CASE("writes: those of a tensor that nobody reads are not run", "[writes]") {
  const Tensor x = leaf({3});
  BatchScope scope;
  const Tensor kept = at::exp(x);
  {
    Tensor dropped = zeros({2, 3});
    dropped[0].copy_(at::tanh(x));
    dropped.add_(1);
  }
  scope.flush();
  CHECK(scope.report().nodes == 1);
}

}  // namespace
}  // namespace autobatch
