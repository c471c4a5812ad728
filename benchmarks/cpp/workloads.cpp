// Compares training steps in C++: a model that is written for one example and batched by autobatch,
// and the same model batched by hand. Google Benchmark runs the variants of a workload in turn. The
// table has medians of processor time.
//
//   workloads_benchmark [--adam] [--eager] [Google Benchmark's options]
#include "workload.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/optim/adam.h>

#include <autobatch/autobatch.h>
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using benchmarks::Workload;

enum class Variant { kByHand, kOps, kCells, kEager };
const char* const kNames[] = {"by hand", "ours", "ours, cells", "eager"};
constexpr double kGoal = 0.9;

bool with_adam = false;

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds, summed over steps. For the hand-batched variant and in eager mode, `capture` is the
// whole forward pass.
struct Phases {
  double capture = 0, flush = 0, backward = 0;
};

// Runs the function and adds its processor time to `seconds`.
template <class F>
void timed(double& seconds, const F& function) {
  const double start = processor_seconds();
  function();
  seconds += processor_seconds() - start;
}

Tensor loss_of(Workload& workload, size_t k, Variant variant, Phases& phases) {
  Tensor total;
  const auto run = [&] {
    if (variant == Variant::kByHand) return void(total = workload.loss_by_hand(k));
    for (size_t i = 0; i < benchmarks::kMinibatch; ++i) {
      const Tensor loss = workload.loss(k, i, variant == Variant::kCells);
      total = total.defined() ? total + loss : loss;
    }
  };
  if (variant == Variant::kByHand || variant == Variant::kEager) {
    timed(phases.capture, run);
    return total;
  }
  autobatch::BatchScope scope;
  timed(phases.capture, run);
  timed(phases.flush, [&] { scope.close(); });
  return total;
}

// Returns the largest difference between the losses and gradients of two variants, relative to the
// largest value.
double difference(Workload& workload, Variant a, Variant b) {
  std::vector<std::vector<Tensor>> found;
  for (const Variant variant : {a, b}) {
    Phases phases;
    const Tensor loss = loss_of(workload, 0, variant, phases);
    loss.backward();
    auto& values = found.emplace_back(std::vector<Tensor>{loss.detach()});
    for (const Tensor& p : workload.parameters()) {
      values.push_back(p.grad().clone());
      p.mutable_grad().reset();
    }
  }
  double worst = 0;
  for (size_t i = 0; i < found[0].size(); ++i) {
    const double scale = found[0][i].abs().max().item<double>();
    worst = std::max(worst, (found[0][i] - found[1][i]).abs().max().item<double>() / scale);
  }
  return worst;
}

void train(benchmark::State& state, Workload& workload, Variant variant) {
  torch::optim::Adam optimizer(workload.parameters(), torch::optim::AdamOptions(1e-4));
  size_t k = 0;
  Phases phases;
  for ([[maybe_unused]] auto step : state) {
    optimizer.zero_grad();
    const Tensor loss = loss_of(workload, k++ % benchmarks::kMinibatches, variant, phases);
    timed(phases.backward, [&] { loss.backward(); });
    if (with_adam) optimizer.step();
  }
  const auto per_step = benchmark::Counter::kAvgIterations;
  state.counters["capture"] = benchmark::Counter(phases.capture, per_step);
  state.counters["flush"] = benchmark::Counter(phases.flush, per_step);
  state.counters["backward"] = benchmark::Counter(phases.backward, per_step);
}

// Collects the times of the repetitions instead of printing them.
class Collector final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration || run.error_occurred) continue;
      const auto iterations = static_cast<double>(run.iterations);
      auto& of_run = seconds_[run.run_name.function_name];
      of_run["step"].push_back(run.cpu_accumulated_time / iterations);
      for (const auto& [phase, counter] : run.counters) of_run[phase].push_back(counter.value);
    }
  }
  bool knows(const std::string& name) const { return seconds_.count(name) > 0; }
  double median(const std::string& name, const std::string& phase = "step") {
    std::vector<double>& values = seconds_.at(name).at(phase);
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

 private:
  std::map<std::string, std::map<std::string, std::vector<double>>> seconds_;
};

std::string label(const Workload& workload, Variant variant) {
  return workload.name() + "/" + kNames[static_cast<int>(variant)];
}

using Workloads = std::vector<std::unique_ptr<Workload>>;

void print_rates(Collector& collector, const Workloads& workloads,
                 const std::vector<Variant>& variants) {
  std::printf("| workload |");
  for (const Variant v : variants) std::printf(" %s, sentences/s |", kNames[static_cast<int>(v)]);
  std::printf(" ours / by hand (goal %.1f) | with cells |\n| --- |", kGoal);
  for (size_t i = 0; i < variants.size() + 2; ++i) std::printf(" --: |");
  std::printf("\n");
  for (const auto& workload : workloads) {
    const auto rate = [&](Variant variant) {
      const std::string name = label(*workload, variant);
      if (!collector.knows(name)) return std::nan("");  // the filter excludes it
      return static_cast<double>(benchmarks::kMinibatch) / collector.median(name);
    };
    std::printf("| %s |", workload->name().c_str());
    for (const Variant variant : variants) std::printf(" %.0f |", rate(variant));
    const double hand = rate(Variant::kByHand);
    std::printf(" %.2f | %.2f |\n", rate(Variant::kOps) / hand, rate(Variant::kCells) / hand);
  }
}

void print_phases(Collector& collector, const Workloads& workloads,
                  const std::vector<Variant>& variants) {
  std::printf("\n| ms a step | capture (or forward) | flush | backward | all |\n");
  std::printf("| --- | --: | --: | --: | --: |\n");
  for (const auto& workload : workloads) {
    for (const Variant variant : variants) {
      const std::string name = label(*workload, variant);
      if (!collector.knows(name)) continue;
      std::printf("| %s |", name.c_str());
      for (const char* phase : {"capture", "flush", "backward", "step"}) {
        std::printf(" %.1f |", 1e3 * collector.median(name, phase));
      }
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<Variant> variants = {Variant::kByHand, Variant::kOps, Variant::kCells};
  const auto taken = [&](const std::string& argument) {
    if (argument == "--adam") return with_adam = true;
    if (argument == "--eager") return variants.push_back(Variant::kEager), true;
    return false;
  };
  count = static_cast<int>(std::remove_if(arguments + 1, arguments + count, taken) - arguments);
  benchmark::Initialize(&count, arguments);
  if (benchmark::ReportUnrecognizedArguments(count, arguments)) return 1;
  at::set_num_threads(1);
  at::manual_seed(0);
  std::vector<std::unique_ptr<Workload>> workloads;
  for (const bool fused : {true, false}) {
    for (const int64_t hidden : {128, 256}) {
      workloads.push_back(benchmarks::make_tree_lstm(hidden, fused));
    }
  }
  workloads.push_back(benchmarks::make_bilstm(256));
  for (const auto& workload : workloads) {
    for (const Variant variant : {Variant::kOps, Variant::kCells}) {
      const double off = difference(*workload, Variant::kByHand, variant);
      if (off < 1e-4) continue;
      std::fprintf(stderr, "%s: differs by %.1e\n", label(*workload, variant).c_str(), off);
      return 1;
    }
    for (const Variant variant : variants) {
      const auto run = [&workload, variant](benchmark::State& state) {
        train(state, *workload, variant);
      };
      benchmark::RegisterBenchmark(label(*workload, variant).c_str(), run);
    }
  }
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector);
  print_rates(collector, workloads, variants);
  print_phases(collector, workloads, variants);
  return 0;
}
