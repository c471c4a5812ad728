#include "autobatch/scope/trials.h"

#include "catch.h"

#include <random>

namespace autobatch {
namespace {

using Run = Trials::Run;
using std::chrono::milliseconds;

// Runs blocks one after the other on a simulated clock.
class Program {
 public:
  bool grad_mode = false;
  uint64_t identity = 1;
  int asked = 0;          // number of times the identity was determined
  bool prepares = false;  // whether deferred blocks do work for later blocks
  bool may_lose = true;   // whether an estimate says that deferring may be slower

  Run run(milliseconds deferred, milliseconds eager) {
    const Run run = trials_.begin(grad_mode, [this] { return ++asked, identity; }, now_);
    now_ += run == Run::kEager ? eager : deferred;
    if (prepares && run != Run::kEager) Trials::note_preparation();
    EagerEstimate estimate;
    estimate.eager = milliseconds(may_lose ? 1 : 100);
    trials_.end(estimate, now_);
    return run;
  }

  void wait(milliseconds time) { now_ += time; }

  // Runs `count` blocks. Returns how many of them ran eagerly.
  int eager_of(int count, milliseconds deferred, milliseconds eager) {
    int found = 0;
    for (int i = 0; i < count; ++i) found += run(deferred, eager) == Run::kEager ? 1 : 0;
    return found;
  }

 private:
  Trials trials_;
  Trials::Clock::time_point now_;
};

TEST_CASE("where ops alone would take longer eagerly no block runs eagerly") {
  Program program;
  program.may_lose = false;
  CHECK(program.eager_of(1000, milliseconds(20), milliseconds(10)) == 0);
}

TEST_CASE("blocks that are faster eagerly run so, but for one in a while") {
  Program program;
  CHECK(program.run(milliseconds(20), milliseconds(10)) == Run::kDeferred);
  CHECK(program.run(milliseconds(20), milliseconds(10)) == Run::kSampled);
  CHECK(program.eager_of(5, milliseconds(20), milliseconds(10)) >= 2);
  const int eager = program.eager_of(160, milliseconds(20), milliseconds(10));
  CHECK(eager >= 145);
  CHECK(eager < 160);
}

TEST_CASE("a trial that deferring wins costs one or two blocks") {
  Program twice, four_times;
  CHECK(twice.eager_of(60, milliseconds(10), milliseconds(20)) == 2);
  CHECK(four_times.eager_of(60, milliseconds(10), milliseconds(40)) == 1);
  CHECK(twice.eager_of(1000, milliseconds(10), milliseconds(20)) <= 4);
}

TEST_CASE("what is deferred is taken up again when it has become the faster way") {
  Program program;
  program.eager_of(20, milliseconds(20), milliseconds(10));
  program.may_lose = false;
  program.eager_of(60, milliseconds(6), milliseconds(10));
  CHECK(program.eager_of(100, milliseconds(6), milliseconds(10)) == 0);
}

TEST_CASE("another model at the same place is deferred") {
  Program program;
  program.eager_of(20, milliseconds(20), milliseconds(10));
  program.identity = 2;
  CHECK(program.run(milliseconds(20), milliseconds(10)) == Run::kSampled);
}

TEST_CASE("models that alternate at one place are each timed by themselves") {
  Program program;
  int eager_of_first = 0, eager_of_second = 0;
  for (int i = 0; i < 200; ++i) {
    program.identity = 1;
    eager_of_first += program.run(milliseconds(20), milliseconds(10)) == Run::kEager ? 1 : 0;
    program.identity = 2;
    eager_of_second += program.run(milliseconds(10), milliseconds(20)) == Run::kEager ? 1 : 0;
  }
  CHECK(eager_of_first > 170);
  CHECK(eager_of_second <= 4);
}

TEST_CASE("models that come back after many others are deferred") {
  Program program;
  for (int i = 0; i < 1000; ++i) {
    program.identity = static_cast<uint64_t>(1 + i % 50);
    CHECK(program.run(milliseconds(20), milliseconds(10)) != Run::kEager);
  }
}

TEST_CASE("a deferred block that lost is tried again after longer and longer times") {
  Program program;
  program.eager_of(20, milliseconds(20), milliseconds(10));
  CHECK(program.eager_of(1000, milliseconds(20), milliseconds(10)) >= 992);
  // If the other mode becomes faster, the trials find this later.
  program.eager_of(260, milliseconds(6), milliseconds(10));
  CHECK(program.eager_of(100, milliseconds(6), milliseconds(10)) <= 2);
}

TEST_CASE("another model of short blocks is noticed after some blocks") {
  Program program;
  program.may_lose = false;
  program.eager_of(100, milliseconds(1), milliseconds(2));
  program.identity = 2;
  program.may_lose = true;
  program.eager_of(20, milliseconds(3), milliseconds(2));
  CHECK(program.eager_of(20, milliseconds(3), milliseconds(2)) >= 19);
}

TEST_CASE("after a model that eager execution won short blocks are soon rarely identified") {
  Program program;
  program.eager_of(20, milliseconds(3), milliseconds(2));
  program.identity = 2;
  program.may_lose = false;
  program.eager_of(100, milliseconds(3), milliseconds(2));
  program.asked = 0;
  program.eager_of(100, milliseconds(3), milliseconds(2));
  CHECK(program.asked <= 13);
}

TEST_CASE("another model at a place where deferring was faster is timed immediately") {
  Program program;
  CHECK(program.eager_of(60, milliseconds(10), milliseconds(20)) == 2);
  program.identity = 2;
  CHECK(program.run(milliseconds(20), milliseconds(10)) == Run::kSampled);
  CHECK(program.eager_of(100, milliseconds(20), milliseconds(10)) > 80);
}

TEST_CASE("models that change from block to block are soon not identified any more") {
  Program program;
  program.may_lose = false;
  for (int i = 0; i < 100; ++i) {
    ++program.identity;
    program.run(milliseconds(20), milliseconds(10));
  }
  CHECK(program.asked < 50);
}

TEST_CASE("after a block that takes far longer than those before, both ways are tried again") {
  Program program;
  program.eager_of(20, milliseconds(20), milliseconds(10));
  CHECK(program.run(milliseconds(100), milliseconds(50)) == Run::kEager);
  CHECK(program.run(milliseconds(100), milliseconds(50)) == Run::kDeferred);
  CHECK(program.eager_of(40, milliseconds(100), milliseconds(50)) > 30);
}

TEST_CASE("a delay by other processes does not end eager execution") {
  Program program;
  program.eager_of(20, milliseconds(20), milliseconds(10));
  program.may_lose = false;  // the delay makes the estimate wrong too
  program.run(milliseconds(20), milliseconds(40));
  CHECK(program.eager_of(100, milliseconds(20), milliseconds(10)) > 85);
}

TEST_CASE("a wrong estimate is corrected after some blocks") {
  Program program;
  program.may_lose = false;
  program.eager_of(2, milliseconds(20), milliseconds(10));
  program.may_lose = true;
  CHECK(program.eager_of(100, milliseconds(20), milliseconds(10)) > 60);
}

TEST_CASE("with gradients the time of a block lasts until the next one begins") {
  Program program;
  program.grad_mode = true;
  // The block itself is slower in eager mode, but backward is faster by more.
  Trials trials;
  Trials::Clock::time_point now;
  int eager = 0;
  for (int i = 0; i < 100; ++i) {
    const Run run = trials.begin(true, [] { return uint64_t{1}; }, now);
    now += milliseconds(run == Run::kEager ? 11 : 10);
    trials.end({}, now);
    now += milliseconds(run == Run::kEager ? 5 : 20);
    eager += run == Run::kEager ? 1 : 0;
  }
  CHECK(eager > 70);
}

TEST_CASE("other work after an eager block does not decide") {
  Program program;
  program.grad_mode = true;
  int eager = 0;
  for (int i = 0; i < 100; ++i) {
    const bool is_first = eager == 0;
    const Run run = program.run(milliseconds(20), milliseconds(10));
    if (run != Run::kEager) continue;
    if (is_first) program.wait(milliseconds(500));
    ++eager;
  }
  CHECK(eager > 70);
}

TEST_CASE("work of the program after every second to fifth block does not decide") {
  for (const int period : {2, 3, 4, 5}) {
    for (int phase = 0; phase < period; ++phase) {
      Program program;
      program.grad_mode = true;
      int eager = 0;
      for (int i = 0; i < 200; ++i) {
        eager += program.run(milliseconds(10), milliseconds(20)) == Run::kEager ? 1 : 0;
        if (i % period == phase) program.wait(milliseconds(50));
      }
      CAPTURE(period, phase);
      CHECK(eager < 20);
    }
  }
}

TEST_CASE("the first blocks that do work for later blocks do not count") {
  for (const bool grad_mode : {false, true}) {
    Program program;
    program.grad_mode = grad_mode;
    for (int i = 0; i < 6; ++i) {
      program.prepares = true;
      CHECK(program.run(milliseconds(90), milliseconds(20)) != Run::kEager);
    }
    program.prepares = false;
    CHECK(program.eager_of(100, milliseconds(10), milliseconds(20)) <= 4);
  }
}

TEST_CASE("blocks that always do work for later blocks count after a while") {
  Program program;
  program.prepares = true;
  program.eager_of(20, milliseconds(90), milliseconds(20));
  CHECK(program.eager_of(100, milliseconds(90), milliseconds(20)) > 80);
}

TEST_CASE("blocks of different sizes are compared by the medians of several times") {
  constexpr int kPrograms = 50, kBlocks = 400;
  for (const bool grad_mode : {false, true}) {
    int first = 0, second = 0;  // eager blocks of all programs
    for (uint32_t seed = 0; seed < kPrograms; ++seed) {
      Program gains, loses;
      gains.grad_mode = loses.grad_mode = grad_mode;
      std::mt19937 random(seed);
      std::uniform_int_distribution<int> sizes(1, 8);
      for (int i = 0; i < kBlocks; ++i) {
        const int size = sizes(random);
        first += gains.run(milliseconds(10 * size), milliseconds(20 * size)) == Run::kEager;
        second += loses.run(milliseconds(20 * size), milliseconds(10 * size)) == Run::kEager;
      }
    }
    CHECK(first < kPrograms * kBlocks / 20);
    CHECK(second > kPrograms * kBlocks * 4 / 5);
  }
}

TEST_CASE("a block that fails leaves no time behind") {
  Trials trials;
  Trials::Clock::time_point now;
  for (int i = 0; i < 50; ++i) {
    CHECK(trials.begin(false, [] { return uint64_t{1}; }, now) != Run::kEager);
    now += milliseconds(10);
  }
}

}  // namespace
}  // namespace autobatch
