// Compares the cost of capturing an op with the cost of running it, for one-element tensors, from
// C++, without gradients. The ops are the same as in benchmarks/capture.py. Capture and eager runs
// alternate. The results are medians of processor time.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <autobatch/autobatch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr int kCalls = 2000;
constexpr double kGoal = 0.33;

struct Operands {
  at::Tensor x, y, wide;  // pending where ops are captured
  at::Tensor weight, bias;
};

struct Op {
  const char* name;
  std::function<void(const Operands&)> repeat;
};

template <class Call>
Op repeated(const char* name, Call call) {
  return {name, [call](const Operands& o) {
            for (int i = 0; i < kCalls; ++i) call(o);
          }};
}

std::vector<Op> ops() {
  return {
      repeated("add", [](const Operands& o) { return at::add(o.x, o.y); }),
      repeated("mul", [](const Operands& o) { return at::mul(o.x, o.y); }),
      repeated("tanh", [](const Operands& o) { return at::tanh(o.x); }),
      repeated("sigmoid", [](const Operands& o) { return at::sigmoid(o.x); }),
      repeated("linear", [](const Operands& o) { return at::linear(o.x, o.weight, o.bias); }),
      repeated("cat", [](const Operands& o) { return at::cat({o.x, o.y}); }),
      repeated("select", [](const Operands& o) { return o.x.select(0, 0); }),
      repeated("chunk", [](const Operands& o) { return o.wide.chunk(4, 1); }),
  };
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Returns the processor time of one call. The captured graph is dropped without being run.
double seconds(const Op& op, const Operands& given, bool captured) {
  const at::NoGradGuard no_grad;
  std::optional<autobatch::BatchScope> scope;
  if (captured) scope.emplace();
  // The product with a parameter is pending if ops are captured.
  const Operands o{at::linear(given.x, given.weight), at::linear(given.y, given.weight),
                   at::linear(given.x, given.weight).expand({1, 4}).add(0), given.weight,
                   given.bias};
  op.repeat(o);  // warm-up, not timed
  const double start = processor_seconds();
  op.repeat(o);
  return (processor_seconds() - start) / kCalls;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 21;
  const Operands given{at::rand({1, 1}), at::rand({1, 1}), at::Tensor(),
                       at::rand({1, 1}).set_requires_grad(true),
                       at::rand({1}).set_requires_grad(true)};
  std::printf("| op | eager µs | captured µs | captured / eager |\n| --- | --: | --: | --: |\n");
  double logs = 0;
  const std::vector<Op> timed = ops();
  for (const Op& op : timed) {
    std::vector<double> eager, captured, ratios;
    for (int round = 0; round < rounds; ++round) {
      eager.push_back(seconds(op, given, false));
      captured.push_back(seconds(op, given, true));
      ratios.push_back(captured.back() / eager.back());
    }
    logs += std::log(median(ratios));
    std::printf("| %s | %.3f | %.3f | %.2f |\n", op.name, 1e6 * median(eager),
                1e6 * median(captured), median(ratios));
  }
  std::printf("| the eight ops, geometric mean | | | %.2f (goal %.2f) |\n",
              std::exp(logs / static_cast<double>(timed.size())), kGoal);
  return 0;
}
