#include "autobatch/common/pool.h"

#include <ATen/ATen.h>

#include "catch.h"

#include <thread>
#include <vector>

namespace autobatch {
namespace {

const at::TensorOptions kFloats = at::TensorOptions().dtype(at::kFloat);

// Whether the pool keeps freed memory. Under AddressSanitizer it keeps none.
bool pools() {
  empty_pool();
  {
    pooled_empty(1 << 20, kFloats);
  }
  const bool kept = pooled_bytes() > 0;
  empty_pool();
  return kept;
}

TEST_CASE("pool: a tensor like any other", "[pool]") {
  at::Tensor t = pooled_zeros(100'000, kFloats.dtype(at::kDouble));
  CHECK(t.sizes() == at::IntArrayRef{100'000});
  CHECK(t.is_contiguous());
  CHECK(t.dtype() == at::kDouble);
  CHECK(t.storage().nbytes() == 800'000);
  CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % c10::gAlignment == 0);
  CHECK(t.sum().item<double>() == 0);
  t.resize_({300'000}).fill_(2);
  CHECK(t.sum().item<double>() == 600'000);
  CHECK(pooled_empty(0, kFloats).numel() == 0);
  CHECK(pooled_empty(3, kFloats).fill_(1).sum().item<float>() == 3);
}

TEST_CASE("pool: every size has room for its elements", "[pool]") {
  const size_t step = 997;
  for (size_t bytes = 1 << 14; bytes < (1 << 18); bytes += step) {
    at::Tensor t = pooled_empty(static_cast<int64_t>(bytes), kFloats.dtype(at::kByte));
    t.fill_(1);
    CHECK(t.sum().item<int64_t>() == static_cast<int64_t>(bytes));
  }
}

TEST_CASE("pool: memory is used again, and no two live tensors share it", "[pool]") {
  if (!pools()) return;
  const void* first = nullptr;
  {
    const at::Tensor t = pooled_empty(1 << 20, kFloats);
    first = t.data_ptr();
  }
  CHECK(pooled_bytes() >= size_t{4} << 20);
  const at::Tensor again = pooled_empty((1 << 20) - 5000, kFloats);
  const at::Tensor other = pooled_empty((1 << 20) - 5000, kFloats);
  CHECK(again.data_ptr() == first);
  CHECK(other.data_ptr() != first);
  CHECK(pooled_bytes() == 0);
}

TEST_CASE("pool: a tensor much smaller takes none of it", "[pool]") {
  if (!pools()) return;
  {
    pooled_empty(1 << 20, kFloats);
  }
  const size_t before = pooled_bytes();
  const at::Tensor small = pooled_empty(1 << 15, kFloats);
  CHECK(pooled_bytes() == before);
}

TEST_CASE("pool: what no flush needs goes back to the system", "[pool]") {
  if (!pools()) return;
  {
    pooled_empty(1 << 24, kFloats);
  }
  for (int flush = 0; flush < 40; ++flush) {
    {
      pooled_empty(1 << 18, kFloats);
    }
    trim_pool();
  }
  CHECK(pooled_bytes() < size_t{2} << 20);
  CHECK(pooled_bytes() > 0);  // the block that every flush used
  empty_pool();
  CHECK(pooled_bytes() == 0);
}

TEST_CASE("pool: threads", "[pool]") {
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (int k = 0; k < 4; ++k) {
    threads.emplace_back([k, &wrong] {
      std::vector<at::Tensor> held;
      for (int i = 0; i < 300; ++i) {
        held.push_back(pooled_empty(5000 + 100 * (i % 7), kFloats).fill_(k));
        if (held.size() > 5) held.erase(held.begin());
        for (const at::Tensor& t : held) wrong[k] += t.ne(k).any().item<bool>() ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

TEST_CASE("pool: vectors", "[pool]") {
  const bool kept = pools();
  const void* first = nullptr;
  {
    PooledVector<int> numbers;
    for (int i = 0; i < 100'000; ++i) numbers.push_back(i);
    for (int i = 0; i < 100'000; ++i) REQUIRE(numbers[static_cast<size_t>(i)] == i);
    PooledVector<int> small(3, 7);  // too small for the pool
    small = numbers;
    numbers.swap(small);
    CHECK(numbers == small);
    first = numbers.data();
  }
  CHECK((pooled_bytes() > 0) == kept);
  if (kept) {
    PooledVector<int> again;
    again.reserve(131'072);
    CHECK(pooled_bytes() > 0);
    CHECK(reinterpret_cast<uintptr_t>(again.data()) % alignof(std::max_align_t) == 0);
    CHECK(first != nullptr);
  }
  empty_pool();
}

}  // namespace
}  // namespace autobatch
