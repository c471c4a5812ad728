// Which blocks at one place of a program are deferred.
#include "../catch.h"
#include "autobatch/scope/block_history.h"

#include <chrono>

using autobatch::BlockHistory;
using std::chrono::milliseconds;

namespace {

// A program that opens blocks at one place.
class Place {
 public:
  // Runs a block that takes the time `took`. Returns whether it was deferred. `wins`: whether
  // deferring it was worth its cost.
  bool run(uint64_t identity, bool wins, milliseconds took = milliseconds(5)) {
    const auto ask = [&] {
      ++asked;
      return identity;
    };
    const bool deferred = history_.pays(ask, now_);
    now_ += took;
    history_.end(now_);
    if (deferred) history_.add(wins, 10);
    return deferred;
  }

  int asked = 0;

 private:
  BlockHistory history_;
  BlockHistory::Clock::time_point now_;
};

}  // namespace

TEST_CASE("blocks that do not pay are paused", "[payoff]") {
  Place place;
  for (int i = 0; i < 8; ++i) CHECK(place.run(1, false));
  CHECK(place.asked == 1);
  int deferred = 0;
  for (int i = 0; i < 128; ++i) deferred += place.run(1, false) ? 1 : 0;
  CHECK(deferred == 2);
}

TEST_CASE("another model at the same place is deferred immediately", "[payoff]") {
  Place place;
  for (int i = 0; i < 9; ++i) place.run(1, false);
  CHECK(place.run(2, true));
  CHECK(place.run(2, true));
}

TEST_CASE("what a block can call is not asked where blocks are short", "[payoff]") {
  Place place;
  for (int i = 0; i < 60; ++i) place.run(1, false, milliseconds(0));
  CHECK(place.asked == 1);
  CHECK_FALSE(place.run(2, true, milliseconds(5)));
  CHECK(place.run(2, true, milliseconds(5)));  // the previous block was long
}

TEST_CASE("models that do not pay, in turn, are paused", "[payoff]") {
  Place place;
  for (uint64_t i = 0; i < 200; ++i) place.run(i % 2, false);
  int deferred = 0;
  for (uint64_t i = 0; i < 128; ++i) deferred += place.run(i % 2, false) ? 1 : 0;
  CHECK(deferred == 2);
}
