// Measures the times of batches. The times are used to choose a part of a graph that runs for about
// a given time.
//
// Because times are measured, the machine and the arrival times of requests affect which part runs
// first. The computed values do not depend on measured times, except that rounding may differ
// between batch sizes.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace autobatch {

class SliceCosts {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  // Begins a slice that should take `bound`, or longer if many nodes are pending (kLeastSlices).
  void begin(Nanoseconds bound, size_t num_pending);
  // Adds a batch to the slice.
  void take(uint64_t serial, size_t nodes) { taken_ += expect(serial, nodes); }
  bool is_full() const { return taken_ * scale_ >= bound_; }
  // Ends the slice. `nodes` is the number of nodes that it ran, and `took` is its duration.
  void end(Nanoseconds took, size_t nodes);

  // Records that a batch of `nodes` nodes of the signature (Signature::serial) took the time
  // `took`.
  void add(uint64_t serial, size_t nodes, Nanoseconds took);
  // Returns the expected time, in nanoseconds, of a batch of `nodes` nodes of the signature. If no
  // batch of the signature has run, the time is a guess.
  double expect(uint64_t serial, size_t nodes) const;
  // Returns the size of the largest batch that takes no longer than the bound of the slice. The
  // size is at least 1 node.
  size_t most(uint64_t serial) const;

 private:
  // One entry per power of two: entry i is for batches of 2^i to 2^(i+1) - 1 nodes. An entry is 0
  // if no batch of these sizes has run. The time is not linear in the number of nodes. A weight is
  // read only once for all members, and the data of large batches does not fit into the caches.
  static constexpr size_t kSizes = 20;
  using Row = std::array<float, kSizes>;
  static size_t row_of(size_t nodes);

  // The approximate minimum number of slices in which all pending nodes run. If many nodes are
  // pending, requests wait much longer than one slice, and larger batches finish all requests
  // sooner.
  static constexpr double kLeastSlices = 8;
  // Fixed cost of planning and bookkeeping for one slice, in nanoseconds.
  static constexpr double kSlice = 20e3;
  // Assumed time of a batch if nothing was measured, in nanoseconds.
  static constexpr double kUnknown = 20e3;
  // Maximum size of `rows_`. Models have fewer signatures than this maximum. At this maximum, all
  // measurements are dropped.
  static constexpr size_t kMostKept = size_t{1} << 14;

  double bound_ = 1e6;
  double taken_ = 0;
  // Measured time of slices divided by expected time. The time for planning increases this ratio.
  // Batches that are joined decrease the ratio.
  double scale_ = 1;
  double slices_ = 0;                       // nanoseconds that the last few slices took
  double nodes_ = 0;                        // nodes that the last few slices ran
  ska::flat_hash_map<uint64_t, Row> rows_;  // by Signature::serial: nanoseconds per node
};

}  // namespace autobatch
