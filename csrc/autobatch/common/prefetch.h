// Prefetches rows of memory for a loop that does not read the rows in the order of their addresses.
// The loop prefetches each row a few iterations before it uses the row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace autobatch {

constexpr int64_t kRowsAhead = 4;

// Prefetches the cache lines of a row that will be read or written. For a long row, prefetches only
// the first kMost bytes. The hardware prefetcher then loads the rest of the row by itself.
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
