// The code for devices other than the CPU: the implementation with ATen's ops, and the tables that
// the CUDA kernels read. The tests read the tables on the host with the kernels' own functions.
#include "autobatch/kernels/cuda/region_table.h"
#include "autobatch/kernels/gather_device.h"
#include "gather_test.h"

#include <cstring>

namespace autobatch {
namespace {

// Does on the host what the kernels do, unit by unit.
class OnHost {
 public:
  explicit OnHost(const cuda::Plan& plan)
      : bytes_(static_cast<size_t>(plan.layout().num_bytes())), unit_(plan.unit) {
    plan.write(bytes_.data());
    table_ = plan.layout().at(bytes_.data());
  }

  void gather(char* packed) const {
    for_each_unit([&](const cuda::Entry&, int64_t i, char* place) {
      std::memcpy(packed + i * unit_, place, static_cast<size_t>(unit_));
    });
  }
  void unpack(const char* packed) const {
    for_each_unit([&](const cuda::Entry&, int64_t i, char* place) {
      std::memcpy(place, packed + i * unit_, static_cast<size_t>(unit_));
    });
  }
  template <class T>
  void add(const T* values) const {
    const int64_t width = unit_ / static_cast<int64_t>(sizeof(T));
    for_each_unit([&](const cuda::Entry& entry, int64_t i, char* place) {
      for (int32_t c = 0; c < entry.count; ++c) {
        const int64_t from = table_.contributions[entry.first + c] + (i - entry.start);
        for (int64_t k = 0; k < width; ++k) {
          reinterpret_cast<T*>(place)[k] += values[from * width + k];
        }
      }
    });
  }

 private:
  template <class Visit>
  void for_each_unit(const Visit& visit) const {
    for (int64_t i = 0; i < table_.total; ++i) {
      const cuda::Entry& entry = table_.entries[cuda::find_entry(table_, i)];
      const int64_t offset = cuda::offset_in(table_.shapes[entry.shape], i - entry.start);
      visit(entry, i, reinterpret_cast<char*>(entry.address) + offset * unit_);
    }
  }

  std::vector<char> bytes_;
  int64_t unit_;
  cuda::Table table_{};
};

// Adds aligned and unaligned regions, of equal and of different lengths, dense and strided.
void add_kinds(TestMemory& memory, at::ScalarType type, bool disjoint) {
  const Tensor& a = memory.buffer(integers({400}, type));
  const Tensor& b = memory.buffer(integers({400}, type));
  memory.add(a, 0, {4, 16});
  memory.add(b, 16, {2, 32}, {64, 1});
  memory.add(a, 128, {4, 4, 4}, {4, 16, 1});
  memory.add(b, 200, {3, 5}, {1, 3});
  memory.add(a, 200, {});
  memory.add(a, 210, {0, 4});
  memory.add(b, 301, {7});
  memory.add(b, 310, {1, 3, 1, 2}, {90, 8, 7, 2});
  if (disjoint) return;
  memory.add(a, 4, {4, 16});
  memory.add(a, 300, {3, 8}, {0, 1});
}

TEST_CASE("device: a copy's table leads where ATen's copies do", "[gather][device]") {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kByte}) {
    CAPTURE(type);
    TestMemory memory;
    add_kinds(memory, type, /*disjoint=*/true);
    const Tensor expected = at::empty({memory.numel()}, at::TensorOptions().dtype(type));
    by_aten::gather(memory.regions, expected);
    const Tensor found = at::zeros_like(expected);
    auto* packed = static_cast<char*>(found.mutable_data_ptr());
    const auto plan =
        cuda::plan_copy(memory.regions, found.element_size(), packed, cuda::Access::kRead);
    REQUIRE(plan.has_value());
    OnHost(*plan).gather(packed);
    CHECK(at::equal(found, expected));

    const Tensor other = integers({memory.numel()}, type == at::kByte ? at::kByte : type);
    const auto back = cuda::plan_copy(memory.regions, other.element_size(), other.const_data_ptr(),
                                      cuda::Access::kWrite);
    OnHost(*back).unpack(static_cast<const char*>(other.const_data_ptr()));
    by_aten::gather(memory.regions, found);
    CHECK(at::equal(found, other));
  }
}

TEST_CASE("device: what is aligned goes by 16 bytes, and one length needs no search",
          "[gather][device]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(integers({512}, at::kFloat));
  for (int64_t m = 0; m < 6; ++m) memory.add(buffer, 64 * m, {2, 4}, {32, 1});
  const Tensor out = at::empty({48});
  auto plan = cuda::plan_copy(memory.regions, 4, out.const_data_ptr(), cuda::Access::kRead);
  CHECK(plan->unit == 16);
  CHECK(plan->uniform == 2);
  CHECK(plan->shapes.size() == 1);
  memory.add(buffer, 386, {6});
  plan = cuda::plan_copy(memory.regions, 4, out.const_data_ptr(), cuda::Access::kRead);
  CHECK(plan->unit == 8);
  CHECK(plan->uniform == 0);
}

TEST_CASE("device: sums, in any order and in their own", "[gather][device]") {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    for (const bool in_order : {false, true}) {
      TestMemory memory;
      add_kinds(memory, type, /*disjoint=*/in_order);
      const Tensor& c = memory.buffer(integers({100}, type));
      for (int m = 0; m < 4; ++m) memory.add(c, 4, {3, 8});  // four times the same region
      memory.add_skipped({5});
      memory.add(c, 40, {2, 4});
      memory.add(c, 4, {3, 8});
      const Tensor values = integers({memory.numel()}, type);
      const auto expected = scattered(memory, values);
      const auto order = in_order ? cuda::Order::kOfValues : cuda::Order::kAny;
      const auto plan = cuda::plan_sums(memory.regions, values.element_size(), false,
                                        values.const_data_ptr(), order);
      REQUIRE(plan.has_value());
      type == at::kFloat ? OnHost(*plan).add(values.const_data_ptr<float>())
                         : OnHost(*plan).add(values.const_data_ptr<double>());
      check_buffers(memory, expected);
    }
  }
}

TEST_CASE("device: in order, overlapping places are left to ATen", "[gather][device]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(integers({40}, at::kFloat));
  memory.add(buffer, 0, {8});
  memory.add(buffer, 4, {8});
  const auto sums = [&](cuda::Order order) {
    return cuda::plan_sums(memory.regions, 4, false, buffer.const_data_ptr(), order).has_value();
  };
  CHECK(!sums(cuda::Order::kOfValues));
  CHECK(sums(cuda::Order::kAny));
}

TEST_CASE("device: ATen's way is that of the kernels here", "[gather][device]") {
  for (const at::ScalarType type : kTypes) {
    TestMemory memory;
    add_kinds(memory, type, /*disjoint=*/false);
    memory.add_skipped({2});
    const Tensor& windows = memory.buffer(integers({30}, type));
    memory.add(windows, 2, {4, 4}, {1, 1});
    const Tensor values = integers({memory.numel()}, type);
    const auto expected = scattered(memory, values);
    by_aten::scatter_add(values, memory.regions);
    check_buffers(memory, expected);
  }
}

}  // namespace
}  // namespace autobatch
