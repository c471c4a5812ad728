#include "autobatch/plan/find_varying_numbers.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

using State = VaryingNumbers::State;

// The first numbers of an op vary if this many batches could be saved.
constexpr size_t kLeastSaved = 4;
// A number varies if, at some level, at most one of so many nodes of the op has this number.
constexpr uint32_t kLeastOthers = 4;
// A saved batch is worth the additional operands of so many nodes.
constexpr size_t kNodesPerBatch = 16;
// Fewer nodes at a level do not show that a number is the same in all examples.
constexpr uint32_t kLeastFixed = 8;

class NumberFinder {
 public:
  NumberFinder(const Tape& tape, const FlushGraph& graph, VaryingNumbers& numbers)
      : tape_(tape), graph_(graph), numbers_(numbers) {}

  size_t run() {
    find_kinds();
    find_guesses();
    if (ops_.empty()) return 0;
    count();
    size_t changes = 0;
    for (const auto& [op, numbers] : ops_) changes += decide(*op, numbers);
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
    for (uint32_t k = 0; k < kinds.size(); ++k) {
      const Signature& signature = *kinds[k].signature;
      const auto found = find_number(*signature.op, signature.arguments);
      if (!found.has_value()) continue;
      const double value = found->value.toDouble();
      const State state = numbers_.state(*found->of_nodes, value);
      Number& number = ops_[found->of_nodes][value];
      number.kinds.push_back(k);
      number.is_known = state == State::kFixed || state == State::kVarying;
      with_tensor_[found->with_tensor] = found->of_nodes;
    }
    std::erase_if(ops_, [this](const auto& op) {
      const auto unknown = std::ranges::count_if(
          op.second, [](const auto& number) { return !number.second.is_known; });
      return static_cast<size_t>(unknown) < (numbers_.contains(*op.first) ? 1 : kLeastSaved);
    });
  }

  // Finds the ops whose guesses are examined, because this graph has nodes of these ops.
  void find_guesses() {
    guessed_ = numbers_.guessed_ops();
    if (guessed_.empty()) return;
    for (const FlushGraph::Kind& kind : graph_.kinds()) {
      const auto found = guessed_.find(kind.signature->op);
      if (found == guessed_.end()) continue;
      ops_.try_emplace(found->second);
      with_tensor_[found->first] = found->second;
    }
  }

  // Counts the nodes of each number and op at each level. A level is the length of the longest path
  // to a node. Nodes of one op at one level do not depend on each other.
  void count() {
    struct OfKind {
      const OpInfo* op = nullptr;
      Number* number = nullptr;  // null: a tensor in place of the number
    };
    std::vector<OfKind> of_kind(graph_.kinds().size());
    for (uint32_t kind = 0; kind < of_kind.size(); ++kind) {
      const auto found = with_tensor_.find(graph_.kinds()[kind].signature->op);
      if (found != with_tensor_.end() && ops_.count(found->second) != 0) {
        of_kind[kind].op = found->second;
      }
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
      Number* number = kind.number;
      if (number == nullptr) {
        const at::Tensor* tensor = number_tensor(id);
        if (tensor == nullptr) continue;
        number = guessed_number(*kind.op, *tensor);
      }
      ++nodes_[{kind.op, levels[id]}];
      if (number != nullptr) ++number->nodes[levels[id]];
    }
  }

  // Returns the unknown number for which the tensor stands, if its guesses are examined.
  Number* guessed_number(const OpInfo& op, const at::Tensor& tensor) {
    if (guessed_.empty()) return nullptr;
    const std::optional<double> value = numbers_.guessed_number(op, tensor);
    return value.has_value() ? &ops_[&op][*value] : nullptr;
  }

  at::ArrayRef<ValueId> operands(uint32_t id) const {
    return tape_.operands_of(tape_.nodes[graph_.id(id)]);
  }

  // Whether the op computes the same with a tensor in place of the number. For numbers, kernels of
  // lower precision use more digits than a tensor has.
  bool can_be_tensor(uint32_t id) const {
    return std::ranges::all_of(operands(id), [this](ValueId operand) {
      const Value& value = tape_.values[operand];
      const bool is_precise = value.dtype == at::kFloat || value.dtype == at::kDouble ||
                              c10::isIntegralType(value.dtype, /*includeBool=*/true);
      return is_precise && value.device.is_cpu();
    });
  }

  // Returns the tensor that the node may have in place of a number, or null.
  const at::Tensor* number_tensor(uint32_t id) const {
    for (const ValueId operand : operands(id)) {
      const Value& value = tape_.values[operand];
      if (!value.is_graph_input() || value.geometry->dim() != 0) continue;
      return &tape_.graph_inputs[value.index].data;
    }
    return nullptr;
  }

  size_t decide(const OpInfo& op, const Numbers& numbers) {
    std::vector<double> varying, fixed;
    size_t saved = 0, nodes = 0;
    for (const auto& [value, number] : numbers) {
      if (number.is_known) continue;
      size_t levels = 0;  // number of levels at which the number varies
      uint32_t most = 0;
      for (const auto& [level, count] : number.nodes) {
        const bool varies = count * kLeastOthers <= nodes_[{&op, level}];
        levels += varies ? 1 : 0;
        nodes += varies ? count : 0;
        most = std::max(most, count);
      }
      saved += levels;
      if (levels != 0) varying.push_back(value);
      if (levels == 0 && most >= kLeastFixed) fixed.push_back(value);
    }
    const bool has_few = saved < kLeastSaved || saved * kNodesPerBatch < nodes;
    if (has_few && !numbers_.contains(op)) return 0;
    for (const double value : varying) add_varying(op, value, numbers.at(value));
    for (const double value : fixed) numbers_.add_fixed(op, value);
    if (std::ranges::any_of(guessed_, [&](const auto& g) { return g.second == &op; })) {
      numbers_.end_guesses(op, !fixed.empty());
    }
    return varying.size();
  }

  void add_varying(const OpInfo& op, double value, const Number& number) {
    std::vector<const Signature*> signatures;
    for (const uint32_t kind : number.kinds) signatures.push_back(graph_.kinds()[kind].signature);
    const auto with_tensor =
        std::ranges::find_if(with_tensor_, [&](const auto& entry) { return entry.second == &op; });
    numbers_.add_varying(op, *with_tensor->first, value, signatures);
  }

  const Tape& tape_;
  const FlushGraph& graph_;
  VaryingNumbers& numbers_;
  std::unordered_map<const OpInfo*, Numbers> ops_;
  std::unordered_map<const OpInfo*, const OpInfo*> with_tensor_;  // NumberArgument: key, of_nodes
  std::unordered_map<const OpInfo*, const OpInfo*> guessed_;      // VaryingNumbers::guessed_ops()
  std::map<std::pair<const OpInfo*, uint32_t>, uint32_t> nodes_;  // number of nodes by op and level
};

}  // namespace

size_t find_varying_numbers(const Tape& tape, const FlushGraph& graph, VaryingNumbers& numbers) {
  return NumberFinder(tape, graph, numbers).run();
}

}  // namespace autobatch
