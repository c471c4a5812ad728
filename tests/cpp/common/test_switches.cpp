#include "../catch.h"
#include "autobatch/common/switches.h"

#include <algorithm>
#include <string>

using autobatch::Switch;

namespace {

Switch tested(Switch::Kind::kPass, "tested");

}  // namespace

TEST_CASE("a switch is on, and is found by its name", "[switches]") {
  const auto all = Switch::all();
  const auto found = std::ranges::find(all, &tested);
  REQUIRE(found != all.end());
  CHECK((*found)->name() == std::string("tested"));
  CHECK((*found)->kind() == Switch::Kind::kPass);
  CHECK(tested.is_on());
  CHECK(std::ranges::is_sorted(all, {}, [](const Switch* s) { return std::string(s->name()); }));
}

TEST_CASE("a switch counts uses", "[switches]") {
  const auto before = tested.uses();
  tested.set(false);
  CHECK_FALSE(tested.is_on());
  tested.set(true);
  tested.add_uses(3);
  tested.add_uses(0);
  CHECK(tested.uses() == before + 3);
}
