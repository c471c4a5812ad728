#include "autobatch/backward/levels.h"

#include "autobatch/subgraph/subgraph.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <span>
#include <utility>

namespace autobatch {
namespace {

// Marks the divided nodes. A node is divided if eager mode computes one of its results from another
// of its results (Rule::result_dependency), and the user holds this other result. Returns whether a
// node was marked.
bool mark_divided(FlushRecord& record, const std::vector<uint8_t>& held) {
  std::vector<uint8_t> divided;
  for (const BatchRecord& batch : record.batches) {
    const uint32_t from = batch.needs_grad ? batch.rule->result_dependency().from : kNone;
    if (from == kNone) continue;
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      const NodeId node = record.order[i];
      if (!held[record.tape.nodes[node].first_value + from]) continue;
      divided.resize(record.tape.nodes.size(), 0);
      divided[node] = 1;
    }
  }
  record.is_divided = std::move(divided);
  return !record.is_divided.empty();
}

// Marks values with overlapping elements (results of `expand`) that have a view whose elements are
// not known (Tape::knows_elements). Considers only views that a node reads or the user holds.
std::vector<uint8_t> find_blurred(const FlushRecord& record) {
  const Tape& tape = record.tape;
  std::vector<uint8_t> blurred(tape.values.size(), 0);
  const auto mark = [&](ValueId id) {
    if (id == kNone) return;
    for (ValueId of = tape.values[id].parent; of != kNone; of = tape.values[of].parent) {
      if (!tape.values[of].geometry->overlapping) continue;
      if (!tape.knows_elements(id, of)) blurred[of] = 1;
    }
  };
  for (NodeId node : record.order) {
    for (ValueId id : tape.operands_of(tape.nodes[node])) mark(id);
  }
  for (const HeldValue& h : record.held) mark(h.value);
  return blurred;
}

// Returns, for each value, whether it is marked in `held` or is a view of a marked value.
std::vector<uint8_t> find_views(const Tape& tape, const std::vector<HeldValue>& all,
                                const std::vector<uint8_t>& held) {
  std::vector<uint8_t> through = held;
  std::vector<uint8_t> seen(tape.values.size(), 0);  // whether a base was visited
  for (const HeldValue& h : all) {
    const ValueId base = tape.values[h.value].base;
    if (std::exchange(seen[base], 1) != 0) continue;
    for (ValueId view = tape.values[base].next_view; view != kNone;
         view = tape.values[view].next_view) {
      for (ValueId id = view; id != kNone && through[view] == 0; id = tape.values[id].parent) {
        through[view] = held[id];
      }
    }
  }
  return through;
}

// Finds the first node, in order of capture, that runs and has an operand for which `reads` is
// true. Returns the node's first result, or kNone if there is no such node.
template <class Reads>
ValueId find_first_reader(const FlushRecord& record, const Reads& reads) {
  const Tape& tape = record.tape;
  if (std::none_of(tape.operands.begin(), tape.operands.end(), reads)) return kNone;
  std::vector<uint8_t> runs(tape.nodes.size(), 0);
  for (NodeId node : record.order) runs[node] = 1;
  for (NodeId node = 0; node < runs.size(); ++node) {
    const auto operands = tape.operands_of(tape.nodes[node]);
    if (runs[node] && std::any_of(operands.begin(), operands.end(), reads)) {
      return tape.nodes[node].first_value;
    }
  }
  return kNone;
}

// Marks the held values (FlushRecord::is_held) and the divided nodes. Returns nullopt if no node is
// divided and if neither a node nor a held view reads a held value. Otherwise returns the first
// result that may be computed from a held value, or kNone.
std::optional<ValueId> mark_held(FlushRecord& record) {
  std::vector<uint8_t> held(record.tape.values.size(), 0);
  std::vector<uint8_t> blurred;
  for (const HeldValue& h : record.held) {
    held[h.value] = 1;
    if (!record.tape.values[h.value].geometry->overlapping) continue;
    if (blurred.empty()) blurred = find_blurred(record);
    held[h.value] = !blurred[h.value];
  }
  const std::vector<uint8_t> through = find_views(record.tape, record.held, held);
  const auto reads = [&](ValueId id) { return id != kNone && through[id] != 0; };
  const ValueId first = mark_divided(record, held) ? 0 : find_first_reader(record, reads);
  const bool any = first != kNone || std::any_of(record.held.begin(), record.held.end(),
                                                 [&](const HeldValue& h) {  // view of a held value
                                                   return reads(record.tape.values[h.value].parent);
                                                 });
  if (!any) return std::nullopt;
  record.is_held = std::move(held);
  return first;
}

// For a divided node, returns the result that is computed from the held result. Returns kNone for
// other nodes. The function chain_source returns the held result.
ValueId chained_result(const FlushRecord& record, NodeId id) {
  const Node& node = record.tape.nodes[id];
  return record.divided(id) ? node.first_value + node.signature->rule->result_dependency().result
                            : kNone;
}

ValueId chain_source(const FlushRecord& record, NodeId id) {
  const Node& node = record.tape.nodes[id];
  return record.divided(id) ? node.first_value + node.signature->rule->result_dependency().from
                            : kNone;
}

// Returns the level of nodes that read this value. This level is the level of the value's base plus
// the number of held values on the chain of views from the base to the value, both included.
uint32_t level_above(const FlushRecord& record, ValueId id) {
  uint32_t held = record.is_held[id];
  while (record.tape.values[id].parent != kNone) {
    id = record.tape.values[id].parent;
    held += record.is_held[id];
  }
  return record.value_level[id] + held;
}

// Assigns a level to each result and to each held value. The level is the number of held values on
// the longest path to the result or held value.
void assign_levels(FlushRecord& record, ValueId first) {
  const Tape& tape = record.tape;
  std::vector<uint32_t>& level = record.value_level;
  level.assign(tape.values.size(), 0);
  // Values are numbered in order of capture, so operands are visited before results.
  for (ValueId id = first; id < tape.values.size(); ++id) {
    const Value& value = tape.values[id];
    if (value.parent != kNone || value.is_graph_input()) continue;
    for (ValueId operand : tape.operands_of(tape.nodes[value.node])) {
      if (operand != kNone && tape.values[operand].requires_grad) {
        level[id] = std::max(level[id], level_above(record, operand));
      }
    }
    if (id == chained_result(record, value.node)) ++level[id];
  }
  for (HeldValue& h : record.held) {
    const ValueId parent = tape.values[h.value].parent;
    h.level = parent == kNone ? level[h.value] : level_above(record, parent);
  }
}

// Returns the level at which a node's operands get their gradients.
uint32_t node_level(const FlushRecord& record, NodeId node) {
  if (record.value_level.empty()) return 0;
  const ValueId from = chain_source(record, node);
  return record.value_level[from != kNone ? from : record.tape.nodes[node].first_value];
}

bool is_at_the_bottom(const FlushRecord& record, NodeId node) {
  return node_level(record, node) == 0 && !record.divided(node);
}

// If the gradient of `id` flows through a held value, adds an export from `level` to this held
// value (FlushRecord::exports).
void note_export(FlushRecord& record, uint32_t level, ValueId id) {
  const ValueId cut = id == kNone ? kNone : record.cut(id);
  if (cut == kNone) return;
  std::vector<LevelExport>& exports = record.exports;
  const uint64_t key = export_key(level, cut);
  if (!record.export_index.emplace(key, static_cast<uint32_t>(exports.size())).second) return;
  const auto held = std::find_if(record.held.begin(), record.held.end(),
                                 [&](const HeldValue& h) { return h.value == cut; });
  const Tape& tape = record.tape;
  const Value& value = tape.values[cut];
  LevelExport e{cut, static_cast<uint32_t>(held - record.held.begin()), value.geometry,
                value.offset, tape.values[value.base].geometry->extent};
  if (value.geometry->overlapping) {
    const ElementMap map = record.element_map(cut, cut);
    e.geometry = map.geometry;
    e.offset = map.offset;
    e.length = tape.values[map.of].geometry->numel;
  }
  exports.push_back(e);
}

void plan_single_level(FlushRecord& record) {
  Level& level = record.levels.emplace_back();
  record.level_order = record.order;
  for (uint32_t b = 0; b < record.batches.size(); ++b) {
    level.parts.push_back({b, record.batches[b].first, record.batches[b].count});
  }
}

// Returns, for each weight of a node, the held view through which the weight's gradient flows. The
// entry is kNone if the gradient flows to the weight directly.
std::vector<ValueId> cuts_of_weights(const FlushRecord& record, const Node& node) {
  std::vector<ValueId> cuts;
  for (size_t slot = 0; node.signature->weight_slots >> slot != 0; ++slot) {
    if ((node.signature->weight_slots >> slot & 1) == 0) continue;
    const ValueId id = record.tape.operands[node.first_operand + slot];
    cuts.push_back(id == kNone ? kNone : record.cut(id));
  }
  return cuts;
}

Level& level_of(FlushRecord& record, uint32_t level) {
  if (record.levels.size() <= level) record.levels.resize(level + 1);
  return record.levels[level];
}

// Divides the members of a batch among the levels. Members that share a weight are in different
// parts if their gradients of the weight flow to different destinations.
void plan_batch(FlushRecord& record, uint32_t b) {
  using Half = Level::Half;
  const BatchRecord& batch = record.batches[b];
  const auto all = std::span(record.order).subspan(batch.first, batch.count);
  const auto at_the_bottom = [&](NodeId node) { return is_at_the_bottom(record, node); };
  // If all members are at the bottom, no gradient of the batch flows through a held value.
  if (std::all_of(all.begin(), all.end(), at_the_bottom)) {
    const auto first = static_cast<uint32_t>(record.level_order.size());
    record.level_order.insert(record.level_order.end(), all.begin(), all.end());
    level_of(record, 0).parts.push_back({b, first, batch.count});
    return;
  }
  std::map<std::tuple<uint32_t, Half, std::vector<ValueId>>, std::vector<NodeId>> members;
  for (NodeId node : all) {
    const uint32_t level = node_level(record, node);
    const ValueId chained = chained_result(record, node);
    const std::vector<ValueId> cuts = cuts_of_weights(record, record.tape.nodes[node]);
    members[{level, chained == kNone ? Half::kWhole : Half::kRest, cuts}].push_back(node);
    if (chained != kNone) {
      members[{record.value_level[chained], Half::kChain, cuts}].push_back(node);
      note_export(record, record.value_level[chained], chain_source(record, node));
    }
    for (ValueId id : record.tape.operands_of(record.tape.nodes[node])) {
      if (id != kNone && record.tape.values[id].requires_grad) note_export(record, level, id);
    }
  }
  for (const auto& [where, nodes] : members) {
    const auto first = static_cast<uint32_t>(record.level_order.size());
    record.level_order.insert(record.level_order.end(), nodes.begin(), nodes.end());
    level_of(record, std::get<0>(where))
        .parts.push_back({b, first, static_cast<uint32_t>(nodes.size()), std::get<1>(where)});
  }
}

// Stores, for each result of a node of the lowest level, the graph inputs that the result depends
// on and that require grad. (Nodes of the lowest level do not read values that depend on held
// values.) Used only if fewer than 256 graph inputs require grad.
class ReachSets {
  static constexpr size_t kMostWords = 4;

 public:
  explicit ReachSets(const FlushRecord& record) : tape_(record.tape) {
    const auto wants = [&](const GraphInput& o) { return tape_.values[o.value].requires_grad; };
    const auto& all = tape_.graph_inputs;
    words_ = static_cast<size_t>(std::count_if(all.begin(), all.end(), wants)) / 64 + 1;
    fits_ = words_ <= kMostWords;
    if (!fits_) return;
    bit_.assign(all.size(), kNone);
    sets_.assign(tape_.values.size() * words_, 0);
    std::vector<uint8_t> ran(tape_.nodes.size(), 0);
    for (const NodeId node : record.order) ran[node] = 1;
    // Nodes are visited in order of capture, so that the sets of their operands are complete.
    for (NodeId node = 0; node < ran.size() && fits_; ++node) {
      if (ran[node] && node_level(record, node) == 0) add(tape_.nodes[node]);
    }
  }

  explicit operator bool() const { return fits_; }

  using Set = std::array<uint64_t, kMostWords>;
  void add_to(Set& set, ValueId result) const {
    for (size_t w = 0; w < words_; ++w) set[w] |= sets_[tape_.values[result].base * words_ + w];
  }

  void append(const Set& set, std::vector<uint32_t>& graph_input) const {
    for (size_t w = 0; w < words_; ++w) {
      for (uint64_t left = set[w]; left != 0; left &= left - 1) {
        graph_input.push_back(graph_input_[w * 64 + static_cast<size_t>(std::countr_zero(left))]);
      }
    }
  }

 private:
  // All results of one op depend on the same operands. Results of a subgraph may depend on
  // different operands.
  void add(const Node& node) {
    if (const Subgraph* subgraph = node.signature->rule->subgraph()) {
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const auto& depends = subgraph->depends[k];
        collect(node, node.first_value + k, [&](size_t slot) { return depends >> slot & 1; });
      }
    } else if (node.num_values != 0) {
      collect(node, node.first_value, [](size_t) { return true; });
      for (uint32_t k = 1; k < node.num_values; ++k) {
        std::copy_n(&sets_[node.first_value * words_], words_,
                    &sets_[(node.first_value + k) * words_]);
      }
    }
  }

  // Adds graph inputs to the set of the result `to`. These are the graph inputs that `to` depends
  // on through the operands for which `reads` returns true.
  template <class Reads>
  void collect(const Node& node, ValueId to, const Reads& reads) {
    const auto operands = tape_.operands_of(node);
    uint64_t* set = &sets_[to * words_];
    for (size_t slot = 0; slot < operands.size(); ++slot) {
      if (operands[slot] == kNone || !reads(slot)) continue;
      const Value& value = tape_.values[operands[slot]];
      if (!value.requires_grad) continue;
      if (value.is_graph_input()) {
        add_graph_input(set, value.index);
      } else {
        const uint64_t* from = &sets_[value.base * words_];
        for (size_t w = 0; w < words_; ++w) set[w] |= from[w];
      }
    }
  }

  void add_graph_input(uint64_t* set, uint32_t index) {
    uint32_t& bit = bit_[index];
    if (bit == kNone) {
      bit = static_cast<uint32_t>(graph_input_.size());
      graph_input_.push_back(index);
    }
    fits_ = fits_ && bit < words_ * 64;
    if (fits_) set[bit / 64] |= uint64_t{1} << (bit % 64);
  }

  const Tape& tape_;
  bool fits_ = false;
  std::vector<uint32_t> bit_;          // for each graph input: its bit in a set
  std::vector<uint32_t> graph_input_;  // for each bit: the index of the graph input
  size_t words_ = 0;                   // number of 64-bit words of a set
  std::vector<uint64_t> sets_;         // for each value: the `words_` words of its set
};

// Finds the destinations of a held value's gradient at each level.
class ReachFinder {
 public:
  explicit ReachFinder(const FlushRecord& record)
      : record_(record),
        sets_(record),
        graph_input_seen_(record.tape.graph_inputs.size(), 0),
        export_seen_(record.exports.size(), 0) {}

  // Returns the reach at the level of `held` and at each other level that has destinations.
  std::map<uint32_t, Reach> find(const HeldValue& held) {
    ++round_;
    below_ = {};
    std::map<uint32_t, Reach> reach;
    reach[held.level];
    const Value& value = record_.tape.values[held.value];
    if (value.parent != kNone) {
      read(value.parent, held.level, reach);
    } else {
      visit_producer(held.value, reach);
    }
    while (!stack_.empty()) {
      const ValueId result = stack_.back();
      stack_.pop_back();
      const Value& value = record_.tape.values[result];
      const uint32_t level = node_level(record_, value.node);
      const Node& node = record_.tape.nodes[value.node];
      const auto operands = record_.tape.operands_of(node);
      for (size_t slot = 0; slot < operands.size(); ++slot) {
        const ValueId id = operands[slot];
        if (id == kNone || !record_.tape.values[id].requires_grad) continue;
        if (node.signature->rule->depends(value.index, slot)) read(id, level, reach);
      }
    }
    if (below_ != ReachSets::Set{}) sets_.append(below_, reach[0].graph_inputs);
    return reach;
  }

 private:
  // Visits the node that computes `id`. `id` is a base and the result of a node. (A held value is a
  // result or a view, but never a graph input itself.)
  void visit_producer(ValueId id, std::map<uint32_t, Reach>& reach) {
    const NodeId node = record_.tape.values[id].node;
    if (sets_ && node_level(record_, node) == 0) {
      sets_.add_to(below_, id);
    } else if (is_new(record_.tape.nodes[node], id)) {
      stack_.push_back(id);
    }
    if (id == chained_result(record_, node)) {
      add_export(chain_source(record_, node), record_.value_level[id], reach);
    }
  }

  // Whether the walk reaches the result for the first time. All results of one op depend on the
  // same operands and share a mark. Results of a subgraph may depend on different operands.
  bool is_new(const Node& node, ValueId id) {
    const bool divided = node.num_values > 1 && node.signature->rule->subgraph() != nullptr;
    if (value_seen_.empty()) value_seen_.resize(record_.tape.values.size(), 0);
    return std::exchange(value_seen_[divided ? id : node.first_value], round_) != round_;
  }

  void add_export(ValueId cut, uint32_t level, std::map<uint32_t, Reach>& reach) {
    const uint32_t e = record_.export_index.at(export_key(level, cut));
    if (std::exchange(export_seen_[e], round_) != round_) reach[level].exports.push_back(e);
  }

  // Follows the gradient of the value `id`, which a node of `level` reads. A graph input or a held
  // value that is read at several levels gets an edge from each of these levels.
  void read(ValueId id, uint32_t level, std::map<uint32_t, Reach>& reach) {
    const ValueId cut = record_.cut(id);
    const Value& base = record_.tape.values[record_.tape.values[id].base];
    if (cut != kNone) {
      add_export(cut, level, reach);
    } else if (!base.is_graph_input()) {
      visit_producer(record_.tape.values[id].base, reach);
    } else {
      // The walk visits levels in no fixed order, so the mark of a graph input contains the level.
      // The mark of another level may have replaced the mark of this level, so the list is searched
      // too.
      const uint64_t mark = round_ << 16 | level;
      if (std::exchange(graph_input_seen_[base.index], mark) != mark) {
        std::vector<uint32_t>& graph_inputs = reach[level].graph_inputs;
        if (std::find(graph_inputs.begin(), graph_inputs.end(), base.index) == graph_inputs.end() ||
            record_.levels.size() == 1) {
          graph_inputs.push_back(base.index);
        }
      }
    }
  }

  const FlushRecord& record_;
  const ReachSets sets_;
  ReachSets::Set below_{};  // the graph inputs to which the lowest level passes gradients
  uint64_t round_ = 0;
  std::vector<uint64_t> value_seen_, graph_input_seen_, export_seen_;
  std::vector<ValueId> stack_;  // the results that remain to be visited
};

}  // namespace

void plan_levels(FlushRecord& record) {
  const std::optional<ValueId> first = mark_held(record);
  if (!first) return plan_single_level(record);
  assign_levels(record, *first);
  // Plans the batches in the order of the schedule, so that the parts of each level have this
  // order.
  for (uint32_t b = 0; b < record.batches.size(); ++b) plan_batch(record, b);
  for (const HeldValue& h : record.held) {
    level_of(record, h.level);  // a held view may have a higher level than all nodes
    note_export(record, h.level, record.tape.values[h.value].parent);
  }
}

std::vector<std::map<uint32_t, Reach>> find_reach(const FlushRecord& record) {
  std::vector<std::map<uint32_t, Reach>> reach;
  ReachFinder finder(record);
  for (const HeldValue& held : record.held) reach.push_back(finder.find(held));
  return reach;
}

}  // namespace autobatch
