#include "autobatch/sums.h"

#include "autobatch/rules.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace autobatch {
namespace {

using at::Tensor;

// Fewer terms are left as they are: their operands often lie side by side as it is.
constexpr size_t kLeastTerms = 4;

// A sum of any number of terms of one size. Terms are added pairwise, in halves.
class SumRule final : public Rule {
 public:
  bool saves() const override { return false; }
  bool reads(size_t) const override { return false; }
  bool capture(Draft&) const override { return false; }  // made of other nodes

  void forward(Batch& batch) const override {
    Regions terms;
    Counts counts;
    for (int64_t m = 0; m < batch.size(); ++m) {
      const auto operands = batch.tape().operands_of(batch.node(m));
      counts.push_back(static_cast<int64_t>(operands.size()));
      for (ValueId id : operands) terms.push_back(batch.region(m, id));
    }
    const int64_t width = terms.front().geometry->numel;
    Tensor out = batch.output_rows(0, width);
    const Located located(std::move(terms));
    Tensor rows;
    if (located.layout().consecutive) {
      rows = consecutive_view(located);
    } else {
      rows = at::empty({located.layout().numel}, out.options());
      gather_into(located.all(), rows);
    }
    segment_sum(rows.view({located.count(), width}), counts, out);
  }

  void backward(BackwardBatch& batch) const override {
    Regions from, to;
    for (int64_t m = 0; m < batch.size(); ++m) {
      for (ValueId id : batch.tape().operands_of(batch.node(m))) {
        if (!batch.wanted(id)) continue;
        from.push_back(batch.grad_region(m, 0));
        to.push_back(batch.target_to_add(m, id));
      }
    }
    add_regions(from, to);
  }

  std::vector<Tensor> eager(const Signature&, at::ArrayRef<Tensor> operands,
                            at::ArrayRef<Tensor>) const override {
    Tensor sum = operands[0];
    for (const Tensor& term : operands.slice(1)) sum = sum + term;
    return {sum};
  }
};

const Rule& sum_rule() {
  static const SumRule rule;
  return rule;
}

class Collapser {
 public:
  Collapser(Tape& tape, SignatureTable& signatures, std::vector<uint8_t>& live,
            at::ArrayRef<NodeId> waiting)
      : tape_(tape), signatures_(signatures), live_(live), waiting_(waiting) {}

  void run() {
    find_additions();
    if (most_terms_ < kLeastTerms) return;
    count_uses();
    for (auto id = static_cast<NodeId>(tape_.nodes.size()); id-- > 0;) {
      if (live_[id] && is_addition(id) && !is_inner_[id]) collapse(id);
    }
  }

 private:
  void find_additions() {
    terms_.assign(tape_.nodes.size(), 0);
    for (NodeId id = 0; id < tape_.nodes.size(); ++id) {
      const Node& node = tape_.nodes[id];
      if (!live_[id] || !adds(node)) continue;
      for (ValueId operand : tape_.operands_of(node)) {
        const NodeId producer = tape_.values[operand].node;
        terms_[id] += producer == kNone ? 1 : std::max<uint8_t>(terms_[producer], 1);
      }
      terms_[id] = std::min<uint8_t>(terms_[id], kLeastTerms);
      most_terms_ = std::max<size_t>(most_terms_, terms_[id]);
    }
  }

  bool is_addition(NodeId id) const { return terms_[id] != 0; }

  void count_uses() {
    uses_.assign(tape_.values.size(), 0);
    is_inner_.assign(tape_.nodes.size(), 0);
    const auto count = [&](NodeId id) {
      for (ValueId operand : tape_.operands_of(tape_.nodes[id])) {
        if (operand != kNone) ++uses_[operand];
      }
    };
    for (NodeId id = 0; id < tape_.nodes.size(); ++id) {
      if (live_[id]) count(id);
    }
    for (NodeId id : waiting_) {
      if (!live_[id]) count(id);
    }
  }

  // Whether the node is `x + y`, of one shape and type, or `x + 0`.
  bool adds(const Node& node) const {
    const Signature& signature = *node.signature;
    const bool scalar = signature.op->name == "aten::add.Scalar";
    if ((!scalar && signature.op->name != "aten::add.Tensor") || signature.rule->infers()) {
      return false;
    }
    if (!signature.arguments[2].toScalar().equal(1)) return false;
    const Value& result = tape_.values[node.first_value];
    if (!c10::isFloatingType(result.dtype)) return false;
    for (ValueId id : tape_.operands_of(node)) {
      const Value& operand = tape_.values[id];
      if (operand.dtype != result.dtype || operand.device != result.device) return false;
      if (operand.geometry->sizes != result.geometry->sizes) return false;
    }
    return node.num_operands == 2 || is_zero(signature.arguments[scalar || is_left(node) ? 1 : 0]);
  }

  bool is_left(const Node& node) const { return node.signature->slots[0].argument == 0; }

  static bool is_zero(const c10::IValue& number) {
    if (number.isTensor()) return number.toTensor().item().equal(0);
    return number.isScalar() && number.toScalar().equal(0);
  }

  // Whether the result that is read there is that of an addition, and nothing else than a part of
  // the sum `root`.
  bool is_part(ValueId id, const Node& root) const {
    const Value& value = tape_.values[id];
    if (value.is_outside() || value.parent != kNone || !is_addition(value.node)) return false;
    if (value.tensor != nullptr || value.next_view != kNone || uses_[id] != 1) return false;
    const Signature& signature = *tape_.nodes[value.node].signature;
    return signature.context.word() == root.signature->context.word();
  }

  void collapse(NodeId root) {
    const Node& node = tape_.nodes[root];
    std::vector<ValueId> terms, stack;
    push_operands(node, stack);
    std::vector<NodeId> parts;
    while (!stack.empty()) {
      const ValueId id = stack.back();
      stack.pop_back();
      if (!is_part(id, node)) {
        terms.push_back(id);
        continue;
      }
      const NodeId part = tape_.values[id].node;
      is_inner_[part] = 1;
      parts.push_back(part);
      push_operands(tape_.nodes[part], stack);
    }
    if (terms.size() < kLeastTerms) return;
    for (NodeId part : parts) live_[part] = 0;
    Signature* signature = signature_of(node);
    tape_.nodes[root].signature = signature;
    tape_.nodes[root].first_operand = static_cast<uint32_t>(tape_.operands.size());
    tape_.nodes[root].num_operands = static_cast<uint32_t>(terms.size());
    tape_.operands.insert(tape_.operands.end(), terms.begin(), terms.end());
  }

  // The first one comes to lie on top.
  void push_operands(const Node& node, std::vector<ValueId>& stack) const {
    for (uint32_t s = node.num_operands; s-- > 0;) {
      stack.push_back(tape_.operands[node.first_operand + s]);
    }
  }

  Signature* signature_of(const Node& node) {
    const Signature& addition = *node.signature;
    const Value& result = tape_.values[node.first_value];
    Key key;
    key.push_back(reinterpret_cast<uint64_t>(&sum_rule()));
    key.push_back(reinterpret_cast<uint64_t>(addition.op));
    key.push_back(addition.context.word());
    key.push_back(static_cast<uint64_t>(result.dtype) << 16 |
                  static_cast<uint64_t>(result.device.type()) << 8 |
                  static_cast<uint8_t>(result.device.index()));
    key.push_back(static_cast<uint64_t>(result.geometry->dim()));
    key.push_back(static_cast<uint64_t>(result.geometry->numel));
    Signature* signature = signatures_.find(key);
    if (signature == nullptr) {
      signature = signatures_.add(key);
      signature->op = addition.op;
      signature->rule = &sum_rule();
      signature->context = addition.context;
      signature->note = "a sum of several terms";
    }
    if (signature->scope != addition.scope) {
      signature->scope = addition.scope;
      signature->site = addition.site;
    }
    return signature;
  }

  Tape& tape_;
  SignatureTable& signatures_;
  std::vector<uint8_t>& live_;
  at::ArrayRef<NodeId> waiting_;
  // By node: of an addition, how many terms its sum may have, but kLeastTerms at most.
  std::vector<uint8_t> terms_;
  std::vector<uint8_t> is_inner_;  // by node: its result is part of another's sum
  std::vector<uint32_t> uses_;     // by value, as an operand of live or waiting nodes
  size_t most_terms_ = 0;
};

}  // namespace

void collapse_sums(Tape& tape, SignatureTable& signatures, std::vector<uint8_t>& live,
                   at::ArrayRef<NodeId> waiting) {
  Collapser(tape, signatures, live, waiting).run();
}

}  // namespace autobatch
