// The table of rules_scatter.cpp.
#pragma once

#include "autobatch/rules.h"

namespace autobatch {

RuleTable scatter_rules();

}  // namespace autobatch
