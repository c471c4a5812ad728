// Multiplies rows by a matrix, for AVX2. oneDNN has no microkernel for AVX2. Only the source file
// that is compiled for AVX2 includes this file.
//
// The result is computed in tiles that fill the vector registers. Each tile is the product of some
// rows of x and some columns of the matrix (Goto and van de Geijn 2008, section 4). The matrix is
// not packed, because for tens of rows packing takes as long as the product. A weight is usually
// not in a cache when a batch reads it, and the hardware does not predict the addresses of a matrix
// that is read in strips. Therefore the kernel prefetches the operands of the next tiles while it
// computes a tile.
#pragma once

#include "autobatch/kernels/cpu_dispatch.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <utility>

namespace autobatch {
namespace {

constexpr int kTileRows = 6;
constexpr int64_t kVector = 8;  // number of floats in a SIMD vector
constexpr int64_t kLine = 16;   // number of floats in a cache line
// Returns the width of a tile with `rows` rows, in vectors. One of the 16 registers is for x, and
// some registers are for the matrix.
constexpr int tile_vectors(int64_t rows) {
  return std::array{8, 6, 4, 3, 2, 2}[static_cast<size_t>(rows) - 1];
}

// Calls f(0), ..., f(n - 1), unrolled. The arguments are compile-time constants.
template <int n, class F>
[[gnu::always_inline]] inline void unrolled(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>()), ...);
  }(std::make_integer_sequence<int, n>());
}

inline void fetch(const float* at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }

// Prefetches the cache lines of a matrix [rows, columns], `share` lines at each call of next().
struct Prefetch {
  const float* row = nullptr;
  int64_t rows = 0, columns = 0, step = 0, share = 0, column = 0;

  void next() {
    for (int64_t i = 0; i < share && rows > 0; ++i) {
      fetch(row + column);
      column += kLine;
      if (column >= columns) row += step, column = 0, --rows;
    }
  }
};

// Computes a tile of kRows rows and kVectors vectors of columns. If kWhole is false, only the first
// `lanes` columns of the last vector exist. `last`: whether the tile has the last rows of x and of
// the result.
template <int kRows, int kVectors, bool kWhole>
void multiply_tile(const MultiplyBlock& block, int64_t lanes, bool last) {
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)),
                                          _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const auto load = [&](const float* row, auto v) {
    if constexpr (kWhole || v + 1 < kVectors)
      return _mm256_loadu_ps(row + v * kVector);
    else
      return _mm256_maskload_ps(row + v * kVector, mask);
  };
  const auto store = [&](float* row, auto v, __m256 value) {
    if constexpr (kWhole || v + 1 < kVectors)
      _mm256_storeu_ps(row + v * kVector, value);
    else
      _mm256_maskstore_ps(row + v * kVector, mask, value);
  };
  __m256 sum[kRows][kVectors];
  unrolled<kRows>([&](auto r) {
    unrolled<kVectors>([&](auto v) { sum[r][v] = _mm256_setzero_ps(); });
    if (last) return;
    unrolled<kVectors>(
        [&](auto v) { fetch(block.out + (kRows + r) * block.out_step + v * kVector); });
  });
  const float *x = block.x, *matrix = block.matrix;
  for (int64_t k = 0; k < block.depth; k += kLine) {
    if (!last) unrolled<kRows>([&](auto r) { fetch(x + (kRows + r) * block.x_step); });
    const int64_t end = std::min(k + kLine, block.depth);
    for (int64_t i = k; i < end; ++i, ++x, matrix += block.matrix_step) {
      __m256 row[kVectors];
      unrolled<kVectors>([&](auto v) { row[v] = load(matrix, v); });
      unrolled<kRows>([&](auto r) {
        const __m256 factor = _mm256_broadcast_ss(x + r * block.x_step);
        unrolled<kVectors>([&](auto v) { sum[r][v] = _mm256_fmadd_ps(factor, row[v], sum[r][v]); });
      });
    }
  }
  unrolled<kRows>([&](auto r) {
    float* to = block.out + r * block.out_step;
    unrolled<kVectors>([&](auto v) {
      store(to, v, block.adds ? _mm256_add_ps(load(to, v), sum[r][v]) : sum[r][v]);
    });
  });
}

template <int kRows, int kVectors>
void multiply_columns(const MultiplyBlock& block, int64_t columns, bool last) {
  const int64_t lanes = columns - (kVectors - 1) * kVector;
  if (lanes == kVector) return multiply_tile<kRows, kVectors, true>(block, lanes, last);
  multiply_tile<kRows, kVectors, false>(block, lanes, last);
}

// Computes all columns of the first kRows rows of the result.
template <int kRows>
void multiply_strip(MultiplyBlock block, bool last, Prefetch& ahead) {
  constexpr int kMost = tile_vectors(kRows);
  for (int64_t left = block.columns; left > 0;) {
    const int64_t columns = std::min(left, kMost * kVector);
    const int64_t vectors = (columns + kVector - 1) / kVector;
    ahead.next();
    [&]<int... v>(std::integer_sequence<int, v...>) {
      ((vectors == v + 1 ? multiply_columns<kRows, v + 1>(block, columns, last) : void()), ...);
    }(std::make_integer_sequence<int, kMost>());
    block.matrix += columns, block.out += columns, left -= columns;
  }
}

// Adds the terms of a part of the depth (K) to the result. All strips of rows read the same part of
// the matrix, which stays in the nearest cache. `most`: maximum number of rows of a strip. `ahead`:
// the next part of the matrix, which is prefetched.
void multiply_part(MultiplyBlock block, int64_t most, Prefetch ahead) {
  const int64_t strips = (block.rows + most - 1) / most;
  const int64_t lines = ahead.rows * ((ahead.columns + kLine - 1) / kLine);
  const int64_t width = tile_vectors(most) * kVector;
  const int64_t tiles = strips * ((block.columns + width - 1) / width);
  ahead.share = (lines + tiles - 1) / tiles;
  for (int64_t left = block.rows; left > 0;) {
    const int64_t rows = (left + most - 1) / most;  // number of strips that remain
    const int64_t n = (left + rows - 1) / rows;
    [&]<int... r>(std::integer_sequence<int, r...>) {
      ((n == r + 1 ? multiply_strip<r + 1>(block, left == n, ahead) : void()), ...);
    }(std::make_integer_sequence<int, kTileRows>());
    block.x += n * block.x_step, block.out += n * block.out_step, left -= n;
  }
}

void multiply_block(const MultiplyBlock& whole) {
  // Tiles of four rows are three vectors wide, so they divide multiples of three vectors evenly.
  const int64_t vectors = (whole.columns + kVector - 1) / kVector;
  const int64_t most = vectors % 3 == 0 ? 4 : kTileRows;
  for (int64_t k = 0; k < whole.depth; k += whole.depth_step) {
    MultiplyBlock part = whole;
    part.x += k, part.matrix += k * whole.matrix_step;
    part.depth = std::min(whole.depth_step, whole.depth - k);
    part.adds = whole.adds || k > 0;
    const int64_t next = std::min(whole.depth_step, whole.depth - k - part.depth);
    multiply_part(
        part, most,
        {part.matrix + part.depth * whole.matrix_step, next, whole.columns, whole.matrix_step});
  }
}

}  // namespace
}  // namespace autobatch
