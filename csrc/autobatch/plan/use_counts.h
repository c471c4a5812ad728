// Who reads the results of the nodes that are to be run: for passes that make one node of several.
#pragma once

#include "autobatch/graph/signature.h"
#include "autobatch/plan/flush_graph.h"

#include <vector>

namespace autobatch {

class Uses {
 public:
  // By the graph's nodes, and by those that wait: they are not run now, and may read what is.
  Uses(Tape& tape, const FlushGraph& graph);

  // Whether the value is the one result of a node of the graph as a whole, which has one reader,
  // and nobody holds it, nor a view of it.
  bool is_unseen(ValueId id) {
    const Value& value = tape_.values[id];
    if (value.parent != kNone || value.tensor != nullptr || value.next_view != kNone) return false;
    if (value.is_graph_input()) return false;
    const uint32_t number = graph_.number(value.node);
    return number != kNone && uses_[number] == 1 && !tape_.is_read(id);
  }

 private:
  Tape& tape_;
  const FlushGraph& graph_;
  std::vector<uint32_t> uses_;  // by number: of a node's results
};

// The signature with this key, which holds `rule`: of nodes that run by it in place of ones like
// `plain`. Errors and reports name that one's op and line.
Signature* joined_signature(SignatureTable& signatures, const Key& key, const Signature& plain,
                            const Rule& rule, uint64_t weight_slots, const char* note);

}  // namespace autobatch
