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
