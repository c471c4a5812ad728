// Computes the fields of a subgraph that Subgraph::complete() sets: the execution order of the ops,
// and the place and lifetime of each value. Also finds which operands and results receive each
// gradient.
#include "autobatch/subgraph/elementwise_fusion.h"
#include "autobatch/subgraph/subgraph.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace autobatch {
namespace {

constexpr size_t kLargestTiled = size_t{1} << 20;  // elements, because each element is checked

class Completer {
 public:
  explicit Completer(Subgraph& subgraph) : subgraph_(subgraph), tape_(subgraph.tape) {}

  void run() {
    find_steps();
    leave_addends();
    place();
    find_partition();
    find_uses();
    write_in_place();
    find_passing();
    find_factors();
    find_dependences();
  }

 private:
  // Finds the steps. Every op that is not elementwise runs at the earliest possible step. This
  // allows more elementwise ops to be joined in one elementwise program.
  void find_steps() {
    std::vector<std::optional<FusedNode>> elementwise;
    for (NodeId n = 0; n < tape_.nodes.size(); ++n)
      elementwise.push_back(as_fused_node(subgraph_, n));
    done_.assign(tape_.nodes.size(), 0);
    for (size_t left = tape_.nodes.size(); left != 0;) {
      for (NodeId n = 0; n < tape_.nodes.size(); ++n) {
        if (elementwise[n] || !is_ready(n)) continue;
        subgraph_.steps.push_back({n, {}, {}});
        done_[n] = 1;
        --left;
      }
      SubgraphStep program;
      for (NodeId n = 0; n < tape_.nodes.size(); ++n) {
        if (!elementwise[n] || !is_ready(n)) continue;
        if (!program.fused.empty() && dtype_of(program.fused[0].node) != dtype_of(n)) continue;
        program.fused.push_back(*elementwise[n]);
        done_[n] = 1;
        --left;
      }
      if (!program.fused.empty()) subgraph_.steps.push_back(std::move(program));
    }
  }

  // If an elementwise program reads a product, the program first adds the bias of this product. If
  // the op of the product added the bias, the op would first have to write the bias to the whole
  // result.
  void leave_addends() {
    std::vector<uint32_t> first_reader(tape_.values.size(), kNone);  // step, for each base
    for (uint32_t s = 0; s < subgraph_.steps.size(); ++s) {
      subgraph_.steps[s].each_node([&](NodeId n) {
        for (const ValueId id : tape_.operands_of(tape_.nodes[n])) {
          if (id == kNone) continue;
          uint32_t& first = first_reader[tape_.values[id].base];
          first = std::min(first, s);
        }
      });
    }
    for (NodeId n = 0; n < tape_.nodes.size(); ++n) {
      const uint32_t reader = first_reader[tape_.nodes[n].first_value];
      subgraph_.leaves_addends.push_back(reader != kNone &&
                                         leave_addends(n, subgraph_.steps[reader]));
    }
  }

  bool leave_addends(NodeId n, SubgraphStep& to) {
    const Node& node = tape_.nodes[n];
    if (to.fused.empty() || dtype_of(to.fused[0].node) != dtype_of(n)) return false;
    const auto addends = node.signature->rule->addends(tape_, node);
    std::vector<FusedAddend> left;
    for (const Rule::Addend& addend : addends) {
      const ValueId id = tape_.operands[node.first_operand + addend.slot];
      if (!tape_.values[id].geometry->contiguous) return false;
      left.push_back({node.first_value, id, addend});
    }
    to.addends.insert(to.addends.end(), left.begin(), left.end());
    return !left.empty();
  }

  bool is_ready(NodeId n) const {
    if (done_[n] != 0) return false;
    for (const ValueId id : tape_.operands_of(tape_.nodes[n])) {
      if (id == kNone) continue;
      const Value& base = tape_.values[tape_.values[id].base];
      if (!base.is_graph_input() && done_[base.node] == 0) return false;
    }
    return true;
  }

  c10::ScalarType dtype_of(NodeId n) const {
    return tape_.values[tape_.nodes[n].first_value].dtype;
  }

  void place() {
    Store& store = subgraph_.store;
    store.places.resize(tape_.values.size());
    store.steps.assign(tape_.values.size(), 0);
    for (ValueId id = 0; id < tape_.values.size(); ++id) {
      const Value& value = tape_.values[id];
      if (value.base != id || value.is_graph_input()) continue;
      const auto slab = static_cast<uint32_t>(store.lengths.size());
      store.places[id] = {slab, slab, 0, 0};
      store.lengths.push_back(value.geometry->extent);
      store.grad_lengths.push_back(value.geometry->extent);
      store.steps[id] = value.geometry->extent;
    }
    store.slabs.resize(store.lengths.size());
  }

  void find_uses() {
    subgraph_.slab_saved.assign(subgraph_.store.lengths.size(), 0);
    subgraph_.operand_saved.assign(tape_.graph_inputs.size(), 0);
    for (const uint8_t weight : subgraph_.is_weight) subgraph_.is_copied.push_back(weight == 0);
    subgraph_.drop_after.resize(subgraph_.steps.size());
    uses_.resize(subgraph_.store.lengths.size());
    for (uint32_t s = 0; s < subgraph_.steps.size(); ++s) {
      subgraph_.steps[s].each_node([&](NodeId n) { find_uses(n, s); });
    }
    for (const ValueId id : subgraph_.results) use_of(id).is_result = true;
  }

  // An elementwise program may read parts of a product, such as the gates of a cell. If each part
  // is read once, the program writes the result that it computes from a part to the memory of this
  // part. This memory is already in the CPU's cache, and the product is not needed any more.
  void write_in_place() {
    std::vector<uint32_t> reads(tape_.values.size(), 0);  // for each base: number of reads
    for (const ValueId id : tape_.operands) {
      if (id != kNone) ++reads[tape_.values[id].base];
    }
    std::vector<uint32_t> products;
    for (uint32_t s = 0; s < subgraph_.steps.size(); ++s) {
      for (const FusedNode& part : subgraph_.steps[s].fused) {
        const ValueId result = tape_.nodes[part.node].first_value;
        if (!is_saved(result) || use_of(result).is_result) continue;
        for (const ValueId id : tape_.operands_of(tape_.nodes[part.node])) {
          if (!is_free(part, id, s, reads[tape_.values[id].base])) continue;
          const Value& value = tape_.values[id];
          Allocation& place = subgraph_.store.places[result];
          place.slab = own_slab(value.base);
          place.offset = value.offset;
          subgraph_.store.steps[result] = subgraph_.store.steps[value.base];
          products.push_back(place.slab);
          break;
        }
      }
    }
    for (const uint32_t slab : products) subgraph_.slab_saved[slab] = 1;
  }

  // Whether the result of `part` may overwrite the operand `id`. The operand must be a part of an
  // earlier step's result, and step `s` must read each part of that result once. The operand must
  // have the layout of the result of `part`.
  bool is_free(const FusedNode& part, ValueId id, uint32_t s, uint32_t reads) {
    const Value& value = tape_.values[id];
    if (tape_.values[value.base].is_graph_input()) return false;
    const Use& use = use_of(value.base);
    const Partition& partition = subgraph_.partition;
    return use.first != s && use.last == s && !use.is_result && !is_saved(value.base) &&
           partition.number[id] != Partition::kNone &&
           partition.tiles[value.base].size() == reads && value.geometry->contiguous &&
           value.geometry->numel == part.mid * part.inner;
  }

  // Finds the slabs that only one elementwise program uses. For each other slab, finds the step
  // after which the slab is freed.
  void find_passing() {
    subgraph_.passing.assign(uses_.size(), 0);
    for (uint32_t slab = 0; slab < uses_.size(); ++slab) {
      const Use& use = uses_[slab];
      if (subgraph_.slab_saved[slab]) continue;
      subgraph_.drop_after[use.last].push_back(slab);
      const bool in_program = !subgraph_.steps[use.first].fused.empty();
      subgraph_.passing[slab] = in_program && use.first == use.last && !use.is_result ? 1 : 0;
    }
  }

  // Finds the factors of weights' gradients. For a product with a weight, the factors are the other
  // input and the gradient of the product.
  void find_factors() {
    subgraph_.is_factor.assign(uses_.size(), 0);
    subgraph_.is_grad_factor.assign(uses_.size(), 0);
    for (const Node& node : tape_.nodes) {
      if (!node.signature->rule->heavy() || node.num_values != 1) continue;
      bool to_weight = false;
      for (const ValueId id : tape_.operands_of(node)) {
        if (id != kNone && tape_.values[id].requires_grad)
          to_weight |= is_weight(tape_.values[id].base);
      }
      if (!to_weight) continue;
      subgraph_.is_grad_factor[own_slab(node.first_value)] = 1;
      const ValueId input = tape_.values[tape_.operands[node.first_operand]].base;
      if (!tape_.values[input].is_graph_input()) subgraph_.is_factor[own_slab(input)] = 1;
    }
  }

  // Records that the node `n` of step `step` uses its results and its operands.
  void find_uses(NodeId n, uint32_t step) {
    const Node& node = tape_.nodes[n];
    const Rule& rule = *node.signature->rule;
    const bool saves = tape_.needs_grad(node) && rule.saves();
    subgraph_.heavy = subgraph_.heavy || rule.heavy();
    subgraph_.saves = subgraph_.saves || saves;
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const ValueId id = node.first_value + k;
      use_of(id) = {step, step};
      if (saves && rule.reads_result(k)) subgraph_.slab_saved[own_slab(id)] = 1;
    }
    for (size_t slot = 0; slot < node.num_operands; ++slot) {
      const ValueId id = tape_.operands[node.first_operand + slot];
      if (id == kNone) continue;
      const Value& base = tape_.values[tape_.values[id].base];
      const bool saved = saves && rule.reads(slot);
      if (base.is_graph_input()) {
        if (saved) subgraph_.operand_saved[base.index] = 1;
        if (!rule.copies_regions() || base.base != id) subgraph_.is_copied[base.index] = 0;
        continue;
      }
      use_of(base.base).last = step;
      if (saved) subgraph_.slab_saved[own_slab(base.base)] = 1;
    }
  }

  // For each value, finds the operands and results of the cell to which the value's gradient flows.
  void find_dependences() {
    const Tape& tape = subgraph_.ops();  // before fusion, each gate depends on one weight
    std::vector<uint64_t> operands(tape.values.size(), 0), results(tape.values.size(), 0);
    for (ValueId id = 0; id < tape.values.size(); ++id) {
      const Value& value = tape.values[id];
      if (!value.requires_grad) continue;
      if (value.parent != kNone) {
        operands[id] = operands[value.parent];
        results[id] = results[value.parent];
      } else if (value.is_graph_input()) {
        operands[id] = uint64_t{1} << value.index;
      } else {
        const Node& node = tape.nodes[value.node];
        for (ValueId operand : tape.operands_of(node)) {
          if (operand == kNone) continue;
          operands[id] |= operands[operand];
          results[id] |= results[operand];
        }
      }
      if (const size_t k = result_number(id); k < subgraph_.results.size()) {
        results[id] |= uint64_t{1} << k;
      }
      if (value.parent == kNone && !value.is_graph_input()) pass_on_by_dependency(value, results);
    }
    subgraph_.feeds.assign(subgraph_.results.size(), 0);
    for (size_t k = 0; k < subgraph_.results.size(); ++k) {
      subgraph_.depends.push_back(operands[subgraph_.results[k]]);
      subgraph_.closure.push_back(
          static_cast<uint8_t>(results[subgraph_.results[k]] | uint64_t{1} << k));
      for (size_t j = 0; j < subgraph_.results.size(); ++j) {
        if (j != k && (results[subgraph_.results[j]] >> k & 1) != 0) subgraph_.feeds[k] = 1;
      }
    }
  }

  // Handles an op that computes one of its results from another result (Rule::result_dependency).
  // The function has an effect only for the later of the two results.
  void pass_on_by_dependency(const Value& value, std::vector<uint64_t>& results) const {
    const Node& node = subgraph_.ops().nodes[value.node];
    const Rule::ResultDependency dependency = node.signature->rule->result_dependency();
    if (dependency.from == kNone || value.index != std::max(dependency.from, dependency.result))
      return;
    results[node.first_value + dependency.result] |= results[node.first_value + dependency.from];
  }

  // For each value that receives gradients, finds the views that ops read. The views are stored if
  // the views divide the value into parts.
  void find_partition() {
    Partition& partition = subgraph_.partition;
    partition.number.assign(tape_.values.size(), Partition::kNone);
    partition.tiles.resize(tape_.values.size());
    partition.alone.assign(tape_.values.size(), 0);
    std::vector<uint32_t> reads(tape_.values.size(), 0);  // for each base: number of reads
    for (const ValueId id : tape_.operands) {
      if (id == kNone || !tape_.values[id].requires_grad) continue;
      const ValueId base = tape_.values[id].base;
      ++reads[base];
      std::vector<ValueId>& tiles = partition.tiles[base];
      const auto same = [&](ValueId tile) { return is_same_part(tile, id); };
      const auto known = std::find_if(tiles.begin(), tiles.end(), same);
      partition.number[id] = static_cast<uint8_t>(std::min<size_t>(known - tiles.begin(), 64));
      if (known == tiles.end() && tiles.size() <= 64) tiles.push_back(id);
    }
    for (ValueId base = 0; base < tape_.values.size(); ++base) {
      if (!is_weight(base) && are_all_parts(base, partition.tiles[base])) {
        partition.alone[base] = reads[base] == 1 && partition.tiles[base][0] == base ? 1 : 0;
      } else {
        partition.tiles[base].clear();
      }
    }
    for (ValueId id = 0; id < tape_.values.size(); ++id) {
      if (partition.tiles[tape_.values[id].base].empty()) partition.number[id] = Partition::kNone;
    }
  }

  bool is_weight(ValueId base) const {
    return tape_.values[base].is_graph_input() &&
           subgraph_.is_weight[tape_.values[base].index] != 0;
  }

  bool is_same_part(ValueId a, ValueId b) const {
    const Value &x = tape_.values[a], &y = tape_.values[b];
    return x.base == y.base && x.offset == y.offset && x.geometry == y.geometry;
  }

  // Whether each element of the base is in exactly one of the views `parts`.
  bool are_all_parts(ValueId base, const std::vector<ValueId>& parts) const {
    const auto extent = static_cast<size_t>(tape_.values[base].geometry->extent);
    if (parts.empty() || parts.size() > 64 || extent == 0 || extent > kLargestTiled) return false;
    std::vector<uint8_t> seen(extent, 0);
    size_t elements = 0;
    for (const ValueId id : parts) {
      const Geometry& g = *tape_.values[id].geometry;
      std::vector<int64_t> offsets{tape_.values[id].offset};
      for (int64_t d = 0; d < g.dim(); ++d) {
        std::vector<int64_t> next;
        for (const int64_t offset : offsets) {
          for (int64_t i = 0; i < g.sizes[d]; ++i) next.push_back(offset + i * g.strides[d]);
        }
        if (next.size() > extent) return false;
        offsets = std::move(next);
      }
      for (const int64_t offset : offsets) {
        if (std::exchange(seen[static_cast<size_t>(offset)], 1) != 0) return false;
      }
      elements += offsets.size();
    }
    return elements == extent;
  }

  size_t result_number(ValueId id) const {
    return static_cast<size_t>(std::find(subgraph_.results.begin(), subgraph_.results.end(), id) -
                               subgraph_.results.begin());
  }

  struct Use {  // the first step and the last step that use a slab
    uint32_t first = 0, last = 0;
    bool is_result = false;
  };
  // Returns the number of the slab that the value would have without write_in_place(). The slab of
  // the value's gradient has the same number.
  uint32_t own_slab(ValueId base) const { return subgraph_.store.places[base].grad; }
  Use& use_of(ValueId base) { return uses_[own_slab(base)]; }
  bool is_saved(ValueId base) const { return subgraph_.slab_saved[own_slab(base)] != 0; }

  Subgraph& subgraph_;
  const Tape& tape_;
  std::vector<uint8_t> done_;  // for each node: whether it has a step
  std::vector<Use> uses_;      // indexed by slab
};

}  // namespace

void Subgraph::complete() { Completer(*this).run(); }

}  // namespace autobatch
