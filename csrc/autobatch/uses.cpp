#include "autobatch/uses.h"

namespace autobatch {

Uses::Uses(const Tape& tape, const std::vector<uint8_t>& live, at::ArrayRef<NodeId> waiting)
    : tape_(tape), uses_(tape.values.size(), 0) {
  const auto count = [&](NodeId id) {
    for (ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand != kNone) ++uses_[operand];
    }
  };
  for (NodeId id = 0; id < tape.nodes.size(); ++id) {
    if (live[id]) count(id);
  }
  for (NodeId id : waiting) {
    if (!live[id]) count(id);
  }
}

}  // namespace autobatch
