// Counts the readers of results, for passes that fuse several nodes into one.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/plan/flush_graph.h"

#include <vector>

namespace autobatch {

class ReaderCounts {
 public:
  // Counts reads by nodes of the graph.
  ReaderCounts(Tape& tape, const FlushGraph& graph);

  // Whether only nodes can read the value. A value is private if a node computes the value, if the
  // value is not a view and has no views, and if the user holds no tensor of the value. User code
  // cannot write to a private value, but user code may have written to the value's memory before
  // (Tape::written_at).
  bool is_private(ValueId id) const {
    const Value& value = tape_.values[id];
    return !value.is_graph_input() && value.parent == kNone && value.tensor == nullptr &&
           value.next_view == kNone;
  }

  // Whether the value is private and a single operand reads the results of its node. Operands of
  // nodes that wait for a later flush count too. If a pass gives this reader another operand, the
  // pass may remove the node.
  bool has_single_reader(ValueId id) {
    if (!is_private(id)) return false;
    const uint32_t number = graph_.number(tape_.values[id].node);
    return number != kNone && readers_[number] == 1 && !tape_.is_read(id);
  }

 private:
  Tape& tape_;
  const FlushGraph& graph_;
  std::vector<uint32_t> readers_;  // for each node: number of operands that read its results
};

// Returns the signature with this key for fused nodes, which `rule` runs. The fused nodes replace
// nodes with the signature `plain`. Errors and reports name the op and site of `plain`.
Signature* joined_signature(SignatureTable& signatures, const Key& key, const Signature& plain,
                            const Rule& rule, uint64_t weight_slots, const char* note);

}  // namespace autobatch
