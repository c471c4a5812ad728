#include "gather_test.h"

namespace autobatch {
namespace {

// --- layout_of ---

Layout layout(const TestMemory& memory) { return layout_of(memory.regions); }

TEST_CASE("located: what is evenly spaced is as its regions one by one", "[gather]") {
  const Tensor buffer = at::arange(40, at::kFloat);
  GeometryTable geometries;
  const Geometry* row = geometries.intern_contiguous({4});
  for (const int64_t step : {0, 4, 7}) {
    const RegionRows even({&buffer, 3, row}, 3, step);
    const RegionRows listed(even.all());
    CHECK(even.count() == 3);
    CHECK(listed.layout().same == even.layout().same);
    CHECK(listed.layout().regular == even.layout().regular);
    CHECK(listed.layout().consecutive == even.layout().consecutive);
    CHECK(listed.layout().step == even.layout().step);
    CHECK(listed.layout().numel == even.layout().numel);
    CHECK(at::equal(regular_view(even), buffer.as_strided({3, 4}, {step, 1}, 3)));
  }
  CHECK(RegionRows({&buffer, 3, row}, 1, 9).layout().same);
}

TEST_CASE("layout: one region", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(20, at::kFloat));
  memory.add(buffer, 3, {2, 4});
  const Layout l = layout(memory);
  CHECK(l.uniform);
  CHECK(l.same_buffer);
  CHECK(l.same);
  CHECK(l.regular);
  CHECK(l.consecutive);
  CHECK(l.numel == 8);
  CHECK(
      at::equal(regular_view(RegionRows(memory.regions)), view_of(memory.regions[0]).unsqueeze(0)));
  CHECK(at::equal(consecutive_view(RegionRows(memory.regions)), buffer.narrow(0, 3, 8)));
}

TEST_CASE("layout: the same region each time", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(20, at::kFloat));
  for (int m = 0; m < 3; ++m) memory.add(buffer, 5, {4});
  const Layout l = layout(memory);
  CHECK(l.same);
  CHECK(l.regular);
  CHECK(l.step == 0);
  CHECK_FALSE(l.consecutive);
  CHECK(l.numel == 12);
  CHECK(at::equal(regular_view(RegionRows(memory.regions)), buffer.narrow(0, 5, 4).expand({3, 4})));
}

TEST_CASE("layout: side by side", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(20, at::kFloat));
  for (int m = 0; m < 3; ++m) memory.add(buffer, 2 + 6 * m, {3, 2});
  const Layout l = layout(memory);
  CHECK_FALSE(l.same);
  CHECK(l.regular);
  CHECK(l.step == 6);
  CHECK(l.consecutive);
  CHECK(
      at::equal(regular_view(RegionRows(memory.regions)), buffer.narrow(0, 2, 18).view({3, 3, 2})));
  CHECK(at::equal(consecutive_view(RegionRows(memory.regions)), buffer.narrow(0, 2, 18)));
}

TEST_CASE("layout: evenly spaced, with gaps and strides", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(60, at::kFloat));
  for (int m = 0; m < 3; ++m) memory.add(buffer, 1 + 20 * m, {3, 2}, {6, 1});
  const Layout l = layout(memory);
  CHECK(l.regular);
  CHECK_FALSE(l.consecutive);
  CHECK(l.step == 20);
  CHECK(
      at::equal(regular_view(RegionRows(memory.regions)).reshape({-1}), gathered(memory.regions)));
}

TEST_CASE("layout: strided regions that start where the last one's count ends", "[gather]") {
  // Regions [2, 2] with a row stride of 3, at distances of 4: evenly spaced, but with gaps.
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(20, at::kFloat));
  for (int m = 0; m < 3; ++m) memory.add(buffer, 4 * m, {2, 2}, {3, 1});
  const Layout l = layout(memory);
  CHECK(l.regular);
  CHECK_FALSE(l.consecutive);
}

TEST_CASE("layout: scattered", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(40, at::kFloat));
  const auto offsets = GENERATE(std::vector<int64_t>{0, 4, 12}, std::vector<int64_t>{8, 4, 0},
                                std::vector<int64_t>{0, 4, 4}, std::vector<int64_t>{4, 4, 8});
  for (const int64_t offset : offsets) memory.add(buffer, offset, {4});
  const Layout l = layout(memory);
  CHECK(l.uniform);
  CHECK(l.same_buffer);
  CHECK_FALSE(l.same);
  CHECK_FALSE(l.regular);
  CHECK_FALSE(l.consecutive);
}

TEST_CASE("layout: ragged rows side by side", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(40, at::kFloat));
  memory.add(buffer, 3, {2, 4});
  memory.add(buffer, 11, {0, 4});
  memory.add(buffer, 11, {5, 4});
  memory.add(buffer, 31, {1, 4});
  const Layout l = layout(memory);
  CHECK_FALSE(l.uniform);
  CHECK_FALSE(l.same);
  CHECK_FALSE(l.regular);
  CHECK(l.consecutive);
  CHECK(l.numel == 32);
  CHECK(at::equal(consecutive_view(RegionRows(memory.regions)), buffer.narrow(0, 3, 32)));
}

TEST_CASE("layout: ragged rows with a gap, or out of order", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(40, at::kFloat));
  const int64_t second = GENERATE(9, 7, 20);
  memory.add(buffer, 0, {2, 4});
  memory.add(buffer, second, {3, 4});
  CHECK_FALSE(layout(memory).consecutive);
  CHECK_FALSE(layout(memory).regular);
}

TEST_CASE("layout: of two buffers", "[gather]") {
  TestMemory memory;
  const Tensor& one = memory.buffer(at::arange(20, at::kFloat));
  const Tensor& other = memory.buffer(at::arange(20, at::kFloat));
  SECTION("at the same offset") {
    memory.add(one, 4, {4});
    memory.add(other, 4, {4});
  }
  SECTION("at offsets that would be consecutive") {
    memory.add(one, 4, {4});
    memory.add(other, 8, {4});
  }
  SECTION("only the last one elsewhere") {
    memory.add(one, 4, {4});
    memory.add(one, 8, {4});
    memory.add(other, 12, {4});
  }
  const Layout l = layout(memory);
  CHECK(l.uniform);
  CHECK_FALSE(l.same_buffer);
  CHECK_FALSE(l.same);
  CHECK_FALSE(l.regular);
  CHECK_FALSE(l.consecutive);
}

TEST_CASE("layout: views count from the data pointer of a buffer within its storage", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(40, at::kFloat).narrow(0, 10, 24));
  for (int m = 0; m < 3; ++m) memory.add(buffer, 8 * m, {2, 4});
  CHECK(at::equal(region_view(memory.regions[1]), buffer.view({3, 2, 4})[1]));
  CHECK(at::equal(regular_view(RegionRows(memory.regions)), buffer.view({3, 2, 4})));
  CHECK(at::equal(consecutive_view(RegionRows(memory.regions)), buffer));
}

TEST_CASE("layout: views share the buffer's memory", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::zeros({12}));
  for (int m = 0; m < 3; ++m) memory.add(buffer, 4 * m, {4});
  region_view(memory.regions[0]).fill_(1);
  regular_view(RegionRows(memory.regions))[1].fill_(2);
  consecutive_view(RegionRows(memory.regions)).narrow(0, 8, 4).fill_(3);
  CHECK(at::equal(buffer, at::tensor({1., 2., 3.}, at::kFloat).repeat_interleave(4)));
}

// --- gather_into ---

TEST_CASE("gather_into: every kind of region, in every type", "[gather]") {
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    TestMemory memory;
    add_all_kinds(memory, memory.buffer(integers({60}, type)));
    add_all_kinds(memory, memory.buffer(integers({90}, type).narrow(0, 20, 70)));
    add_all_kinds(memory, memory.buffer(integers({8, 9}, type)));
    memory.add(memory.buffers()[0], 9, {3, 4}, {0, 1});  // expanded
    memory.add(memory.buffers()[0], 9, {3, 4}, {1, 0});
    memory.add(memory.buffers()[0], 9, {3, 4}, {1, 1});  // overlapping windows
    const Tensor out = at::full({memory.numel()}, 77, type);
    gather_into(memory.regions, out);
    CHECK(at::equal(out, gathered(memory.regions)));
  }
}

TEST_CASE("gather_into: integers and booleans", "[gather]") {
  for (const at::ScalarType type : {at::kLong, at::kInt, at::kBool, at::kByte}) {
    CAPTURE(type);
    TestMemory memory;
    add_all_kinds(memory, memory.buffer(at::randint(0, 5, {60}, at::kLong).to(type)));
    const Tensor out = at::zeros({memory.numel()}, type);
    gather_into(memory.regions, out);
    CHECK(at::equal(out, gathered(memory.regions)));
  }
}

TEST_CASE("gather_into: writes its own range only, whatever the shape of out", "[gather]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(at::arange(60, at::kFloat));
  for (const int64_t offset : {40, 0, 20}) memory.add(buffer, offset, {2, 3}, {7, 2});
  const Tensor whole = at::full({30}, -1, at::kFloat);
  gather_into(memory.regions, whole.narrow(0, 6, 18).view({3, 2, 3}));
  CHECK(at::equal(whole.narrow(0, 6, 18), gathered(memory.regions)));
  CHECK(at::all(whole.narrow(0, 0, 6) == -1).item<bool>());
  CHECK(at::all(whole.narrow(0, 24, 6) == -1).item<bool>());
}

TEST_CASE("gather_into: large enough for several threads", "[gather]") {
  const Threads threads(GENERATE(1, 2));
  const at::ScalarType type = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kComplexDouble);
  CAPTURE(at::get_num_threads(), type);
  TestMemory memory;
  const Tensor& one = memory.buffer(integers({1 << 20}, type));
  const Tensor& other = memory.buffer(integers({1 << 18}, type));
  SECTION("many regions, ragged and strided") {
    for (int64_t m = 0; m < 400; ++m) {
      const int64_t rows = m * 7919 % 53;
      memory.add(one, m * 104729 % 900000, {rows, 40});
      memory.add(other, m * 1299709 % 200000, {rows, 20}, {44, 2});
    }
  }
  SECTION("few regions, one of them large") {
    memory.add(one, 17, {700000});
    memory.add(other, 3, {5});
    memory.add(other, 0, {512, 500}, {1, 512});
  }
  REQUIRE(memory.numel() * c10::elementSize(type) > 1 << 19);
  const Tensor out = at::full({memory.numel()}, 77, type);
  gather_into(memory.regions, out);
  CHECK(at::equal(out, gathered(memory.regions)));
}

}  // namespace
}  // namespace autobatch
