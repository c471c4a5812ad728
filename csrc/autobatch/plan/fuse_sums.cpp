#include "autobatch/plan/fuse_sums.h"

#include "autobatch/graph/op_registry.h"
#include "autobatch/plan/reader_counts.h"
#include "autobatch/rules/rule.h"

#include <algorithm>
#include <optional>

namespace autobatch {
namespace {

// Minimum number of terms of a fused sum. A sum of lookups may have fewer terms. The operands of
// other shorter sums are often contiguous without the fusion.
constexpr size_t kLeastTerms = 4;

class SumFuser {
 public:
  SumFuser(Tape& tape, const FlushGraph& graph, SignatureTable& signatures)
      : tape_(tape), graph_(graph), signatures_(signatures) {}

  size_t run() {
    find_additions();
    if (most_terms_ < kLeastTerms) return 0;
    readers_.emplace(tape_, graph_);
    is_inner_.assign(graph_.size(), 0);
    for (auto id = additions_.rbegin(); id != additions_.rend(); ++id) {
      if (is_unmerged(*id) && !is_inner_[graph_.number(*id)]) collapse(*id);
    }
    return num_sums_;
  }

 private:
  void find_additions() {
    std::vector<uint8_t> may_add;  // for each kind: number of operands of an addition, or 0
    bool any = false;
    for (const FlushGraph::Kind& kind : graph_.kinds()) {
      may_add.push_back(adds(*kind.signature) ? kind.signature->slots.size() : 0);
      any |= may_add.back() != 0;
    }
    if (!any || !may_have_sums(may_add)) return;
    terms_.assign(graph_.size(), 0);
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      if (!may_add[graph_.signature(number)]) continue;
      const NodeId id = graph_.id(number);
      const Node& node = tape_.nodes[id];
      if (!is_of_one_shape(node)) continue;
      additions_.push_back(id);
      for (ValueId operand : tape_.operands_of(node)) {
        terms_[number] += std::max<uint8_t>(terms_of(operand), 1);
      }
      terms_[number] = std::min<uint8_t>(terms_[number], kLeastTerms);
      most_terms_ = std::max<size_t>(most_terms_, terms_[number]);
    }
  }

  // Whether at least one sum may have kLeastTerms terms. The function does not read the operands,
  // which are scattered in memory. The function returns false for most graphs.
  bool may_have_sums(std::span<const uint8_t> may_add) const {
    std::vector<uint8_t> terms(graph_.size(), 0);
    size_t most = 0;
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      const size_t operands = may_add[graph_.signature(number)];
      if (operands == 0) continue;
      const std::span<const uint32_t> producers = graph_.producers(number);
      size_t count = operands - producers.size();
      for (const uint32_t producer : producers) count += std::max<size_t>(terms[producer], 1);
      terms[number] = static_cast<uint8_t>(std::min(count, kLeastTerms));
      most = std::max(most, count);
    }
    return most >= kLeastTerms;
  }

  // Returns the number of terms of the sum that computes the value `id`, at most kLeastTerms.
  // Returns 0 if no addition of this graph computes the value.
  uint8_t terms_of(ValueId id) const {
    const NodeId producer = tape_.values[id].node;
    const uint32_t number = producer == kNone ? kNone : graph_.number(producer);
    return number == kNone ? 0 : terms_[number];
  }

  // Whether the node has not been merged.
  bool is_unmerged(NodeId id) const { return tape_.nodes[id].state == NodeState::kNeeded; }

  // Whether the operands of an addition have the shape, dtype and device of its result, and whether
  // the result is contiguous.
  bool is_of_one_shape(const Node& node) const {
    const Value& result = tape_.values[node.first_value];
    if (!c10::isFloatingType(result.dtype) || !result.geometry->contiguous) return false;
    for (ValueId id : tape_.operands_of(node)) {
      const Value& operand = tape_.values[id];
      if (operand.dtype != result.dtype || operand.device != result.device) return false;
      if (operand.geometry != result.geometry &&
          operand.geometry->sizes != result.geometry->sizes) {
        return false;
      }
    }
    return true;
  }

  // Whether nodes of the signature compute `x + y` or `x + 0`. Returns false for sums that were
  // fused by an earlier flush that failed.
  static bool adds(const Signature& signature) {
    if (signature.rule == &sum_rule()) return false;
    const std::string& op = signature.op->name;
    const bool scalar = op == "aten::add.Scalar";
    if ((!scalar && op != "aten::add.Tensor") || signature.rule->infers()) return false;
    if (!signature.arguments[2].toScalar().equal(1)) return false;
    if (signature.slots.size() == 2) return true;
    const bool is_left = signature.slots[0].argument == 0;
    return is_zero(signature.arguments[scalar || is_left ? 1 : 0]);
  }

  static bool is_zero(const c10::IValue& number) {
    if (number.isTensor()) return number.toTensor().item().equal(0);
    return number.isScalar() && number.toScalar().equal(0);
  }

  // Whether the value is the result of an addition and only the sum `root` reads the value.
  bool is_part(ValueId id, const Node& root) {
    return terms_of(id) != 0 && has_single_reader(id, root);
  }

  // Whether a value is computed in the dispatch context of `root`, has one reader, and is not held
  // by the user.
  bool has_single_reader(ValueId id, const Node& root) {
    if (!readers_->has_single_reader(id)) return false;
    const Signature* signature = node_of(id).signature;
    return signature == root.signature ||
           signature->context.word() == root.signature->context.word();
  }

  void collapse(NodeId root) {
    const Node& node = tape_.nodes[root];
    find_terms(node);
    const Node* lookup = are_lookups(node) ? &node_of(terms_of_sum_[0]) : nullptr;
    if (lookup == nullptr && terms_of_sum_.size() < kLeastTerms) return;
    ++num_sums_;
    for (NodeId part : parts_) tape_.nodes[part].state = NodeState::kGone;
    Signature* signature = lookup == nullptr
                               ? signature_of(node, sum_rule(), *node.signature)
                               : signature_of(node, lookup_sum_rule(), *lookup->signature);
    const auto first = static_cast<uint32_t>(tape_.operands.size());
    if (lookup == nullptr) {
      tape_.operands.insert(tape_.operands.end(), terms_of_sum_.begin(), terms_of_sum_.end());
    } else {
      add_lookups(*lookup);
    }
    Node& sum = tape_.nodes[root];
    sum.signature = signature;
    sum.first_operand = first;
    sum.num_operands = static_cast<uint32_t>(tape_.operands.size()) - first;
  }

  // Finds the terms of the sum that ends in `root`, and the other additions of this sum.
  void find_terms(const Node& root) {
    terms_of_sum_.clear();
    parts_.clear();
    push_operands(root);
    while (!stack_.empty()) {
      const ValueId id = stack_.back();
      stack_.pop_back();
      if (!is_part(id, root)) {
        terms_of_sum_.push_back(id);
        continue;
      }
      const NodeId part = tape_.values[id].node;
      is_inner_[graph_.number(part)] = 1;
      parts_.push_back(part);
      push_operands(tape_.nodes[part]);
    }
  }

  const Node& node_of(ValueId id) const { return tape_.nodes[tape_.values[id].node]; }

  // Whether all terms are rows of one matrix. The rows must be looked up by nodes of one signature,
  // and only this sum may read the results of these nodes.
  bool are_lookups(const Node& root) {
    const Node* first = nullptr;
    for (ValueId id : terms_of_sum_) {
      const Value& value = tape_.values[id];
      if (value.is_graph_input() || !is_unmerged(value.node) || !has_single_reader(id, root))
        return false;
      const Node& node = node_of(id);
      if (first == nullptr) first = &node;
      if (!sums_lookups(*node.signature) || node.signature != first->signature) return false;
      if (tape_.operands[node.first_operand] != tape_.operands[first->first_operand]) return false;
      if (value.requires_grad != tape_.values[root.first_value].requires_grad) return false;
    }
    return true;
  }

  // Appends the operands of lookup_sum_rule(): the matrix, and the indices of each term.
  void add_lookups(const Node& first) {
    tape_.operands.push_back(tape_.operands[first.first_operand]);
    for (ValueId term : terms_of_sum_) {
      tape_.nodes[tape_.values[term].node].state = NodeState::kGone;
      tape_.operands.push_back(tape_.operands[node_of(term).first_operand + 1]);
    }
  }

  // Pushes the operands in reverse, so that the first one is popped first.
  void push_operands(const Node& node) {
    for (uint32_t s = node.num_operands; s-- > 0;) {
      stack_.push_back(tape_.operands[node.first_operand + s]);
    }
  }

  // Returns the signature of the sums that `rule` runs and that have a result like the result of
  // `node`. Errors and reports name the op and site of `op`.
  Signature* signature_of(const Node& node, const Rule& rule, const Signature& op) {
    const Value& result = tape_.values[node.first_value];
    Key key;
    key.push_back(reinterpret_cast<uint64_t>(&rule));
    key.push_back(
        reinterpret_cast<uint64_t>(&rule == &sum_rule() ? static_cast<const void*>(op.op) : &op));
    key.push_back(op.context.word());
    key.push_back(static_cast<uint64_t>(result.dtype) << 16 |
                  static_cast<uint64_t>(result.device.type()) << 8 |
                  static_cast<uint8_t>(result.device.index()));
    key.push_back(static_cast<uint64_t>(result.geometry->dim()));
    if (&rule != &sum_rule()) key.push_back(static_cast<uint64_t>(result.geometry->numel));
    return joined_signature(signatures_, key, op, rule, &rule == &lookup_sum_rule() ? 1 : 0,
                            "a sum of several terms");
  }

  Tape& tape_;
  const FlushGraph& graph_;
  SignatureTable& signatures_;
  // For each node: if it is an addition, the number of terms of its sum, at most kLeastTerms;
  // otherwise 0.
  std::vector<uint8_t> terms_;
  std::vector<NodeId> additions_;
  // For each node: whether the node is part of a sum that ends in another node.
  std::vector<uint8_t> is_inner_;
  std::optional<ReaderCounts> readers_;
  size_t most_terms_ = 0;
  size_t num_sums_ = 0;  // number of sums fused so far
  // Results and stack of the last call of find_terms().
  std::vector<ValueId> terms_of_sum_, stack_;
  std::vector<NodeId> parts_;
};

}  // namespace

size_t fuse_sums(Tape& tape, const FlushGraph& graph, SignatureTable& signatures) {
  return SumFuser(tape, graph, signatures).run();
}

}  // namespace autobatch
