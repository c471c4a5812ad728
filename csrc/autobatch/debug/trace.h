// Records the times of batches and the dependencies of nodes, so that a block can be plotted
// (ScopeOptions::profile). A time is the number of nanoseconds since the block was opened, measured
// by a steady clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace autobatch {

struct TraceFlush {
  std::string reason, site;
  int64_t start = 0, end = 0;
};

// A stage of a flush or of backward.
struct TraceStage {
  const char* name;
  int64_t start, end;
};

// One schedule. It contains, for each node, the number of the node's batch (counted from 0) and the
// nodes whose results the node reads, without duplicates.
struct TraceSchedule {
  size_t num_batches = 0;
  std::vector<uint64_t> batch_of_node;
  std::vector<std::vector<uint32_t>> inputs_of_node;
};

struct TraceBatch {
  uint64_t signature = 0;  // Signature::serial
  uint64_t batch = 0;      // number of the batch; 0 in backward
  uint64_t members = 0;
  uint64_t bytes = 0;  // size of the results
  int64_t start = 0, end = 0;
  bool backward = false;
};

class Trace {
 public:
  // Limits on the recorded nodes and rows. If a limit is exceeded, `is_cut` is set.
  static constexpr size_t kMostNodes = 1 << 18, kMostRows = 1 << 18;

  int64_t now() const;

  void add_schedule(TraceSchedule schedule);
  // Returns the number of the first batch of the last schedule. The batches of a schedule have
  // consecutive numbers.
  uint64_t first_batch() const { return first_batch_; }
  void add_flush(TraceFlush flush);
  void end_flushes();
  void add_stage(const char* name, int64_t start);
  void add_batch(TraceBatch batch);

  // Code that reads the members below must hold `mutex`, because backward may run on another
  // thread.
  std::mutex mutex;
  std::vector<TraceFlush> flushes;
  std::vector<TraceStage> stages;
  std::vector<TraceBatch> batches;
  // The next two members are indexed by node. The nodes and batches of a schedule are numbered
  // after those of the previous schedule.
  std::vector<uint64_t> batch_of_node;
  std::vector<std::vector<uint32_t>> inputs_of_node;
  bool is_cut = false;

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  uint64_t first_batch_ = 0, num_batches_ = 0;
};

// Records a stage from construction to destruction. Does nothing if `trace` is null.
class TraceTimer {
 public:
  TraceTimer(Trace* trace, const char* name)
      : trace_(trace), name_(name), start_(trace == nullptr ? 0 : trace->now()) {}
  ~TraceTimer() {
    if (trace_ != nullptr) trace_->add_stage(name_, start_);
  }
  TraceTimer(const TraceTimer&) = delete;
  TraceTimer& operator=(const TraceTimer&) = delete;

 private:
  Trace* trace_;
  const char* name_;
  int64_t start_;
};

// Records a batch from construction to destruction. Does nothing if `trace` is null.
class BatchTimer {
 public:
  BatchTimer(Trace* trace, const TraceBatch& batch) : trace_(trace), batch_(batch) {
    if (trace_ != nullptr) batch_.start = trace_->now();
  }
  ~BatchTimer() {
    if (trace_ == nullptr) return;
    batch_.end = trace_->now();
    trace_->add_batch(batch_);
  }
  BatchTimer(const BatchTimer&) = delete;
  BatchTimer& operator=(const BatchTimer&) = delete;

 private:
  Trace* trace_;
  TraceBatch batch_;
};

}  // namespace autobatch
