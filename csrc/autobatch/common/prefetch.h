// Prefetching of rows that are not accessed in their order in memory. Each row is prefetched
// some rows before its use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace autobatch {

constexpr int64_t kRowsAhead = 4;

// Prefetches the cache lines of a row that will be read or written. For a long row it prefetches
// only the first kMost bytes: the hardware prefetcher continues by itself.
inline void prefetch_row(const void* row, size_t bytes) {
#if defined(__GNUC__)
  constexpr size_t kLine = 64, kMost = 1024;
  const char* at = static_cast<const char*>(row);
  for (size_t i = 0; i < bytes && i < kMost; i += kLine) __builtin_prefetch(at + i);
#else
  (void)row, (void)bytes;
#endif
}

}  // namespace autobatch
