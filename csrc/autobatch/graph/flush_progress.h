// What of a graph was run and what waits for what: kept from the first read of a block on, so that
// a read takes time for what it runs, and not for what else is pending.
//
// Each node is looked at once when it was captured, and once when it is run. A list of reads hangs
// on each value (Tape::uses): so it is known which nodes become ready when one is run, and whether
// anything that waits still reads a result.
#pragma once

#include "autobatch/graph/graph.h"

#include <c10/util/flat_hash_map.h>

#include <vector>

namespace autobatch {

struct Graph::Progress {
  // What waits of one signature.
  struct Kind {
    std::vector<NodeId> ready;  // waits for nothing; some may have been run since, or are gone
    uint64_t wanted = 0;        // the read that last ran nodes of it
    uint64_t turn = 0;          // the round of slices in which it last had its turn
  };

  size_t kept = 0;                // computed nodes that were left when the tape was last compacted
  NodeId seen = 0;                // nodes before this one have been looked at
  std::vector<uint32_t> missing;  // by node: operands whose producers are to be run
  ska::flat_hash_map<const Signature*, Kind> kinds;
  uint64_t reads = 0;
  uint64_t round = 1;  // of slices
  std::vector<NodeId> stack;

  // Graph inputs that were read by what was run, some perhaps more than once; of an open record
  // without gradients, which needs none of them any more.
  std::vector<ValueId> inputs;
  bool has_gradients = false;
  size_t ran = 0;  // since they were looked through

  void note_input(Graph& graph, NodeId reader, ValueId base);
  void release_inputs(Graph& graph);
};

}  // namespace autobatch
