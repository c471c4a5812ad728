// The interface of the rules for matrix products with a weight.
#pragma once

#include "autobatch/rules/rule.h"

#include <optional>

namespace autobatch {

// If `rule` multiplies x (operand 0) by a weight (operand 1) and adds an optional bias (operand 2),
// returns true if the weight is [N, K], as in linear, and false if the weight is [K, N]. Returns
// nothing for other rules.
std::optional<bool> weight_is_by_row(const Rule& rule);

// The rule of linear(x, w, b) where each instance has its own matrix.
const Rule& linear_each_rule();
// The rule of _grouped_mm(rows, w, ends) where all instances share the weight.
const Rule& grouped_mm_rule();

// Whether the value is `w.t()`, where `w` is the whole base of the value. If so, a product with the
// value can be treated as a product with `w`.
bool is_transposed(const Tape& tape, ValueId id);

}  // namespace autobatch
