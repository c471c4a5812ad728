#include "autobatch/plan/reader_counts.h"

namespace autobatch {

ReaderCounts::ReaderCounts(Tape& tape, const FlushGraph& graph)
    : tape_(tape), graph_(graph), readers_(graph.size(), 0) {
  for (uint32_t number = 0; number < graph.size(); ++number) {
    for (const uint32_t producer : graph.producers(number)) ++readers_[producer];
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
    signature->position = plain.position;
  }
  return signature;
}

}  // namespace autobatch
