#include "autobatch/plan/chain_depth.h"

#include "autobatch/graph/pending_tensor.h"

#include <algorithm>
#include <unordered_map>

namespace autobatch {
namespace {

// Depths of the tensors that became real in flushes of this thread's current block. The memory of a
// freed tensor object is reused for pending tensors only (FromFreeList), so a stale entry is never
// found for an unrelated tensor.
thread_local std::unordered_map<const c10::TensorImpl*, uint32_t> known_depths;
constexpr size_t kMostKnown = 1 << 16;

uint32_t depth_of(const at::Tensor& tensor) {
  const auto found = known_depths.find(tensor.unsafeGetTensorImpl());
  return found == known_depths.end() ? 0 : found->second;
}

}  // namespace

void note_depth(FlushRecord& record, const FlushGraph& graph, Report& report) {
  if (report.num_flushes == 0) known_depths.clear();  // drops the entries of an earlier block
  const Tape& tape = record.tape;
  std::vector<uint32_t>& depths = record.depths;
  depths.resize(tape.nodes.size(), 0);
  for (uint32_t number = 0; number < graph.size(); ++number) {  // in capture order
    const NodeId id = graph.id(number);
    uint32_t depth = 0;
    for (const ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand == kNone) continue;
      const Value& value = tape.values[operand];
      if (!value.is_graph_input()) {
        depth = std::max(depth, depths[value.node]);
      } else if (!known_depths.empty()) {
        depth = std::max(depth, depth_of(tape.graph_inputs[value.index].tensor));
      }
    }
    depths[id] = ++depth;
    report.depth = std::max<uint64_t>(report.depth, depth);
  }
}

void keep_depths(const FlushRecord& record, const Report& report) {
  if (!report.is_open || known_depths.size() > kMostKnown) return;
  for (const Value& value : record.tape.values) {
    if (value.tensor == nullptr || value.is_graph_input()) continue;
    if (value.node < record.depths.size()) known_depths[value.tensor] = record.depths[value.node];
  }
}

}  // namespace autobatch
