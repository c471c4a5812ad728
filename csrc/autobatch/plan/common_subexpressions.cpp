#include "autobatch/plan/common_subexpressions.h"

#include "autobatch/rules/rule.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <vector>

namespace autobatch {
namespace {

// The pass first compares a part of the nodes of a signature: 1/kLeastInstances of the nodes, and
// at least kLeastCompared nodes. If no two of these nodes are equal, the other nodes of the
// signature are not compared, so the pass costs little in graphs without equal nodes. If at least
// kLeastInstances instances compute equal nodes, the first comparisons find some of these nodes.
constexpr uint32_t kLeastInstances = 4;
constexpr uint32_t kLeastCompared = 8;
// After kTrial comparisons, the pass continues only if at least one in kLeastShare compared nodes
// has an equal node.
constexpr uint32_t kTrial = 256;
constexpr uint32_t kLeastShare = 8;
// Products that share a matrix get a separate signature. A signature is divided in this way for at
// most kMostMatrices matrices, each of which is read by at least kLeastReaders products.
constexpr uint32_t kMostMatrices = 8;
constexpr uint32_t kLeastReaders = 4;

class Eliminator {
 public:
  Eliminator(Tape& tape, const FlushGraph& graph, SignatureTable& signatures)
      : tape_(tape),
        graph_(graph),
        signatures_(signatures),
        kinds_(graph.kinds().size()),
        is_constant_(graph.size(), 0),
        equal_factory_(graph.size(), kNone) {}

  size_t run() {
    find_kinds();
    for (uint32_t number = 0; number < graph_.size(); ++number) visit(number);
    if (num_removed_ != 0) mark_readers();
    return num_removed_;
  }

 private:
  struct Kind {
    bool is_pure = false;  // equal operands give equal results
    uint32_t count = 0, compared = 0, found = 0;

    bool may_have_equal_nodes() const {
      if (!is_pure) return false;
      if (found == 0) return compared < std::max(kLeastCompared, count / kLeastInstances);
      return compared < kTrial || found * kLeastShare >= compared;
    }
  };

  void find_kinds() {
    for (size_t k = 0; k < kinds_.size(); ++k) {
      const Signature& signature = *graph_.kinds()[k].signature;
      const std::string& op = signature.op->name;
      kinds_[k].is_pure = !signature.op->random && op.starts_with("aten::") &&
                          !op.starts_with("aten::empty") && !op.starts_with("aten::new_empty");
    }
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      ++kinds_[graph_.signature(number)].count;
    }
  }

  void visit(uint32_t number) {
    Kind& kind = kinds_[graph_.signature(number)];
    if (!kind.may_have_equal_nodes() || !reads_constants(number)) return;
    const Node& node = tape_.nodes[graph_.id(number)];
    if (node.in_place || node.spent || narrows(node) || is_used_otherwise(node)) return;
    is_constant_[number] = 1;
    ++kind.compared;
    needs_grad_ = tape_.needs_grad(node);
    const uint32_t equal = find_or_add(number);
    if (equal == number) return;
    ++kind.found;
    // Equal factory ops (such as `zeros`) are kept, because their results are often initial states.
    // A batch reads the states of all instances in place only if the states are adjacent in memory.
    if (node.num_operands == 0) {
      equal_factory_[number] = equal;
    } else {
      remove(graph_.id(number), graph_.id(equal));
    }
  }

  // Whether the node depends only on graph inputs, directly or through other compared nodes.
  bool reads_constants(uint32_t number) const {
    return std::ranges::all_of(graph_.producers(number),
                               [&](uint32_t producer) { return is_constant_[producer] != 0; });
  }

  // Whether gradients of the results have a lower precision than the gradients of the operands
  // (`w.half()`). Eager mode sums the gradients of the instances in the higher precision.
  bool narrows(const Node& node) const {
    const Value& result = tape_.values[node.first_value];
    return std::ranges::any_of(tape_.operands_of(node), [&](ValueId id) {
      return id != kNone && tape_.values[id].requires_grad && result.requires_grad &&
             c10::elementSize(tape_.values[id].dtype) > c10::elementSize(result.dtype);
    });
  }

  // Whether the user, a later flush or a captured write refers to a result, or whether the gradient
  // of an operand passes through a tensor of the user.
  bool is_used_otherwise(const Node& node) const {
    for (ValueId id = node.first_value; id < node.first_value + node.num_values; ++id) {
      if (tape_.is_looked_at(id) || tape_.is_read(id) || tape_.written_at.contains(id)) return true;
    }
    return std::ranges::any_of(tape_.operands_of(node), [&](ValueId id) {
      while (id != kNone && tape_.values[id].parent != kNone) {
        if (tape_.values[id].tensor != nullptr) return true;
        id = tape_.values[id].parent;
      }
      return false;
    });
  }

  // Returns the base of an operand. If the base is the result of a factory op, returns the result
  // of the first equal factory op.
  ValueId base_of(const Value& operand) {
    const Value& base = tape_.values[operand.base];
    if (base.is_graph_input()) return needs_grad_ ? operand.base : same_memory(operand.base);
    const uint32_t number = graph_.number(base.node);
    if (number == kNone || equal_factory_[number] == kNone) return operand.base;
    return graph_.first_value(equal_factory_[number]) + base.index;
  }

  // Returns the first graph input that has the same memory as `input`. Without grad mode, a view of
  // a parameter (`w.t()`) is a new tensor in each instance.
  ValueId same_memory(ValueId input) {
    const void* memory = memory_of(input);
    if (memory == nullptr) return input;
    const Value& value = tape_.values[input];
    const size_t key = c10::get_hash(memory, value.geometry);
    const ValueId first = by_memory_.emplace(key, input).first->second;
    const Value& other = tape_.values[first];
    const bool same = memory_of(first) == memory && other.geometry == value.geometry;
    return same && other.dtype == value.dtype ? first : input;
  }

  const void* memory_of(ValueId input) const {
    const at::Tensor& data = tape_.graph_inputs[tape_.values[input].index].data;
    return data.defined() && data.has_storage() ? data.const_data_ptr() : nullptr;
  }

  size_t hash(uint32_t number) {
    const Node& node = tape_.nodes[graph_.id(number)];
    size_t hash = graph_.signature(number);
    for (ValueId id : tape_.operands_of(node)) {
      if (id == kNone) continue;
      const Value& value = tape_.values[id];
      hash = c10::hash_combine(hash, base_of(value) * size_t{0x9E3779B97F4A7C15} + value.offset);
    }
    return hash;
  }

  bool are_equal_operands(ValueId a, ValueId b) {
    if (a == b) return true;
    if (a == kNone || b == kNone) return false;
    const Value &x = tape_.values[a], &y = tape_.values[b];
    return x.offset == y.offset && x.geometry == y.geometry && x.requires_grad == y.requires_grad &&
           base_of(x) == base_of(y);
  }

  bool are_equal(uint32_t a, uint32_t b) {
    if (graph_.signature(a) != graph_.signature(b)) return false;
    const Node &x = tape_.nodes[graph_.id(a)], &y = tape_.nodes[graph_.id(b)];
    if (x.num_operands != y.num_operands || x.num_values != y.num_values) return false;
    for (uint32_t k = 0; k < x.num_values; ++k) {  // sizes may differ within a signature
      const Value &p = tape_.values[x.first_value + k], &q = tape_.values[y.first_value + k];
      if (p.geometry != q.geometry || p.requires_grad != q.requires_grad) return false;
    }
    const auto of_x = tape_.operands_of(x), of_y = tape_.operands_of(y);
    return std::equal(of_x.begin(), of_x.end(), of_y.begin(),
                      [&](ValueId p, ValueId q) { return are_equal_operands(p, q); });
  }

  // Returns the first node that equals `number`. If there is no such node, adds `number` to the
  // table and returns `number`.
  uint32_t find_or_add(uint32_t number) {
    uint32_t& head = heads_.emplace(hash(number), kNone).first->second;
    for (uint32_t other = head; other != kNone; other = next_[other]) {
      if (are_equal(other, number)) return other;
    }
    if (next_.empty()) next_.resize(graph_.size(), kNone);
    next_[number] = std::exchange(head, number);
    return number;
  }

  void remove(NodeId removed, NodeId remaining) {
    ++num_removed_;
    Node& node = tape_.nodes[removed];
    Node& other = tape_.nodes[remaining];
    node.state = NodeState::kGone;
    other.is_shared = true;
    for (uint32_t k = 0; k < node.num_values; ++k) {
      make_view(node.first_value + k, other.first_value + k);
    }
  }

  // Turns the result `id` and its views into views of `base`.
  void make_view(ValueId id, ValueId base) {
    Value& of = tape_.values[base];
    ValueId last = id;
    for (ValueId view = id; view != kNone; view = tape_.values[view].next_view) {
      tape_.values[view].base = base;
      tape_.values[view].node = of.node;
      last = view;
    }
    tape_.values[id].parent = base;
    tape_.values[last].next_view = std::exchange(of.next_view, id);
    join_uses(tape_.values[id].uses, of.uses);
  }

  // Moves the reads in the list `from` to the list `to`.
  void join_uses(uint32_t& from, uint32_t& to) {
    if (from == kNone || from == kReleased || to == kReleased) return;
    uint32_t last = from;
    while (tape_.uses[last].next != kNone) last = tape_.uses[last].next;
    tape_.uses[last].next = std::exchange(to, std::exchange(from, kNone));
  }

  // If a shared matrix has many readers, gives the products that read it a separate signature. The
  // matrices of a signature are numbered, so that the number of signatures is bounded.
  void mark_readers() {
    struct Matrix {
      uint32_t readers = 0, number = 0;
    };
    std::vector<uint64_t> matrix_of(graph_.size(), 0);  // for each node: a key of `matrices`, or 0
    std::vector<uint32_t> products(kinds_.size(), 0), numbered(kinds_.size(), 0);
    ska::flat_hash_map<uint64_t, Matrix> matrices;
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      const Node& node = tape_.nodes[graph_.id(number)];
      if (!graph_.kind(number).signature->rule->heavy() || node.state == NodeState::kGone) continue;
      ++products[graph_.signature(number)];
      const uint64_t matrix = hash_matrices(node);
      if (matrix == 0) continue;
      matrix_of[number] = c10::hash_combine(matrix, graph_.signature(number));
      ++matrices[matrix_of[number]].readers;
    }
    for (uint32_t number = 0; number < graph_.size(); ++number) {
      if (matrix_of[number] == 0) continue;
      Matrix& matrix = matrices[matrix_of[number]];
      const uint32_t kind = graph_.signature(number);
      if (matrix.readers < std::max(kLeastReaders, products[kind] / kMostMatrices)) continue;
      if (matrix.number == 0) matrix.number = ++numbered[kind];
      Node& node = tape_.nodes[graph_.id(number)];
      node.signature = marked(*node.signature, matrix.number);
    }
  }

  // Returns a hash of the shared values by which the node multiplies, or 0 if there are no such
  // values.
  uint64_t hash_matrices(const Node& node) const {
    uint64_t hash = 0;
    for (uint32_t slot = 0; slot < node.num_operands; ++slot) {
      const ValueId id = tape_.operands[node.first_operand + slot];
      if (id == kNone || !node.signature->rule->gains_if_shared(slot)) continue;
      const Value& value = tape_.values[id];
      if (value.is_graph_input()) continue;
      const uint32_t number = graph_.number(value.node);
      if (number == kNone || !tape_.nodes[value.node].is_shared) continue;
      hash = c10::hash_combine(hash, (uint64_t{value.base} << 32 | slot) + 1);
      hash = c10::hash_combine(hash, static_cast<uint64_t>(value.offset));
    }
    return hash;
  }

  Signature* marked(const Signature& plain, uint64_t mark) {
    Signature* signature = signatures_.marked_copy(plain, mark);
    if (signature->scope != plain.scope) {
      signature->scope = plain.scope;
      signature->site = plain.site;
      signature->position = plain.position;
    }
    return signature;
  }

  Tape& tape_;
  const FlushGraph& graph_;
  SignatureTable& signatures_;
  std::vector<Kind> kinds_;           // indexed by signature
  std::vector<uint8_t> is_constant_;  // for each node: whether it was compared
  // For each node that is a factory op: the first equal factory op, or kNone.
  std::vector<uint32_t> equal_factory_;
  // The remaining compared nodes, as a linked list for each hash. `heads_`: the last node with the
  // hash. `next_`: for each node, the previous node with the same hash.
  ska::flat_hash_map<size_t, uint32_t> heads_;
  std::vector<uint32_t> next_;
  bool needs_grad_ = false;                        // whether the compared node needs gradients
  ska::flat_hash_map<size_t, ValueId> by_memory_;  // the first graph input with each hash
  size_t num_removed_ = 0;
};

}  // namespace

size_t eliminate_common_subexpressions(Tape& tape, FlushGraph& graph, SignatureTable& signatures) {
  return Eliminator(tape, graph, signatures).run();
}

}  // namespace autobatch
