#include "autobatch/plan/find_varying_numbers.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

using State = VaryingNumbers::State;

// The numbers of an op start to vary only if a flush finds at least this many of them.
constexpr size_t kLeastNumbers = 4;
// A tensor in place of a number saves a batch at a level if at most one in this many nodes of the
// op has the number.
constexpr uint32_t kLeastOthers = 4;
// Saving one batch is worth the additional operands of this many nodes. (Measured: 64 nodes of
// width 32 with 8 numbers take 1.4 times as long with tensors, and with 16 numbers a third of the
// time.)
constexpr uint32_t kNodesPerBatch = 5;
// A number is recorded as fixed only if at least this many nodes at one level have it. Fewer nodes
// do not show that the number is the same in all examples.
constexpr uint32_t kLeastFixed = 8;

class NumberFinder {
 public:
  NumberFinder(const Tape& tape, const FlushGraph& graph, VaryingNumbers& numbers)
      : tape_(tape), graph_(graph), numbers_(numbers) {}

  size_t run() {
    find_kinds();
    if (!ops_.empty()) count();
    size_t changes = 0;
    for (const auto& [op, numbers] : ops_) changes += decide(*op, numbers);
    if (!unmarked_.empty()) mark();
    return changes;
  }

 private:
  // One number of an op.
  struct Number {
    std::vector<uint32_t> kinds;         // indices in graph_.kinds()
    bool is_known = false;               // whether the number is fixed or varies
    std::map<uint32_t, uint32_t> nodes;  // number of nodes at each level
  };
  using Numbers = std::map<double, Number>;

  // Finds the ops with unknown numbers. Most graphs have none, or too few to save batches.
  void find_kinds() {
    const auto& kinds = graph_.kinds();
    is_float_.resize(kinds.size(), 0);
    for (uint32_t k = 0; k < kinds.size(); ++k) {
      const Signature& signature = *kinds[k].signature;
      const auto found = find_number(*signature.op, signature.arguments);
      if (!found.has_value()) continue;
      const double value = found->value.toDouble();
      is_float_[k] = found->value.isFloatingPoint() ? 1 : 0;
      const State state = numbers_.state(*found->of_nodes, value);
      Number& number = ops_[found->of_nodes][value];
      number.kinds.push_back(k);
      number.is_known = state == State::kFixed || state == State::kVarying;
      if (state == State::kVarying && !numbers_.is_marked(signature)) unmarked_.push_back(k);
    }
    std::erase_if(ops_, [this](const auto& op) {
      const auto unknown = std::ranges::count_if(
          op.second, [](const auto& number) { return !number.second.is_known; });
      return static_cast<size_t>(unknown) < (numbers_.contains(*op.first) ? 1 : kLeastNumbers);
    });
  }

  // Counts the nodes of each number and op at each level. The level of a node is the length of the
  // longest path to it. Nodes at one level do not depend on each other.
  void count() {
    struct OfKind {
      const OpInfo* op = nullptr;
      Number* number = nullptr;  // null: a tensor in place of the number
    };
    std::vector<OfKind> of_kind(graph_.kinds().size());
    for (uint32_t kind = 0; kind < of_kind.size(); ++kind) {
      const OpInfo* op = graph_.kinds()[kind].signature->op;
      if (ops_.count(op) != 0) of_kind[kind].op = op;
    }
    for (auto& [op, numbers] : ops_) {
      for (auto& [value, number] : numbers) {
        for (const uint32_t kind : number.kinds) of_kind[kind] = {op, &number};
      }
    }
    std::vector<uint32_t> levels(graph_.size(), 0);
    for (uint32_t id = 0; id < graph_.size(); ++id) {
      for (const uint32_t producer : graph_.producers(id)) {
        levels[id] = std::max(levels[id], levels[producer] + 1);
      }
      const OfKind& kind = of_kind[graph_.signature(id)];
      if (kind.op == nullptr || !can_be_tensor(id)) continue;
      if (kind.number == nullptr && !has_number_tensor(id)) continue;
      ++nodes_[{kind.op, levels[id]}];
      if (kind.number != nullptr) ++kind.number->nodes[levels[id]];
    }
  }

  at::ArrayRef<ValueId> operands(uint32_t id) const {
    return tape_.operands_of(tape_.nodes[graph_.id(id)]);
  }

  // Whether the op computes the same with a tensor in place of the number. In lower precision,
  // kernels use more digits of a number than a tensor has. Ops on tensors of two dtypes do not run
  // as one batch for all sizes.
  bool can_be_tensor(uint32_t id) const {
    const bool is_float = is_float_[graph_.signature(id)] != 0;
    return std::ranges::all_of(operands(id), [&](ValueId operand) {
      const Value& value = tape_.values[operand];
      const bool holds = value.dtype == at::kFloat || value.dtype == at::kDouble ||
                         (value.dtype == at::kLong && !is_float) || value.dtype == at::kBool;
      return holds && value.device.is_cpu();
    });
  }

  // Whether the node may have a tensor in place of a number.
  bool has_number_tensor(uint32_t id) const {
    return std::ranges::any_of(operands(id), [this](ValueId operand) {
      const Value& value = tape_.values[operand];
      return value.is_graph_input() && value.geometry->dim() == 0;
    });
  }

  size_t decide(const OpInfo& op, const Numbers& numbers) {
    std::vector<double> varying, fixed;
    for (const auto& [value, number] : numbers) {
      if (number.is_known) continue;
      uint32_t saved = 0, nodes = 0, most = 0;
      for (const auto& [level, count] : number.nodes) {
        saved += count * kLeastOthers <= nodes_[{&op, level}] ? 1 : 0;
        nodes += count;
        most = std::max(most, count);
      }
      if (saved > 0 && nodes <= saved * kNodesPerBatch) {
        varying.push_back(value);
      } else if (most >= kLeastFixed) {
        fixed.push_back(value);
      }
    }
    if (varying.size() < kLeastNumbers && !numbers_.contains(op)) return 0;
    for (const double value : varying) {
      const std::vector<uint32_t>& kinds = numbers.at(value).kinds;
      numbers_.add_varying(op, value);
      unmarked_.insert(unmarked_.end(), kinds.begin(), kinds.end());
    }
    for (const double value : fixed) numbers_.add_fixed(op, value);
    return varying.size();
  }

  // Marks the signatures whose numbers vary.
  void mark() {
    std::vector<uint8_t> waits(graph_.kinds().size(), 0);
    for (const uint32_t kind : unmarked_) waits[kind] = 1;
    for (uint32_t id = 0; id < graph_.size(); ++id) {
      if (std::exchange(waits[graph_.signature(id)], 0) == 0) continue;
      numbers_.mark(*graph_.kind(id).signature, can_be_tensor(id));
    }
  }

  const Tape& tape_;
  const FlushGraph& graph_;
  VaryingNumbers& numbers_;
  std::unordered_map<const OpInfo*, Numbers> ops_;
  std::vector<uint8_t> is_float_;   // for each kind: whether its number is a float
  std::vector<uint32_t> unmarked_;  // kinds whose numbers vary, and that were not marked
  std::map<std::pair<const OpInfo*, uint32_t>, uint32_t> nodes_;  // number of nodes by op and level
};

}  // namespace

size_t find_varying_numbers(const Tape& tape, const FlushGraph& graph, VaryingNumbers& numbers) {
  return NumberFinder(tape, graph, numbers).run();
}

}  // namespace autobatch
