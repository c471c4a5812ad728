// What ran when, and which node read which: recorded for a picture of a block, with
// ScopeOptions::profile. Times are nanoseconds of a steady clock since the block opened.
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

// A part of a flush or of backward.
struct TraceStage {
  const char* name;
  int64_t start, end;
};

// What one schedule decided. Of each node: its batch, from 0, and the nodes that it reads, each
// once.
struct TraceSchedule {
  size_t num_batches = 0;
  std::vector<uint64_t> batch_of_node;
  std::vector<std::vector<uint32_t>> inputs_of_node;
};

struct TraceBatch {
  uint64_t signature = 0;  // Signature::serial
  uint64_t batch = 0;      // its number, in the order of the schedule; of backward 0
  uint64_t members = 0;
  uint64_t bytes = 0;  // of results
  int64_t start = 0, end = 0;
  bool backward = false;
};

class Trace {
 public:
  // Beyond these the rest is left out, and `is_cut`.
  static constexpr size_t kMostNodes = 1 << 18, kMostRows = 1 << 18;

  int64_t now() const;

  void add_schedule(TraceSchedule schedule);
  // The number of the first batch of the last schedule; the others follow.
  uint64_t first_batch() const { return first_batch_; }
  void add_flush(TraceFlush flush);
  void end_flushes();
  void add_stage(const char* name, int64_t start);
  void add_batch(TraceBatch batch);

  // For readers, who hold the lock meanwhile: backward may be under way on another thread.
  std::mutex mutex;
  std::vector<TraceFlush> flushes;
  std::vector<TraceStage> stages;
  std::vector<TraceBatch> batches;
  // Of all schedules, whose nodes and batches are numbered on.
  std::vector<uint64_t> batch_of_node;
  std::vector<std::vector<uint32_t>> inputs_of_node;
  bool is_cut = false;

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  uint64_t first_batch_ = 0, num_batches_ = 0;
};

// A stage, from its start to its end. Without a trace it does nothing.
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

// A batch, likewise.
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
