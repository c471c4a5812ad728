// Rows that are read in no order of memory: asked for some rows ahead, they are there in time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace autobatch {

constexpr int64_t kRowsAhead = 4;

// Asks for the cache lines of a row that is to be read or written; of long rows the first, after
// which the hardware goes on by itself.
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
