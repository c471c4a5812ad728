#include "autobatch/uses.h"

namespace autobatch {

Uses::Uses(const Tape& tape, const RunGraph& graph, const std::vector<uint8_t>& live,
           at::ArrayRef<NodeId> waiting)
    : tape_(tape), uses_(tape.nodes.size(), 0) {
  for (uint32_t number = 0; number < graph.size(); ++number) {
    for (const uint32_t producer : graph.producers(number)) ++uses_[graph.id(producer)];
  }
  for (NodeId id : waiting) {
    if (live[id]) continue;
    for (ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand == kNone || tape.values[operand].is_outside()) continue;
      ++uses_[tape.values[operand].node];
    }
  }
}

Signature* joined_signature(SignatureTable& signatures, const Key& key, const Signature& plain,
                            const Rule& rule, uint64_t weight_slots, const char* note) {
  Signature* signature = signatures.find(key);
  if (signature == nullptr) {
    signature = signatures.add(key);
    signature->op = plain.op;
    signature->rule = &rule;
    signature->context = plain.context;
    signature->arguments = plain.arguments;
    signature->weight_slots = weight_slots;
    signature->note = note;
  }
  if (signature->scope != plain.scope) {
    signature->scope = plain.scope;
    signature->site = plain.site;
  }
  return signature;
}

}  // namespace autobatch
