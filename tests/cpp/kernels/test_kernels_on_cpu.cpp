// The source of the CUDA kernels, compiled for the CPU (cuda_on_cpu/). Results must equal ATen's
// for any order of the threads. The tests must detect the faults that are planted in copies of the
// source.
#include "autobatch/kernels/cuda/region_table.h"
#include "autobatch/kernels/cuda/row_plan.h"
#include "autobatch/kernels/gather_device.h"
#include "cuda_on_cpu/kernels_on_cpu.h"
#include "gather_test.h"
#include "row_lookups_test.h"

#include <c10/util/complex.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

namespace autobatch {
namespace {

using cuda_on_cpu::launcher;

constexpr int kRounds = 3;  // each round has another thread order

// The bytes of a table in the form that a kernel gets, in memory of exactly this size. Tables that
// fit into a kernel parameter are alternately marked as parameters and as device memory.
class Sent {
 public:
  explicit Sent(const cuda::Plan& plan) : bytes_(new char[plan.layout().num_bytes()]) {
    static int turn = 0;
    const cuda::Layout layout = plan.layout();
    plan.write(bytes_.get());
    table = {layout, bytes_.get(),
             layout.num_bytes() <= cuda::kMostParameterBytes && ++turn % 2 == 0};
  }
  cuda::SentTable table;

 private:
  std::unique_ptr<char[]> bytes_;
};

cuda::Element element_of(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kHalf:
      return cuda::Element::kHalf;
    case at::kBFloat16:
      return cuda::Element::kBFloat16;
    case at::kFloat:
      return cuda::Element::kFloat;
    default:
      return cuda::Element::kDouble;
  }
}

Tensor gathered_by(const KernelsOnCpu& kernels, const Regions& regions, at::ScalarType type) {
  int64_t numel = 0;
  for (const Region& region : regions) numel += region.geometry->numel;
  // An element that no thread writes stays 1.
  Tensor out = at::ones({numel}, at::TensorOptions().dtype(type));
  void* packed = out.mutable_data_ptr();
  const auto plan = cuda::plan_copy(regions, out.element_size(), packed, cuda::Access::kRead);
  if (kernels.gather(Sent(*plan).table, plan->unit, packed, nullptr) != 0) out.fill_(0);
  return out;
}

bool unpack_by(const KernelsOnCpu& kernels, const Tensor& values, const Regions& regions) {
  const void* packed = values.const_data_ptr();
  const auto plan = cuda::plan_copy(regions, values.element_size(), packed, cuda::Access::kWrite);
  return kernels.unpack(Sent(*plan).table, plan->unit, packed, nullptr) == 0;
}

std::optional<int> width_of_sums(const KernelsOnCpu& kernels, const Tensor& values,
                                 const Regions& regions, cuda::Order order) {
  const size_t item = values.element_size();
  const bool is_complex = values.is_complex();
  const void* from = values.const_data_ptr();
  const auto plan = cuda::plan_sums(regions, item, is_complex, from, order);
  if (!plan.has_value()) return std::nullopt;
  const int width = plan->unit / static_cast<int>(is_complex ? item / 2 : item);
  const auto add = order == cuda::Order::kAny ? kernels.scatter_add : kernels.scatter_add_in_order;
  const Sent sent(*plan);
  if (add(sent.table, element_of(values.scalar_type()), width, from, nullptr) != 0) {
    return std::nullopt;
  }
  return width;
}

// --- comparison of one variant of the kernels with ATen, for all kinds of regions ---

bool gathers_as_aten(const KernelsOnCpu& kernels, TestMemory& memory) {
  const Tensor expected = gathered(memory.regions);
  return at::equal(gathered_by(kernels, memory.regions, expected.scalar_type()), expected);
}

// Whether `ours` and `atens`, given the same values, leave the same contents in the buffers.
template <class Atens, class Ours>
bool writes_the_same(TestMemory& memory, const Atens& atens, const Ours& ours) {
  const Tensor values = integers({memory.numel()}, memory.buffers()[0].scalar_type());
  std::vector<Tensor> before, expected;
  for (const Tensor& buffer : memory.buffers()) before.push_back(buffer.clone());
  atens(values);
  for (size_t b = 0; b < before.size(); ++b) {
    expected.push_back(memory.buffers()[b].clone());
    memory.buffers()[b].copy_(before[b]);
  }
  bool right = ours(values);
  for (size_t b = 0; b < before.size(); ++b) {
    right &= at::equal(memory.buffers()[b], expected[b]);
  }
  return right;
}

// The regions of `memory` must not overlap.
bool unpacks_as_aten(const KernelsOnCpu& kernels, TestMemory& memory) {
  return writes_the_same(
      memory, [&](const Tensor& values) { by_aten::unpack(values, memory.regions); },
      [&](const Tensor& values) { return unpack_by(kernels, values, memory.regions); });
}

bool adds_as_aten(const KernelsOnCpu& kernels, TestMemory& memory, cuda::Order order) {
  return writes_the_same(
      memory, [&](const Tensor& values) { by_aten::scatter_add(values, memory.regions); },
      [&](const Tensor& values) {
        return width_of_sums(kernels, values, memory.regions, order).has_value();
      });
}

// Adds regions of every layout, without overlaps if `disjoint`. At offset 0 they are aligned to 16
// bytes.
void add_regions(TestMemory& memory, at::ScalarType type, int64_t offset, bool disjoint) {
  const Tensor& a = memory.buffer(integers({400}, type));
  const Tensor& b = memory.buffer(integers({400}, type));
  memory.add(a, offset, {4, 16});
  memory.add(b, offset + 16, {2, 32}, {64, 1});
  memory.add(a, offset + 128, {4, 4, 16}, {16, 64, 1});
  memory.add(b, offset + 160, {2, 2, 2, 16}, {96, 48, 16, 1});
  memory.add(b, 0, {0, 3});
  if (disjoint) return;
  for (int m = 0; m < 3; ++m) memory.add(a, offset + 128, {4, 4, 16}, {16, 64, 1});
  memory.add(a, offset + 16, {4, 16});
  memory.add(b, offset + 48, {5, 16}, {0, 1});
}

constexpr at::ScalarType kCopied[] = {
    at::kByte,  at::kBool, at::kShort,  at::kHalf,         at::kBFloat16,     at::kInt,
    at::kFloat, at::kLong, at::kDouble, at::kComplexFloat, at::kComplexDouble};

bool all_as_aten(const KernelsOnCpu& kernels) {
  bool right = true;
  for (const int64_t offset : {0, 1}) {
    for (const at::ScalarType type : kCopied) {
      TestMemory memory, other;
      add_regions(memory, type, offset, /*disjoint=*/false);
      right &= gathers_as_aten(kernels, memory);
      add_regions(other, type, offset, /*disjoint=*/true);
      right &= unpacks_as_aten(kernels, other);
    }
    for (const at::ScalarType type : kTypes) {
      TestMemory memory, other;
      add_regions(memory, type, offset, /*disjoint=*/false);
      right &= adds_as_aten(kernels, memory, cuda::Order::kAny);
      add_regions(other, type, offset, /*disjoint=*/true);
      const Tensor& same = other.buffer(integers({64}, type));
      for (int m = 0; m < 4; ++m) other.add(same, offset, {3, 16});
      right &= adds_as_aten(kernels, other, cuda::Order::kOfValues);
    }
  }
  return right;
}

// --- lookups of rows ---

bool finds_rows(const KernelsOnCpu& kernels, const TestLookups& lookups, size_t num_lists,
                at::ScalarType type, bool from_end) {
  RowQuery query{lookups.members, {}, from_end};
  query.types.assign(num_lists, type);
  const auto plan = cuda::plan_rows(query);
  if (!plan.has_value()) return false;
  bool right = true;
  for (const bool on_host : {false, true}) {
    const cuda::SentRows rows{plan->layout, plan->entries.data(), on_host};
    const int64_t total = plan->layout.total;
    const Tensor out = at::full({total + 1}, -1, at::kLong);  // one more than the kernel writes
    right &= kernels.find_rows(rows, out.mutable_data_ptr<int64_t>(), nullptr) == 0;
    right &= at::equal(out.narrow(0, 0, total), at::tensor(lookups.rows, at::kLong));
    right &= out[total].item<int64_t>() == -1;
  }
  return right;
}

bool finds_all_rows(const KernelsOnCpu& kernels) {
  bool right = true;
  for (const at::ScalarType type : {at::kLong, at::kInt}) {
    for (const bool from_end : {false, true}) {
      TestLookups one, two;
      for (int64_t m = 0; m < 120; ++m) {  // as a parameter of the small and of the large kind
        one.add({1 + m % 5}, {0}, from_end, {{type, {1 + m % 2}, 3 + m % 4, 1 + m % 3}});
        two.add({2, 1 + m % 3, 2}, {50, 0, 1}, from_end,
                {{type, {0, 2, 1}, 4, 2}, {type, {1, 0, 0}, 2 + m % 2, 1}});
        if (m == 10) {
          right &= finds_rows(kernels, one, 1, type, from_end);
          right &= finds_rows(kernels, two, 2, type, from_end);
        }
      }
      right &= finds_rows(kernels, one, 1, type, from_end);
      right &= finds_rows(kernels, two, 2, type, from_end);
    }
  }
  return right;
}

// --- more units than a 32-bit number counts ---

// A reserved address range. A page takes memory only when it is written.
class Reserved {
 public:
  explicit Reserved(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no ", bytes, " bytes of addresses");
    data = static_cast<uint8_t*>(at);
  }
  ~Reserved() { munmap(data, bytes_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

  uint8_t* data = nullptr;

 private:
  size_t bytes_;
};

// Runs only three blocks of the grid: the first block, the last block and one in between.
class SomeBlocks {
 public:
  SomeBlocks() { launcher.selected = {0, 40'503, kGrid - 1}; }
  ~SomeBlocks() { launcher.selected.clear(); }
  SomeBlocks(const SomeBlocks&) = delete;
  SomeBlocks& operator=(const SomeBlocks&) = delete;

  static std::vector<int64_t> units(int64_t total) {
    std::vector<int64_t> all;
    for (const int64_t block : launcher.selected) {
      for (int64_t i = block * kThreads; i < total; i += kGrid * kThreads) {
        for (int64_t t = 0; t < kThreads && i + t < total; ++t) all.push_back(i + t);
      }
    }
    return all;
  }

 private:
  static constexpr int64_t kGrid = 65'536, kThreads = 256;
};

bool counts_beyond_32_bits(const KernelsOnCpu& kernels) {
  // The first column of a table with rows of two bytes, and a dense region.
  const int64_t row = (int64_t{1} << 31) + 12'345;
  const int64_t total = 2 * row;
  const Reserved memory(3 * row), packed(total);
  const auto address = reinterpret_cast<uint64_t>(memory.data);
  const struct {
    cuda::Entry entries[2];
    cuda::Shape shapes[2];
  } bytes = {{{address, 0, 0, 0, 0}, {address + static_cast<uint64_t>(total), row, 1, 0, 0}},
             {{1, 1, {row}, {2}}, {row, 0, {}, {}}}};
  const auto place = [&](int64_t i) { return memory.data + (i < row ? 2 * i : i + row); };
  const auto value = [](int64_t i) { return static_cast<uint8_t>(1 + i % 251); };

  const SomeBlocks blocks;
  const std::vector<int64_t> units = SomeBlocks::units(total);
  bool right = true;
  for (const int64_t uniform : {int64_t{0}, row}) {
    const cuda::Layout layout{2, 2, 0, uniform, total};
    const cuda::SentTable table{layout, reinterpret_cast<const char*>(&bytes), uniform == 0};
    for (const int64_t i : units) *place(i) = value(i);
    right &= kernels.gather(table, 1, packed.data, nullptr) == 0;
    for (const int64_t i : units) right &= packed.data[i] == value(i);

    for (const int64_t i : units) packed.data[i] = static_cast<uint8_t>(255 - value(i));
    right &= kernels.unpack(table, 1, packed.data, nullptr) == 0;
    for (const int64_t i : units) right &= *place(i) == 255 - value(i);
  }
  return right;
}

// --- all comparisons, for the kernels and for the copies with planted faults ---

TEST_CASE("cuda on the CPU: every type, aligned and not", "[gather][kernels]") {
  for (const KernelsOnCpu& kernels : kKernelsOnCpu) {
    CAPTURE(kernels.name);
    for (int round = 0; round < kRounds; ++round) CHECK(all_as_aten(kernels));
  }
}

TEST_CASE("cuda on the CPU: rows of lookups", "[gather][kernels]") {
  for (const KernelsOnCpu& kernels : kKernelsOnCpu) CHECK(finds_all_rows(kernels));
  const at::DimVector sizes(4, 2), steps(4, 0);
  const RowLookups deep{0, sizes, steps, {{nullptr, sizes, 2, 1}}};
  CHECK(!cuda::plan_rows({deep, {at::kLong}, false}).has_value());
}

TEST_CASE("cuda on the CPU: more than 2^32 units", "[gather][kernels]") {
  for (const KernelsOnCpu& kernels : kKernelsOnCpu) CHECK(counts_beyond_32_bits(kernels));
  CHECK(launcher.blocks == 65'536);
}

// A planted fault may write anywhere, so it runs in a child process, which AddressSanitizer or the
// system may end.
bool is_found_out(const KernelsOnCpu& kernels) {
  std::fflush(nullptr);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Catch2's signal handlers would write a report although the heap may be corrupt.
    for (const int fatal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) std::signal(fatal, SIG_DFL);
    at::set_num_threads(1);  // fork() does not copy OpenMP's threads
    for (FILE* stream : {stdout, stderr}) {
      if (std::freopen("/dev/null", "w", stream) == nullptr) _exit(0);
    }
    const bool right =
        all_as_aten(kernels) && finds_all_rows(kernels) && counts_beyond_32_bits(kernels);
    _exit(right ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status != 0;
}

TEST_CASE("cuda on the CPU: each planted fault is found", "[gather][kernels]") {
  CHECK(!is_found_out(kKernelsOnCpu.front()));
  REQUIRE(!kPlantedFaults.empty());
  for (const KernelsOnCpu& planted : kPlantedFaults) {
    CAPTURE(planted.name);
    CHECK(is_found_out(planted));
  }
}

// --- single properties ---

TEST_CASE("cuda on the CPU: all kinds of regions", "[gather][kernels]") {
  const KernelsOnCpu& kernels = kKernelsOnCpu.front();
  for (const at::ScalarType type : kTypes) {
    CAPTURE(type);
    TestMemory memory;
    add_all_kinds(memory, memory.buffer(integers({64}, type)));
    add_all_kinds(memory, memory.buffer(integers({80}, type)));
    CHECK(gathers_as_aten(kernels, memory));
    memory.add_skipped({7});
    CHECK(adds_as_aten(kernels, memory, cuda::Order::kAny));
  }
}

TEST_CASE("cuda on the CPU: units of each size", "[gather][kernels]") {
  for (const int64_t offset : {0, 1, 2, 4, 8, 16}) {
    CAPTURE(offset);
    TestMemory memory;
    const Tensor& buffer = memory.buffer(integers({128}, at::kByte));
    memory.add(buffer, offset, {16});
    memory.add(buffer, offset + 32, {2, 16}, {32, 1});
    const Tensor out = at::empty({48}, at::kByte);
    const auto plan = cuda::plan_copy(memory.regions, 1, out.const_data_ptr(), cuda::Access::kRead);
    CHECK(plan->unit == (offset == 0 ? 16 : offset));
    for (const KernelsOnCpu& kernels : kKernelsOnCpu) {
      CHECK(gathers_as_aten(kernels, memory));
      CHECK(unpacks_as_aten(kernels, memory));
    }
  }
}

TEST_CASE("cuda on the CPU: sums by 16 bytes and by elements", "[gather][kernels]") {
  for (const KernelsOnCpu& kernels : kKernelsOnCpu) {
    for (const cuda::Order order : {cuda::Order::kAny, cuda::Order::kOfValues}) {
      for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        const auto wide = static_cast<int>(16 / c10::elementSize(type));
        for (const int64_t offset : {0, 1}) {
          TestMemory memory;
          memory.add(memory.buffer(integers({40}, type)), offset, {2, 16});
          const Tensor values = integers({32}, type);
          const int width = offset == 0 ? wide : 1;
          CHECK(width_of_sums(kernels, values, memory.regions, order) == width);
        }
      }
    }
  }
}

TEST_CASE("cuda on the CPU: in order, sums are eager's to the last bit", "[gather][kernels]") {
  for (const at::ScalarType type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const int64_t offset : {0, 1}) {
      TestMemory memory;
      const Tensor& buffer = memory.buffer(at::randn({40}).to(type));
      for (int m = 0; m < 50; ++m) memory.add(buffer, offset, {32});
      const Tensor values = at::randn({memory.numel()}).to(type);
      const auto expected = scattered(memory, values);
      const Tensor before = buffer.clone();
      for (int round = 0; round < kRounds; ++round) {
        Tensor(buffer).copy_(before);
        width_of_sums(kKernelsOnCpu.front(), values, memory.regions, cuda::Order::kOfValues);
        check_buffers(memory, expected);
      }
    }
  }
}

TEST_CASE("cuda on the CPU: tables of many regions", "[gather][kernels]") {
  constexpr int64_t kMany = 20'000;
  for (const bool uniform : {true, false}) {
    TestMemory memory;
    const Tensor& buffer = memory.buffer(at::randn({kMany + 8}));
    for (int64_t m = 0; m < kMany; ++m) {
      memory.add(buffer, (m * 7919) % kMany, {uniform ? 3 : 1 + m % 5});
    }
    CHECK(gathers_as_aten(kKernelsOnCpu.front(), memory));
    Tensor(buffer).zero_();
    CHECK(adds_as_aten(kKernelsOnCpu.front(), memory, cuda::Order::kAny));
  }
}

TEST_CASE("cuda on the CPU: nothing to do is no launch", "[gather][kernels]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(integers({8}, at::kFloat));
  memory.add(buffer, 3, {0, 2});
  const Regions kinds[] = {{}, memory.regions};
  for (const Regions& regions : kinds) {
    const int64_t before = launcher.launches;
    const Tensor none = at::empty({0});
    CHECK(gathered_by(kKernelsOnCpu.front(), regions, at::kFloat).numel() == 0);
    CHECK(unpack_by(kKernelsOnCpu.front(), none, regions));
    CHECK(width_of_sums(kKernelsOnCpu.front(), none, regions, cuda::Order::kAny));
    CHECK(launcher.launches == before);
  }
}

TEST_CASE("cuda on the CPU: units that there are no kernels for are an error",
          "[gather][kernels]") {
  TestMemory memory;
  const Tensor& buffer = memory.buffer(integers({8}, at::kFloat));
  memory.add(buffer, 0, {8});
  Tensor out = at::empty({8});
  const auto plan = cuda::plan_copy(memory.regions, 4, out.const_data_ptr(), cuda::Access::kRead);
  const Sent sent(*plan);
  void* packed = out.mutable_data_ptr();
  for (const KernelsOnCpu& kernels : kKernelsOnCpu) {
    CHECK(kernels.gather(sent.table, 3, packed, nullptr) == cudaErrorInvalidValue);
    CHECK(kernels.unpack(sent.table, 32, packed, nullptr) == cudaErrorInvalidValue);
    const auto wrong = [&](auto add) {
      return add(sent.table, cuda::Element::kFloat, 2, packed, nullptr) == cudaErrorInvalidValue;
    };
    CHECK(wrong(kernels.scatter_add));
    CHECK(wrong(kernels.scatter_add_in_order));
  }
}

}  // namespace
}  // namespace autobatch
