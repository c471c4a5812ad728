// Graph::compact with an open record: in inference a scope may stay open without limit.
#include "autobatch/rules/flush_record.h"
#include "scope_test.h"

#include <ATen/core/grad_mode.h>

#include <chrono>

namespace autobatch {
namespace {

constexpr size_t kChains = 32;
constexpr int kSteps = 1200;  // each has two ops per chain: more nodes than an open record keeps
constexpr size_t kMostNodes = size_t{1} << 14;

Tensor step_of(const Tensor& h, const Tensor& w) { return at::tanh(at::mv(w, h)); }

// Returns weights with which the chains converge. Rounding depends on the size of the batches, and
// a chaotic chain would amplify rounding differences over this many steps.
Tensor calm_weights() { return 1.5 * at::eye(5, at::kDouble) + 0.02 * constant({5, 5}); }

void run_all() {
  while (Scope::current()->run_slice(std::chrono::milliseconds(1))) {
  }
}

// Runs all steps of all chains. Calls note(step, chain, result) for each result.
template <class Note>
void run_chains(Tensors& chains, const Tensor& w, const Note& note) {
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < chains.size(); ++i) {
      chains[i] = step_of(chains[i], w);
      note(step, i, chains[i]);
    }
    run_all();
  }
}

Tensors walk(const Tensor& start, const Tensor& w) {
  Tensors steps;
  for (int step = 0; step < kSteps; ++step) {
    steps.push_back(step_of(steps.empty() ? start : steps.back(), w));
  }
  return steps;
}

TEST_CASE("what was computed and nothing looks at leaves an open record", "[compact]") {
  const at::NoGradGuard no_grad;
  const Tensor w = calm_weights();
  Tensors chains = constants(kChains, {5});
  const Tensors starts = chains;
  std::vector<std::pair<int, Tensor>> held;
  BatchScope scope;
  const Graph& graph = Scope::current()->graph();
  size_t most_nodes = 0, most_slabs = 0;
  run_chains(chains, w, [&](int step, size_t i, const Tensor& h) {
    if (i == 0 && step % 100 == 0) held.emplace_back(step, h);
    if (i == 0 && step % 100 == 50) held.emplace_back(step, h.narrow(0, 1, 3));
    most_nodes = std::max(most_nodes, graph.tape().nodes.size());
    if (graph.open_record()) {
      most_slabs = std::max(most_slabs, graph.open_record()->store.slabs.size());
    }
  });
  CHECK(most_nodes < kMostNodes);
  CHECK(most_slabs < kMostNodes / kChains);
  for (const Tensor& chain : chains) CHECK(is_pending(chain));  // the record is still open
  const Tensors expected = [&] {
    scope.flush();
    return walk(starts[0], w);
  }();
  for (const auto& [step, tensor] : held) {
    const Tensor& whole = expected[static_cast<size_t>(step)];
    check_same(tensor, tensor.numel() == 5 ? whole : whole.narrow(0, 1, 3));
  }
  for (size_t i = 0; i < kChains; ++i) check_same(chains[i], walk(starts[i], w).back());
}

TEST_CASE("an error after that loses what depends on it, and nothing else", "[compact]") {
  const at::NoGradGuard no_grad;
  const Tensor w = calm_weights(), table = constant({4, 5});
  Tensors chains = constants(kChains, {5});
  const Tensors starts = chains;
  Tensor lost;
  BatchScope scope;
  const auto fail = [&](int step, size_t i, const Tensor& h) {
    if (step != kSteps - 1 || i != 3) return;
    lost = at::embedding(table, at::full({1}, 9, at::kLong)).squeeze(0) + h;
  };
  CHECK_THROWS_WITH(run_chains(chains, w, fail), ContainsSubstring("embedding"));
  for (size_t i = 0; i < kChains; ++i) check_same(chains[i].clone(), walk(starts[i], w).back());
  CHECK_THROWS_WITH(lost.sum().item<double>(), ContainsSubstring("embedding"));
}

TEST_CASE("with gradients an open record is kept for backward", "[compact]") {
  const Tensor w = calm_weights().requires_grad_();
  Tensor h = constant({5});
  const Tensor start = h;
  BatchScope scope;
  for (int step = 0; step < kSteps; ++step) {
    h = step_of(h, w);
    for (const Tensor& other : constants(8, {5})) at::tanh(other).sum();
    run_all();
  }
  scope.close();
  Tensor eager = start;
  for (int step = 0; step < kSteps; ++step) eager = step_of(eager, w);
  check_same(gradients(loss_of({h}), {w})[0], gradients(loss_of({eager}), {w})[0]);
}

}  // namespace
}  // namespace autobatch
