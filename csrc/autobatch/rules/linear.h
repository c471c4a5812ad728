// What others know of the rules for products.
#pragma once

#include "autobatch/rules/rule.h"

#include <optional>

namespace autobatch {

// Of a rule for x times a weight, operands 0 and 1, with a bias, 2, or without: whether the weight
// is [N, K], as linear's. Nothing of other rules.
std::optional<bool> weight_is_by_row(const Rule& rule);

// linear(x, w, b) with a matrix of each instance's own.
const Rule& linear_each_rule();
// _grouped_mm(rows, w, ends) with one weight for all instances.
const Rule& grouped_mm_rule();

// Whether this is `w.t()` of a whole value: a product with it is one with that.
bool is_transposed(const Tape& tape, ValueId id);

}  // namespace autobatch
