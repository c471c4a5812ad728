// How long batches take, so that a part of a graph can be chosen that runs for about a given time.
//
// Told by the clock: which part runs first depends on the machine, as who waits for it does. Values
// do not, but for the rounding of batches of other sizes.
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

  // A slice that is to take so long, or longer where that much is pending (see kLeastSlices).
  void begin(Nanoseconds bound, size_t num_pending);
  // Counts a batch among what the slice runs.
  void take(uint64_t serial, size_t nodes) { taken_ += expect(serial, nodes); }
  bool is_full() const { return taken_ * scale_ >= bound_; }
  // It ran so many nodes, and took so long.
  void end(Nanoseconds took, size_t nodes);

  // A batch of so many nodes of the signature (Signature::serial) took so long.
  void add(uint64_t serial, size_t nodes, Nanoseconds took);
  // How long it would take, in nanoseconds. A guess where none like it has run.
  double expect(uint64_t serial, size_t nodes) const;
  // The nodes of a batch that takes no longer than the bound; 1 at least.
  size_t most(uint64_t serial) const;

 private:
  // By the size's power of two: a batch of 2^i to 2^(i+1) - 1 nodes. 0: none has run. What a batch
  // takes is no line: a weight is read once for all members, and larger ones leave the caches.
  static constexpr size_t kSizes = 20;
  using Row = std::array<float, kSizes>;
  static size_t row_of(size_t nodes);

  // What is pending runs in about so many slices or more. Where much is pending, requests wait for
  // far longer than a slice: larger batches then serve all of them sooner.
  static constexpr double kLeastSlices = 8;
  // Planning a slice and its bookkeeping cost this, whatever runs.
  static constexpr double kSlice = 20e3;
  // What a batch is thought to take of which nothing is known.
  static constexpr double kUnknown = 20e3;
  // More signatures than models have; then all are measured anew.
  static constexpr size_t kMostKept = size_t{1} << 14;

  double bound_ = 1e6;
  double taken_ = 0;
  double scale_ = 1;   // what slices took, over what was expected of them: planning, batches joined
  double slices_ = 0;  // nanoseconds that the last few slices took
  double nodes_ = 0;   // that they ran
  ska::flat_hash_map<uint64_t, Row> rows_;  // by serial: nanoseconds a node
};

}  // namespace autobatch
