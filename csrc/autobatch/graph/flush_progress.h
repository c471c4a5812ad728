// Stores which nodes of a graph have run, and how many operands each waiting node still needs. The
// first read of a block computes this data, and later reads only update it. So the cost of a later
// read depends only on the nodes that the read runs.
//
// Each node is visited twice: after it is captured, and when it runs. Each value has a list of its
// reads (Tape::uses). This list shows which nodes become ready when a node runs, and whether a
// waiting node still reads a result.
#pragma once

#include "autobatch/graph/graph.h"

#include <c10/util/flat_hash_map.h>

#include <vector>

namespace autobatch {

struct Graph::Progress {
  // Waiting nodes of one signature.
  struct Kind {
    std::vector<NodeId> ready;  // nodes whose operands are computed; some nodes may have run
    uint64_t wanted = 0;        // number of the last read that ran nodes of the signature
    uint64_t turn = 0;          // last round of slices in which the signature had its turn
  };

  size_t kept = 0;                // number of computed nodes that the last compaction kept
  NodeId seen = 0;                // nodes with a smaller id have been visited
  std::vector<uint32_t> missing;  // by node: number of operands that are not computed yet
  ska::flat_hash_map<const Signature*, Kind> kinds;
  uint64_t reads = 0;
  uint64_t round = 1;  // number of the current round of slices
  std::vector<NodeId> stack;

  // Graph inputs that the computed nodes have read, possibly with duplicates. Inputs that no node
  // will read again are released. If gradients are recorded, the list is empty, because backward
  // may read the inputs.
  std::vector<ValueId> inputs;
  bool has_gradients = false;
  size_t ran = 0;  // number of nodes that ran since `inputs` was last checked

  void note_input(Graph& graph, NodeId reader, ValueId base);
  void release_inputs(Graph& graph);
};

}  // namespace autobatch
