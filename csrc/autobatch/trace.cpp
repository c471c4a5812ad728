#include "autobatch/trace.h"

#include "autobatch/run_graph.h"

#include <algorithm>
#include <utility>

namespace autobatch {

int64_t Trace::now() const {
  const auto passed = std::chrono::steady_clock::now() - began_;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
}

void Trace::add_graph(const RunGraph& graph, std::span<const BatchRecord> batches) {
  const std::lock_guard<std::mutex> lock(mutex);
  first_batch_ = num_batches_;
  num_batches_ += batches.size();
  const size_t first_node = batch_of_node.size();
  if (first_node + graph.size() > kMostNodes) {
    is_cut = true;
    return;
  }
  batch_of_node.resize(first_node + graph.size());
  for (size_t b = 0; b < batches.size(); ++b) {
    for (const uint32_t number : graph.members(batches[b])) {
      batch_of_node[first_node + number] = first_batch_ + b;
    }
  }
  for (uint32_t number = 0; number < graph.size(); ++number) {
    std::vector<uint32_t>& inputs = inputs_of_node.emplace_back();
    for (const uint32_t producer : graph.producers(number)) {
      const auto node = static_cast<uint32_t>(first_node + producer);
      if (std::ranges::find(inputs, node) == inputs.end()) inputs.push_back(node);
    }
  }
}

void Trace::add_flush(TraceFlush flush) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (flushes.size() == kMostRows) return void(is_cut = true);
  flushes.push_back(std::move(flush));
}

void Trace::end_flushes() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto flush = flushes.rbegin(); flush != flushes.rend() && flush->end == 0; ++flush) {
    flush->end = now();
  }
}

void Trace::add_stage(const char* name, int64_t start) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (stages.size() == kMostRows) return void(is_cut = true);
  stages.push_back({name, start, now()});
}

void Trace::add_batch(TraceBatch batch) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (batches.size() == kMostRows) return void(is_cut = true);
  batches.push_back(batch);
}

}  // namespace autobatch
