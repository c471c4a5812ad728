// The table of rules_batch_norm.cpp.
#pragma once

#include "autobatch/rules.h"

namespace autobatch {

RuleTable batch_norm_rules();

}  // namespace autobatch
