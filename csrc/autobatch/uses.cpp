#include "autobatch/uses.h"

namespace autobatch {

Uses::Uses(const Tape& tape, const RunGraph& graph, const std::vector<uint8_t>& live,
           at::ArrayRef<NodeId> waiting)
    : tape_(tape), graph_(graph), uses_(graph.size(), 0) {
  for (uint32_t number = 0; number < graph.size(); ++number) {
    for (const uint32_t producer : graph.producers(number)) ++uses_[producer];
  }
  for (NodeId id : waiting) {
    if (live[id]) continue;
    for (ValueId operand : tape.operands_of(tape.nodes[id])) {
      if (operand == kNone || tape.values[operand].is_outside()) continue;
      const uint32_t producer = graph.number(tape.values[operand].node);
      if (producer != kNone) ++uses_[producer];
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
