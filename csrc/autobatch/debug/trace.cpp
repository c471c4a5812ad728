#include "autobatch/debug/trace.h"

#include <utility>

namespace autobatch {

int64_t Trace::now() const {
  const auto passed = std::chrono::steady_clock::now() - began_;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
}

void Trace::add_schedule(TraceSchedule schedule) {
  const std::lock_guard<std::mutex> lock(mutex);
  first_batch_ = num_batches_;
  num_batches_ += schedule.num_batches;
  const auto first_node = static_cast<uint32_t>(batch_of_node.size());
  if (first_node + schedule.batch_of_node.size() > kMostNodes) {
    is_cut = true;
    return;
  }
  for (const uint64_t batch : schedule.batch_of_node) {
    batch_of_node.push_back(first_batch_ + batch);
  }
  for (std::vector<uint32_t>& inputs : schedule.inputs_of_node) {
    for (uint32_t& node : inputs) node += first_node;
    inputs_of_node.push_back(std::move(inputs));
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
