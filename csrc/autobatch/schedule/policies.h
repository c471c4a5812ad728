// The policies. `policies.cpp` contains the table of all policies and the short policies.
#pragma once

#include "autobatch/schedule.h"

#include <memory>

namespace autobatch {

std::unique_ptr<const Policy> make_agenda_policy();
std::unique_ptr<const Policy> make_auto_policy();
std::unique_ptr<const Policy> make_frontier_policy();

}  // namespace autobatch
