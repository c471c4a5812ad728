#include "autobatch/subgraph/factor_buffers.h"

#include <ATen/ATen.h>

#include "catch.h"

#include <optional>

namespace autobatch {
namespace {

const float* data(const at::Tensor& tensor) { return tensor.const_data_ptr<float>(); }

at::Tensor take(FactorBuffers& rows, bool backward, const RowRange& range,
                const void* flush = nullptr) {
  return rows.take(flush, backward, 0, range, 100, at::kFloat);
}

TEST_CASE("joined rows: forward, batches lie one after the other", "[joined_rows]") {
  FactorBuffers rows;
  const at::Tensor a = take(rows, false, {30, 0, 10}), b = take(rows, false, {30, 10, 15}),
                   c = take(rows, false, {30, 25, 5});
  CHECK(a.sizes() == at::IntArrayRef{1000});
  CHECK(b.sizes() == at::IntArrayRef{1500});
  CHECK(data(b) == data(a) + 1000);
  CHECK(data(c) == data(b) + 1500);
  CHECK(a.storage().is_alias_of(c.storage()));
}

TEST_CASE("joined rows: backward, from the last one on", "[joined_rows]") {
  FactorBuffers rows;
  const at::Tensor c = take(rows, true, {30, 25, 5}), b = take(rows, true, {30, 10, 15});
  const at::Tensor a = take(rows, true, {30, 0, 10});
  CHECK(data(b) == data(a) + 1000);
  CHECK(data(c) == data(b) + 1500);
}

TEST_CASE("joined rows: what comes in another order has memory of its own", "[joined_rows]") {
  FactorBuffers rows;
  const at::Tensor b = take(rows, false, {30, 10, 15});  // rows 0 to 10 come later
  const at::Tensor a = take(rows, false, {30, 0, 10});
  const at::Tensor c = take(rows, false, {30, 25, 5});  // rows 10 to 25 are left out
  const at::Tensor again = take(rows, false, {30, 0, 10});
  for (const at::Tensor& x : {b, c, again}) CHECK_FALSE(x.storage().is_alias_of(a.storage()));
  const at::Tensor other = take(rows, false, {40, 10, 15});  // another flush, of 40 rows
  CHECK_FALSE(other.storage().is_alias_of(again.storage()));
}

TEST_CASE("joined rows: flushes at the same time", "[joined_rows]") {
  FactorBuffers rows;
  const int first = 0, second = 0;
  const at::Tensor a = take(rows, false, {30, 0, 10}, &first);
  const at::Tensor b = take(rows, false, {30, 0, 10}, &second);
  const at::Tensor c = take(rows, false, {30, 10, 20}, &first);
  const at::Tensor d = take(rows, false, {30, 10, 20}, &second);
  CHECK(data(c) == data(a) + 1000);
  CHECK(data(d) == data(b) + 1000);
}

TEST_CASE("joined rows: those who took them own them", "[joined_rows]") {
  FactorBuffers rows;
  std::optional<at::Tensor> a = take(rows, false, {30, 0, 10});
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = a->storage().getWeakStorageImpl();
  a.reset();
  CHECK(storage.expired());
  const at::Tensor b = take(rows, false, {30, 10, 20});
  CHECK(b.sizes() == at::IntArrayRef{2000});
}

}  // namespace
}  // namespace autobatch
