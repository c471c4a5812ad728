#include "gather_test.h"

namespace autobatch {
namespace {

// --- scatter_add ---

TEST_CASE("scatter_add: regions apart from each other, in every type", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    TestMemory memory;
    for (const int64_t size : {60, 64}) {
      const Tensor& buffer = memory.buffer(integers({size}, type));
      memory.add(buffer, 40, {4, 5}, {1, 4});
      memory.add(buffer, 0, {3, 2}, {4, 1});
      memory.add(buffer, 20, {});
      memory.add(buffer, 3, {0, 2});
      memory.add(buffer, 22, {2, 2, 2}, {8, 4, 1});
    }
    const Tensor values = integers({memory.numel()}, type);
    const auto expected = scattered(memory, values);
    scatter_add(values, memory.regions);
    check_buffers(memory, expected);
  }
}

TEST_CASE("scatter_add: regions that coincide or overlap are summed", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    TestMemory memory;
    const Tensor& buffer = memory.buffer(integers({60}, type));
    for (int m = 0; m < 5; ++m) memory.add(buffer, 8, {3, 2});    // the same region
    for (int m = 0; m < 5; ++m) memory.add(buffer, 20 + m, {6});  // shifted by one each time
    memory.add(buffer, 40, {4, 3}, {0, 1});                       // first stride 0
    memory.add(buffer, 45, {4, 3}, {1, 0});                       // last stride 0
    memory.add(buffer, 50, {2, 2}, {0, 0});                       // all strides 0
    memory.add(buffer, 50, {4, 4}, {1, 1});                       // overlapping windows
    const Tensor values = integers({memory.numel()}, type);
    const auto expected = scattered(memory, values);
    scatter_add(values, memory.regions);
    check_buffers(memory, expected);
  }
}

TEST_CASE("scatter_add: every kind of region, each over the others", "[gather]") {
  TestMemory memory;
  add_all_kinds(memory, memory.buffer(integers({60}, at::kDouble)));
  add_all_kinds(memory, memory.buffer(integers({90}, at::kDouble).narrow(0, 20, 70)));
  add_all_kinds(memory, memory.buffers()[0]);
  const Tensor values = integers({memory.numel()}, at::kDouble);
  const auto expected = scattered(memory, values);
  scatter_add(values, memory.regions);
  check_buffers(memory, expected);
}

TEST_CASE("scatter_add: a region without a buffer is skipped with its values", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(integers({40}, at::kFloat));
  memory.add_skipped({3, 2});
  memory.add(buffer, 4, {3, 2}, {5, 1});
  memory.add_skipped({2});
  memory.add_skipped({0});
  memory.add(buffer, 30, {4});
  memory.add_skipped({5});
  const Tensor values = integers({memory.numel()}, at::kFloat);
  const auto expected = scattered(memory, values);
  scatter_add(values, memory.regions);
  check_buffers(memory, expected);
}

TEST_CASE("scatter_add: NaN for nobody reaches nobody", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::zeros({8}));
  memory.add_skipped({4});
  memory.add(buffer, 0, {4});
  const Tensor values = at::ones({8});
  values.narrow(0, 0, 4).fill_(std::numeric_limits<float>::quiet_NaN());
  scatter_add(values, memory.regions);
  CHECK(at::equal(buffer, at::tensor({1., 0.}, at::kFloat).repeat_interleave(4)));
}

TEST_CASE("scatter_add: large, with one thread and with two", "[gather]") {
  const Threads threads(GENERATE(1, 2));
  const at::ScalarType type = GENERATE(at::kFloat, at::kDouble);
  CAPTURE(at::get_num_threads(), type);
  TestMemory memory;
  const Tensor& buffer = memory.buffer(integers({1 << 18}, type));
  for (int64_t m = 0; m < 300; ++m) {
    const int64_t rows = 1 + m * 7919 % 53;
    memory.add(buffer, m * 1299709 % 200000, {rows, 40});  // many of them overlap
    if (m % 10 == 0) memory.add_skipped({rows, 7});
    if (m % 7 == 0) memory.add(buffer, m * 31, {rows, 20}, {44, 2});
  }
  const Tensor values = integers({memory.numel()}, type);
  const auto expected = scattered(memory, values);
  scatter_add(values, memory.regions);
  check_buffers(memory, expected);
}

// --- copy_regions, add_regions ---

struct Pair {
  std::vector<int64_t> from_sizes, from_strides, to_sizes, to_strides;
};

// Dense or strided on each side. The two shapes may differ if their numbers of elements agree.
const std::vector<Pair>& pairs() {
  static const std::vector<Pair> kPairs = {
      {{3, 4}, {4, 1}, {3, 4}, {4, 1}},  // dense to dense
      {{3, 4}, {4, 1}, {3, 4}, {5, 1}},  // to rows with gaps
      {{3, 4}, {5, 1}, {3, 4}, {4, 1}},  // from rows with gaps
      {{3, 4}, {5, 1}, {3, 4}, {6, 1}},  // gaps on both sides
      {{3, 4}, {1, 3}, {3, 4}, {4, 1}},  // from transposed
      {{3, 4}, {4, 1}, {3, 4}, {1, 3}},  // to transposed
      {{3, 4}, {1, 3}, {3, 4}, {6, 1}},  // transposed to rows with gaps
      {{3, 4}, {1, 3}, {3, 4}, {1, 3}},  // both transposed
      {{4}, {0}, {4}, {2}},              // expanded to stride 2
      {{3, 4}, {0, 1}, {3, 4}, {4, 1}},  // expanded rows
      {{12}, {1}, {3, 4}, {5, 1}},       // another shape
      {{3, 4}, {5, 1}, {2, 6}, {8, 1}},
      {{3, 1, 4}, {4, 9, 1}, {3, 4}, {4, 1}},  // a dimension of size 1
      {{}, {}, {1}, {7}},                      // one element
      {{0, 3}, {3, 1}, {0, 3}, {5, 1}},        // empty
      {{2, 2, 3}, {6, 3, 1}, {2, 2, 3}, {9, 4, 1}},
  };
  return kPairs;
}

void check_regions(at::ScalarType type, bool add) {
  CAPTURE(type, add);
  TestMemory from, to;
  const Tensor& source = from.buffer(integers({600}, type));
  const Tensor& other_source = from.buffer(integers({700}, type).narrow(0, 50, 600));
  const Tensor& target = to.buffer(integers({600}, type));
  Tensor expected = target.clone();
  int64_t at = 1;
  for (const Pair& pair : pairs()) {
    const Tensor& buffer = at % 2 == 0 ? source : other_source;
    from.add(buffer, at, pair.from_sizes, pair.from_strides);
    to.add(target, at, pair.to_sizes, pair.to_strides);
    at += 25;
    const Region& region = to.regions.back();
    const Tensor values = view_of(from.regions.back()).reshape({-1});
    const Tensor kept = expected.as_strided(pair.to_sizes, pair.to_strides, region.offset);
    const Tensor change = add ? values : values - kept.reshape({-1});
    expected = with_added(expected, region, change);
  }
  const Tensor source_before = source.clone();
  if (add) {
    add_regions(from.regions, to.regions);
  } else {
    copy_regions(from.regions, to.regions);
  }
  CHECK(at::equal(target, expected));
  CHECK(at::equal(source, source_before));
}

TEST_CASE("copy_regions: strided to strided, in every type", "[gather]") {
  for (const at::ScalarType type : kTypes) check_regions(type, false);
  check_regions(at::kLong, false);
}

TEST_CASE("add_regions: strided to strided, in every type", "[gather]") {
  for (const at::ScalarType type : kTypes) check_regions(type, true);
}

TEST_CASE("copy_regions, add_regions: nothing to do", "[gather]") {
  copy_regions({}, {});
  add_regions({}, {});
}

TEST_CASE("add_regions: targets that coincide are summed", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    TestMemory from, to;
    const Tensor& source = from.buffer(integers({60}, type));
    const Tensor& target = to.buffer(integers({20}, type));
    Tensor expected = target.clone();
    for (int64_t m = 0; m < 6; ++m) {
      from.add(source, 7 * m, {2, 3}, {m % 2 == 0 ? 3 : 4, 1});
      to.add(target, m / 2, {2, 3}, {6, 2});
      expected = with_added(expected, to.regions.back(), view_of(from.regions.back()));
    }
    to.add(target, 5, {4, 2}, {0, 1});  // a region that overlaps itself
    from.add(source, 30, {4, 2});
    expected = with_added(expected, to.regions.back(), view_of(from.regions.back()));
    add_regions(from.regions, to.regions);
    CHECK(at::equal(target, expected));
  }
}

TEST_CASE("copy_regions, add_regions: large, with one thread and with two", "[gather]") {
  const Threads threads(GENERATE(1, 2));
  const bool add = GENERATE(false, true);
  CAPTURE(at::get_num_threads(), add);
  TestMemory from, to;
  const Tensor& source = from.buffer(integers({1 << 18}, at::kFloat));
  const Tensor& target = to.buffer(integers({1 << 19}, at::kFloat));
  Tensor expected = target.clone();
  for (int64_t m = 0; m < 64; ++m) {  // a cat along the last dimension
    from.add(source, m * 40 * 100, {40, 100});
    to.add(target, m * 40 * 200 + m % 2 * 100, {40, 100}, {200, 1});
    const Tensor region = expected.as_strided({40, 100}, {200, 1}, to.regions.back().offset);
    add ? region.add_(view_of(from.regions.back())) : region.copy_(view_of(from.regions.back()));
  }
  add ? add_regions(from.regions, to.regions) : copy_regions(from.regions, to.regions);
  CHECK(at::equal(target, expected));
}

// --- rows ---

TEST_CASE("segment_sum: segments of any length", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    const std::vector<int64_t> counts = {3, 0, 1, 5, 0};
    const int64_t inner = GENERATE(1, 4);
    Tensor rows = integers({9, inner}, type);
    SECTION("rows in order") {}
    SECTION("rows with gaps") { rows = integers({9, inner + 3}, type).narrow(1, 2, inner); }
    SECTION("rows transposed") { rows = integers({inner, 9}, type).t(); }
    std::vector<Tensor> expected;
    for (const Tensor& part : rows.split_with_sizes(counts)) expected.push_back(part.sum(0));
    Tensor out = at::full({5, inner}, 77, type);  // must be overwritten
    segment_sum(rows, counts, out);
    CHECK(at::equal(out, at::stack(expected)));
  }
}

TEST_CASE("segment_sum: large, with one thread and with two", "[gather]") {
  const Threads threads(GENERATE(1, 2));
  std::vector<int64_t> counts;
  int64_t total = 0;
  for (int64_t s = 0; s < 200; ++s) total += counts.emplace_back(s * 7919 % 53);
  const Tensor rows = integers({total, 64}, at::kFloat);
  std::vector<Tensor> expected;
  for (const Tensor& part : rows.split_with_sizes(counts)) expected.push_back(part.sum(0));
  Tensor out = at::empty({200, 64});
  segment_sum(rows, counts, out);
  CHECK(at::equal(out, at::stack(expected)));
}

TEST_CASE("repeat_rows: each row its own number of times", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    const Tensor rows = integers({4, 3}, type);
    const auto counts =
        GENERATE(std::vector<int64_t>{1, 1, 1, 1}, std::vector<int64_t>{2, 2, 2, 2},
                 std::vector<int64_t>{3, 0, 1, 5}, std::vector<int64_t>{0, 0, 0, 0});
    std::vector<Tensor> expected;
    for (int64_t s = 0; s < 4; ++s) expected.push_back(rows[s].expand({counts[s], 3}));
    const Tensor out = repeat_rows(rows, counts);
    CHECK(at::equal(out, at::cat(expected)));
  }
}

TEST_CASE("index_add_rows: repeated indices are summed, `skip` left out", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    for (const at::ScalarType index_type : {at::kLong, at::kInt}) {
      CAPTURE(type, index_type);
      const Tensor indices = at::tensor({4, 0, 2, 4, 2, 4, 1}, index_type);
      const int64_t skip = GENERATE(-1, 2, 4);
      Tensor rows = integers({7, 3}, type);
      SECTION("rows in order") {}
      SECTION("rows with gaps") { rows = integers({7, 5}, type).narrow(1, 1, 3); }
      const Tensor before = integers({6, 3}, type);
      Tensor expected = before.clone();
      for (int64_t r = 0; r < 7; ++r) {
        const int64_t index = indices[r].item<int64_t>();
        if (index != skip) expected[index].add_(rows[r]);
      }
      const Tensor target = before.clone();
      index_add_rows(target, indices, rows, skip);
      CHECK(at::equal(target, expected));
    }
  }
}

TEST_CASE("index_add_rows: a fresh target needs no zeros beforehand", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    for (const int threads : {1, 2}) {
      const Threads set(threads);
      const Tensor rows = integers({6, 5}, type);
      const Tensor indices = at::tensor({3, 0, 3, 7, 2, 3}, at::kLong);
      for (const bool repeated : {false, true}) {
        const at::DimVector times = repeated ? at::DimVector{2, 0, 1} : at::DimVector{};
        const Tensor expected = at::zeros({9, 5}, rows.options());
        index_add_rows(expected, indices, rows, 7, times);
        const Tensor found = at::full({9, 5}, 17, rows.options());
        index_add_rows(found, indices, rows, 7, times, /*fresh=*/true);
        CHECK(at::equal(found, expected));
      }
    }
  }
}

TEST_CASE("index_add_rows: a fresh target that the caches do not hold", "[gather]") {
  for (const int64_t width : {1021, 1024}) {  // unaligned rows, and aligned rows
    CAPTURE(width);
    const Tensor indices = at::tensor({0, 4099, 17, 18, 17, 2000}, at::kLong);
    const Tensor rows = integers({6, width}, at::kFloat);
    const Tensor expected = at::zeros({4100, width});
    index_add_rows(expected, indices, rows, -1);
    const Tensor found = at::full({4100, width}, 3.0);
    index_add_rows(found, indices, rows, -1, {}, /*fresh=*/true);
    CHECK(at::equal(found, expected));
  }
}

TEST_CASE("index_add_rows: NaN in a skipped row reaches nobody", "[gather]") {
  const Tensor target = at::zeros({3, 2});
  const Tensor rows = at::ones({2, 2});
  rows[0].fill_(std::numeric_limits<float>::quiet_NaN());
  index_add_rows(target, at::tensor({1, 2}, at::kLong), rows, 1);
  CHECK(at::equal(target, at::tensor({0., 0., 0., 0., 1., 1.}, at::kFloat).view({3, 2})));
}

TEST_CASE("index_add_rows: large, with one thread and with two", "[gather]") {
  const Threads threads(GENERATE(1, 2));
  const Tensor indices = at::randint(0, 500, {8000}, at::kLong);
  const Tensor rows = integers({8000, 64}, at::kFloat);
  const Tensor target = at::zeros({500, 64});
  index_add_rows(target, indices, rows, 7);
  Tensor expected = at::zeros({500, 64}).index_add(0, indices, rows);
  expected[7].zero_();
  CHECK(at::equal(target, expected));
}

}  // namespace
}  // namespace autobatch
