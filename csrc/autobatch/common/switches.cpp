#include "autobatch/common/switches.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>

namespace autobatch {
namespace {

constexpr const char* kEverything = "all";

const char* group_of(Switch::Kind kind) {
  return kind == Switch::Kind::kPass ? "passes" : "fast_paths";
}

// Returns the list of all switches. The list is constructed when the first switch registers.
std::vector<Switch*>& registry() {
  static std::vector<Switch*> switches;
  return switches;
}

const std::vector<std::string>& disabled_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    const char* value = std::getenv("AUTOBATCH_DISABLE");
    std::istringstream list(value == nullptr ? "" : value);
    for (std::string name; std::getline(list, name, ',');) {
      if (!name.empty()) found.push_back(name);
    }
    return found;
  }();
  return names;
}

bool names(std::string_view entry, const Switch& of) {
  return entry == kEverything || entry == group_of(of.kind()) || entry == of.name();
}

}  // namespace

Switch::Switch(Kind kind, const char* name)
    : kind_(kind),
      name_(name),
      is_on_(std::ranges::none_of(disabled_names(),
                                  [&](const auto& entry) { return names(entry, *this); })) {
  registry().push_back(this);
}

std::vector<Switch*> Switch::all() {
  std::vector<Switch*> switches = registry();
  std::ranges::sort(switches, {}, [](const Switch* s) { return std::string_view(s->name()); });
  return switches;
}

std::vector<std::string> unknown_disabled_names() {
  std::vector<std::string> unknown;
  for (const std::string& entry : disabled_names()) {
    const auto is_named = [&](const Switch* s) { return names(entry, *s); };
    if (std::ranges::none_of(registry(), is_named)) unknown.push_back(entry);
  }
  return unknown;
}

}  // namespace autobatch
