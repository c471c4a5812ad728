#include "autobatch/plan/chain_depth.h"

#include "autobatch/graph/pending_tensor.h"

#include <algorithm>
#include <vector>

namespace autobatch {
namespace {

// Which graph inputs are results of captured ops that a flush has made real.
class FormerResults {
 public:
  explicit FormerResults(const Tape& tape) : tape_(tape), known_(tape.graph_inputs.size()) {}

  bool has(const Value& value) {
    Known& known = known_[value.index];
    if (known == Known::kNot) {
      const c10::TensorImpl* tensor = tape_.graph_inputs[value.index].tensor.unsafeGetTensorImpl();
      known = dynamic_cast<const PendingTensor*>(tensor) != nullptr ? Known::kYes : Known::kNo;
    }
    return known == Known::kYes;
  }

 private:
  enum class Known : uint8_t { kNot, kNo, kYes };
  const Tape& tape_;
  std::vector<Known> known_;
};

}  // namespace

void note_depth(FlushRecord& record, const FlushGraph& graph, Report& report) {
  const Tape& tape = record.tape;
  std::vector<uint32_t>& depths = record.depths;
  depths.resize(tape.nodes.size(), 0);
  // Of what has left its record nobody knows how deep it was: as deep as the flush before.
  const auto before = static_cast<uint32_t>(report.num_flushes > 0 ? report.last_depth : 0);
  FormerResults former(tape);
  uint32_t deepest = 0;
  for (uint32_t number = 0; number < graph.size(); ++number) {  // in the order of capture
    const NodeId id = graph.id(number);
    uint32_t depth = 0;
    for (const ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand == kNone) continue;
      const Value& value = tape.values[operand];
      if (!value.is_graph_input()) {
        depth = std::max(depth, depths[value.node]);
      } else if (before > depth && former.has(value)) {
        depth = before;
      }
    }
    depths[id] = depth + 1;
    deepest = std::max(deepest, depth + 1);
  }
  report.last_depth = deepest;
  report.depth = std::max<uint64_t>(report.depth, deepest);
}

}  // namespace autobatch
