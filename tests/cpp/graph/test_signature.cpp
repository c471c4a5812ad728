#include "autobatch/graph/graph.h"
#include "autobatch/graph/signature.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "catch.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

using c10::IValue;

Key key_of(std::initializer_list<uint64_t> words) { return Key(words.begin(), words.end()); }

// Returns the key of the constants in sequence. Fails the test if append_constant refuses one.
Key key_of_constants(const std::vector<IValue>& values) {
  Key key;
  for (const IValue& value : values) REQUIRE(append_constant(key, value));
  return key;
}

// Returns constants that are pairwise different for eager.
std::vector<IValue> different_constants() {
  std::vector<IValue> out;
  out.emplace_back();  // None
  for (const int64_t i : {-1, 0, 1, 2}) out.emplace_back(i);
  out.emplace_back(std::numeric_limits<int64_t>::max());
  for (const bool b : {false, true}) out.emplace_back(b);
  for (const double d : {0.0, -0.0, 1.0, 1.0 + 1e-15, -1.0, 2.0}) out.emplace_back(d);
  out.emplace_back(std::numeric_limits<double>::infinity());
  out.emplace_back(5e-324);  // same bits as the integer 1
  out.emplace_back(c10::complex<double>(0, 0));
  out.emplace_back(c10::complex<double>(1, 0));
  out.emplace_back(c10::complex<double>(0, 1));
  for (const char* s : {"", "a", "b", "ab", "ba", "12345678", "123456789", "mean", "sum", "none"}) {
    out.emplace_back(std::string(s));
  }
  out.emplace_back(std::string("a\0", 2));  // padding must not hide the length
  out.emplace_back(c10::List<int64_t>());
  out.emplace_back(c10::List<int64_t>({0}));
  out.emplace_back(c10::List<int64_t>({1}));
  out.emplace_back(c10::List<int64_t>({1, 2}));
  out.emplace_back(c10::List<int64_t>({2, 1}));
  out.emplace_back(c10::List<int64_t>({1, 2, 0}));
  out.emplace_back(c10::List<double>({1.0}));
  out.emplace_back(c10::List<double>({1.0, 2.0}));
  out.emplace_back(c10::List<bool>({true}));
  out.emplace_back(c10::List<bool>({true, false}));
  out.emplace_back(c10::List<std::string>({"a", "b"}));
  out.emplace_back(c10::List<std::string>({"ab"}));
  out.emplace_back(c10::List<std::optional<int64_t>>({1, std::nullopt}));
  out.emplace_back(c10::Device(c10::kCPU));
  out.emplace_back(c10::Device(c10::kCUDA));
  out.emplace_back(c10::Device(c10::kCUDA, 0));
  out.emplace_back(c10::Device(c10::kCUDA, 1));
  return out;
}

// --- SignatureTable ---

TEST_CASE("signature: a key is found again by its content", "[signature]") {
  SignatureTable table;
  const Key key = key_of({7, 8, 9});
  CHECK(table.find(key) == nullptr);
  Signature* added = table.add(key);
  REQUIRE(added != nullptr);
  CHECK(table.find(key_of({7, 8, 9})) == added);
  CHECK(added->key == std::vector<uint64_t>{7, 8, 9});
  CHECK(table.size() == 1);
}

TEST_CASE("signature: keys that differ in one word or in length are different", "[signature]") {
  SignatureTable table;
  std::map<std::vector<uint64_t>, Signature*> added;
  const auto add = [&](const Key& key) {
    CHECK(table.find(key) == nullptr);
    added[{key.begin(), key.end()}] = table.add(key);
  };
  add(key_of({}));
  add(key_of({0}));
  add(key_of({0, 0}));
  const Key base = key_of({1, 2, 3, 4, 5});
  add(base);
  for (size_t i = 0; i < base.size(); ++i) {
    for (const int bit : {3, 30, 63}) {
      Key key = base;
      key[i] ^= uint64_t{1} << bit;
      add(key);
    }
    Key shorter(base.begin(), base.begin() + i);
    if (i > 0) add(shorter);
  }
  add(key_of({1, 2, 3, 4, 5, 0}));
  add(key_of({5, 4, 3, 2, 1}));
  CHECK(table.size() == added.size());
  std::set<Signature*> distinct;
  for (const auto& [words, signature] : added) {
    distinct.insert(signature);
    CHECK(table.find(Key(words.begin(), words.end())) == signature);
  }
  CHECK(distinct.size() == added.size());
}

// One step of SignatureTable's hash, to construct keys with the same hash. If that hash changes,
// the test below stays valid, but its keys do not collide.
uint64_t hash_step(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
  return hash ^ hash >> 29;
}

TEST_CASE("signature: keys of the same hash are compared in full", "[signature]") {
  SignatureTable table;
  const Key first = key_of({1, 2});
  // The second word cancels the difference that the first word makes.
  const Key second = key_of({3, hash_step(2, 1) ^ 2 ^ hash_step(2, 3)});
  const Key third = key_of({4, hash_step(2, 1) ^ 2 ^ hash_step(2, 4)});
  Signature* a = table.add(first);
  CHECK(table.find(second) == nullptr);
  Signature* b = table.add(second);
  CHECK(table.find(third) == nullptr);
  CHECK(a != b);
  CHECK(table.find(first) == a);
  CHECK(table.find(second) == b);
}

TEST_CASE("signature: addresses and serial numbers are stable over 10,000 adds", "[signature]") {
  SignatureTable table;
  constexpr uint64_t kCount = 10000;
  std::vector<Signature*> added;
  std::vector<uint64_t> serials;
  for (uint64_t i = 0; i < kCount; ++i) {
    added.push_back(table.add(key_of({i % 7, i, i << 32})));
    serials.push_back(added.back()->serial);
  }
  CHECK(table.size() == kCount);
  CHECK(std::set<uint64_t>(serials.begin(), serials.end()).size() == kCount);
  size_t wrong = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    Signature* found = table.find(key_of({i % 7, i, i << 32}));
    wrong += found != added[i] || found->serial != serials[i] || found->key[1] != i;
  }
  CHECK(wrong == 0);
}

TEST_CASE("signature: serial numbers differ between tables", "[signature]") {
  SignatureTable one, other;
  CHECK(one.add(key_of({1}))->serial != other.add(key_of({1}))->serial);
}

// --- append_constant ---

TEST_CASE("append_constant: different constants give different keys", "[signature]") {
  const std::vector<IValue> constants = different_constants();
  for (size_t i = 0; i < constants.size(); ++i) {
    for (size_t j = 0; j < constants.size(); ++j) {
      CAPTURE(i, j, constants[i], constants[j]);
      CHECK((key_of_constants({constants[i]}) == key_of_constants({constants[j]})) == (i == j));
    }
  }
}

TEST_CASE("append_constant: constants in a row can't be cut in another way", "[signature]") {
  // Examples: [1] [2] against [1, 2] [], 'a' 'b' against 'ab' ''.
  const std::vector<IValue> constants = different_constants();
  std::set<std::vector<uint64_t>> keys;
  for (const IValue& a : constants) {
    const Key alone = key_of_constants({a});
    keys.emplace(alone.begin(), alone.end());
    for (const IValue& b : constants) {
      const Key both = key_of_constants({a, b});
      keys.emplace(both.begin(), both.end());
    }
  }
  CHECK(keys.size() == constants.size() * (constants.size() + 1));
}

TEST_CASE("append_constant: equal constants give equal keys", "[signature]") {
  const auto same = [](const IValue& a, const IValue& b) {
    return key_of_constants({a}) == key_of_constants({b});
  };
  CHECK(same(IValue(at::Scalar(1)), IValue(int64_t{1})));
  CHECK(same(IValue(at::Scalar(1.0)), IValue(1.0)));
  CHECK(same(IValue(at::Scalar(true)), IValue(true)));
  CHECK(same(IValue(std::string("mean")), IValue(std::string("mean"))));
  CHECK(same(IValue(c10::List<int64_t>({1, 2})), IValue(c10::List<int64_t>({1, 2}))));
  CHECK(same(IValue(c10::List<double>({1, 2})), IValue(c10::List<double>({1, 2}))));
  CHECK(same(IValue(std::nan("")), IValue(std::nan(""))));
}

TEST_CASE("append_constant: dtypes are told apart", "[signature]") {
  std::set<std::vector<uint64_t>> keys;
  const std::vector<at::ScalarType> types = {at::kFloat,    at::kDouble, at::kHalf,
                                             at::kBFloat16, at::kLong,   at::kBool};
  for (const at::ScalarType type : types) {
    const Key key = key_of_constants({IValue(type)});
    keys.emplace(key.begin(), key.end());
  }
  CHECK(keys.size() == types.size());
}

TEST_CASE("append_constant: refuses what has no content to compare", "[signature]") {
  Key key;
  CHECK_FALSE(append_constant(key, IValue(at::detail::createCPUGenerator(1))));
  // A tensor's values are not compared, so it is no constant. A rule has other means for a tensor
  // that must be constant.
  CHECK_FALSE(append_constant(key, IValue(at::zeros({2}))));
  CHECK_FALSE(append_constant(key, IValue(c10::List<at::Tensor>({at::zeros({2})}))));
}

// --- GeometryTable ---

struct Strided {
  std::string name;
  at::Tensor tensor;
};

std::vector<Strided> strided_tensors() {
  const at::Tensor base = at::arange(120, at::kFloat);
  const at::Tensor cube = base.view({4, 5, 6});
  return {
      {"scalar", base[0]},
      {"vector", base},
      {"cube", cube},
      {"column", cube.select(2, 1)},
      {"chunk of the last dimension", cube.chunk(3, 2)[1]},
      {"chunk of the middle dimension", cube.chunk(5, 1)[2]},
      {"chunk of the first dimension", cube.chunk(2, 0)[1]},
      {"every second", base.slice(0, 0, 120, 2)},
      {"transposed", cube.transpose(0, 1)},
      {"matrix transposed", base.view({10, 12}).t()},
      {"transposed chunk", cube.chunk(3, 2)[0].transpose(0, 2)},
      {"channels last", cube.unsqueeze(0).contiguous(at::MemoryFormat::ChannelsLast)},
      {"expanded in front", base.narrow(0, 0, 4).expand({3, 4})},
      {"expanded behind", base.narrow(0, 0, 4).unsqueeze(1).expand({4, 3})},
      {"expanded to one", base.narrow(0, 0, 4).expand({1, 4})},
      {"expanded scalar", base[3].expand({2, 2})},
      {"size 1 with an odd stride", base.as_strided({1, 5}, {77, 1})},
      {"size 1 in the middle", base.as_strided({3, 1, 5}, {5, 0, 1})},
      {"size 1 last", base.as_strided({3, 1}, {1, 9})},
      {"size 1 only", base.as_strided({1, 1}, {0, 0})},
      {"size 1, then gaps", base.as_strided({1, 3, 2}, {1, 8, 1})},
      {"empty", at::empty({0})},
      {"empty rows", at::empty({0, 3})},
      {"empty columns", at::empty({3, 0})},
      {"empty transposed", at::empty({0, 3}).t()},
      {"empty with odd strides", base.as_strided({2, 0, 3}, {50, 7, 11})},
      {"empty chunk", cube.narrow(1, 2, 0)},
      {"windows", base.narrow(0, 0, 10).unfold(0, 4, 1)},
      {"windows side by side", base.narrow(0, 0, 12).unfold(0, 4, 4)},
      {"diagonal", base.view({10, 12}).diagonal()},
      {"interleaved", base.as_strided({2, 3}, {1, 2})},
  };
}

// Returns the offsets of all elements in row-major order.
std::vector<int64_t> offsets_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<int64_t> offsets = {0};
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < sizes[d]; ++i) next.push_back(offset + i * strides[d]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

TEST_CASE("geometry: interned by sizes and strides", "[signature][geometry]") {
  GeometryTable table;
  std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, const Geometry*> seen;
  for (int round = 0; round < 2; ++round) {
    for (const auto& [name, tensor] : strided_tensors()) {
      CAPTURE(name);
      const Geometry* g = table.intern(tensor.sizes(), tensor.strides());
      CHECK(at::IntArrayRef(g->sizes) == tensor.sizes());
      CHECK(at::IntArrayRef(g->strides) == tensor.strides());
      CHECK(g->dim() == tensor.dim());
      const auto [at, is_new] = seen.emplace(std::pair(g->sizes, g->strides), g);
      CHECK(at->second == g);
    }
  }
  std::set<const Geometry*> distinct;
  for (const auto& entry : seen) distinct.insert(entry.second);
  CHECK(distinct.size() == seen.size());
  const size_t size = table.size();
  CHECK(table.intern_contiguous({4, 5, 6}) == table.intern({4, 5, 6}, {30, 6, 1}));
  CHECK(table.intern({4, 5, 6}, {30, 6, 1}) != table.intern({4, 5, 6}, {60, 6, 1}));
  CHECK(table.intern({2, 3}, {3, 1}) != table.intern({2, 3, 1}, {3, 1, 1}));
  CHECK(table.size() == size + 3);  // {60, 6, 1}, {2, 3} and {2, 3, 1}
}

TEST_CASE("geometry: addresses are stable over 10,000 entries", "[signature][geometry]") {
  GeometryTable table;
  std::vector<const Geometry*> added;
  for (int64_t i = 0; i < 10000; ++i) added.push_back(table.intern_contiguous({i, 3}));
  size_t wrong = 0;
  for (int64_t i = 0; i < 10000; ++i) {
    wrong += table.intern_contiguous({i, 3}) != added[i] || added[i]->sizes[0] != i;
  }
  CHECK(wrong == 0);
  CHECK(table.size() == 10000);
}

TEST_CASE("geometry: numel, extent, contiguous and overlapping", "[signature][geometry]") {
  GeometryTable table;
  for (const auto& [name, tensor] : strided_tensors()) {
    CAPTURE(name);
    const Geometry& g = *table.intern(tensor.sizes(), tensor.strides());
    const std::vector<int64_t> offsets = offsets_of(tensor.sizes(), tensor.strides());
    const std::set<int64_t> distinct(offsets.begin(), offsets.end());
    CHECK(g.numel == tensor.numel());
    CHECK(g.extent == (offsets.empty() ? 0 : *distinct.rbegin() + 1));
    CHECK(g.contiguous == tensor.is_contiguous());
    CHECK(g.overlapping == (distinct.size() < offsets.size()));
  }
}

TEST_CASE("geometry: canonical is what eager's elementwise kernels give", "[signature][geometry]") {
  GeometryTable table;
  for (const auto& [name, tensor] : strided_tensors()) {
    CAPTURE(name);
    const Geometry* g = table.intern(tensor.sizes(), tensor.strides());
    REQUIRE(g->canonical != nullptr);
    CHECK(g->canonical->canonical == g->canonical);
    CHECK(g->canonical->sizes == g->sizes);
    if (g->canonical != g) CHECK(g->canonical == table.intern_contiguous(tensor.sizes()));
    if (tensor.is_contiguous()) CHECK(g->canonical == table.intern_contiguous(tensor.sizes()));
    if (!g->canonical->contiguous) continue;
    const at::Tensor eager = at::neg(tensor);
    CHECK(eager.is_contiguous());
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.size(d) > 1 && tensor.numel() > 0) {
        CHECK(g->canonical->strides[d] == eager.stride(d));
      }
    }
  }
}

TEST_CASE("geometry: row-major with gaps is canonical as row-major", "[signature][geometry]") {
  GeometryTable table;
  const Geometry* dense = table.intern_contiguous({4, 2});
  CHECK(table.intern({4, 2}, {6, 1})->canonical == dense);
  CHECK(table.intern({4, 2}, {12, 2})->canonical == dense);
  CHECK_FALSE(table.intern({4, 2}, {6, 1})->contiguous);
  const Geometry* transposed = table.intern({4, 2}, {1, 4});
  CHECK(transposed->canonical == transposed);
  const Geometry* expanded = table.intern({4, 2}, {0, 1});
  CHECK(expanded->canonical == expanded);
  const Geometry* windows = table.intern({4, 2}, {1, 1});
  CHECK(windows->canonical == windows);
}

TEST_CASE("geometry: windows of rows with gaps overlap", "[signature][geometry]") {
  // Elements overlap although they are fewer than the extent has room for: x[:, :2].unfold(0, 3, 1)
  // of x [6, 8].
  GeometryTable table;
  const at::Tensor windows = at::zeros({6, 8}).narrow(1, 0, 2).unfold(0, 3, 1);
  CHECK(table.intern(windows.sizes(), windows.strides())->overlapping);
  CHECK(table.intern({2, 2}, {3, 3})->overlapping);
  CHECK_FALSE(table.intern({2, 2}, {3, 2})->overlapping);
  CHECK_FALSE(table.intern({3, 2}, {2, 7})->overlapping);
}

}  // namespace
}  // namespace autobatch
