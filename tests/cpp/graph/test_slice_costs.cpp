#include "autobatch/graph/slice_costs.h"

#include "catch.h"

namespace autobatch {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint64_t kSerial = 1;

// Takes batches of one node until the slice is full. Returns their number.
size_t nodes_that_fit(SliceCosts& costs) {
  size_t count = 0;
  for (; !costs.is_full(); ++count) costs.take(kSerial, 1);
  return count;
}

TEST_CASE("a slice is full when what it takes would last as long as its bound") {
  SliceCosts costs;
  costs.add(kSerial, 1, microseconds(10));
  costs.begin(milliseconds(1), /*num_pending=*/0);
  const size_t few = nodes_that_fit(costs);
  CHECK(few > 80);
  CHECK(few <= 100);
  costs.begin(milliseconds(2), 0);
  CHECK(nodes_that_fit(costs) > 3 * few / 2);
}

TEST_CASE("a batch has as many nodes as the bound has time for, and one at least") {
  SliceCosts costs;
  costs.add(kSerial, 1, microseconds(10));
  costs.begin(milliseconds(1), 0);
  CHECK(costs.most(kSerial) == 100);
  costs.add(kSerial, 64, microseconds(64 * 20));  // larger batches take longer per node
  CHECK(costs.most(kSerial) == 63);
  costs.begin(microseconds(1), 0);
  CHECK(costs.most(kSerial) == 1);
}

TEST_CASE("a slice lasts longer where much is pending") {
  SliceCosts costs;
  costs.begin(milliseconds(1), 0);
  costs.end(milliseconds(1), 100);  // 10 us per pending node
  costs.add(kSerial, 1, microseconds(10));
  costs.begin(milliseconds(1), 100);
  const size_t few = nodes_that_fit(costs);
  costs.begin(milliseconds(1), 8000);  // 80 ms at 10 us per node
  CHECK(nodes_that_fit(costs) > 5 * few);
}

}  // namespace
}  // namespace autobatch
