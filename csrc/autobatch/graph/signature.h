// Signatures: what makes two nodes batchable, interned to one object. A signature is compared in
// full, word by word, whenever hashes agree (DyNet compares hashes only).
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/dispatch_context.h"
#include "autobatch/graph/graph.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace autobatch {

struct OpInfo;
class Rule;

// One result of an op, as inferred for a signature.
struct ResultMeta {
  const Geometry* geometry = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool requires_grad = false;
};

// Where a tensor operand stands in the op's arguments; `element` is kNone unless in a list.
struct Slot {
  uint32_t argument = 0;
  uint32_t element = kNone;
};

using Key = c10::SmallVector<uint64_t, 32>;

struct Signature {
  std::vector<uint64_t> key;
  const OpInfo* op = nullptr;
  const Rule* rule = nullptr;  // how its batches run; a generic one may fall back to a loop
  std::shared_ptr<const Rule> own_rule;  // that, where it is this signature's alone
  DispatchContext context;
  std::vector<c10::IValue> arguments;  // of the first node; tensors replaced by None
  std::vector<Slot> slots;             // of the operands
  uint64_t weight_slots = 0;           // bit s: all have one weight for operand s
  uint32_t variadic = kNone;           // the list argument whose length is left out, if any
  std::vector<ResultMeta> results;     // inferred once (generic rules only)
  bool returns_list = false;           // the op's one return is a Tensor[] of all its results
  std::string site;                    // the user's line that first captured it in a scope
  uint64_t position = 0;               // likewise, what of the line
  uint64_t scope = 0;                  // that scope's id
  std::string note;                    // why it runs as it does, for the report
  std::unordered_map<uint64_t, uint64_t> saved;  // what eager saves (saved_tensor_check.cpp)
  Signature* next = nullptr;                     // in the table, of the same hash
  uint64_t serial = 0;                           // of this process; never reused
  uint32_t local = kNone;                        // dense number within the flush in progress
};

class SignatureTable {
 public:
  // The signature with this key, or null.
  Signature* find(const Key& key) const;
  Signature* add(const Key& key);
  // The same as `signature`, that batches with what has this `mark` too and with nothing else.
  Signature* apart(const Signature& signature, uint64_t mark);
  size_t size() const { return entries_.size(); }

 private:
  std::deque<Signature> entries_;                   // addresses stay valid
  ska::flat_hash_map<uint64_t, Signature*> index_;  // by hash; the first of a chain
};

uint64_t hash_key(const Key& key);

// Words for one argument, each kind with a mark of its own. `Words` is a Key, or what takes words
// as one does.
enum WordMark : uint64_t {
  kNoneWord = 1,
  kIntWord,
  kDoubleWord,
  kBoolWord,
  kComplexWord,
  kStringWord,
  kIntListWord,
  kDoubleListWord,
  kBoolListWord,
  kListWord,
  kDeviceWord
};

template <class Words>
void append_none(Words& key) {
  key.push_back(kNoneWord);
}

template <class Words>
void append_int(Words& key, int64_t value) {
  key.push_back(kIntWord);
  key.push_back(static_cast<uint64_t>(value));
}

template <class Words>
void append_double(Words& key, double value) {
  key.push_back(kDoubleWord);
  key.push_back(std::bit_cast<uint64_t>(value));
}

template <class Words>
void append_bool(Words& key, bool value) {
  key.push_back(kBoolWord);
  key.push_back(value ? 1 : 0);
}

template <class Words>
void append_string(Words& key, std::string_view text) {
  key.push_back(kStringWord);
  key.push_back(text.size());
  for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof(word), text.size() - i));
    key.push_back(word);
  }
}

// The items follow, a word each.
template <class Words>
void append_int_list_start(Words& key, size_t size) {
  key.push_back(kIntListWord);
  key.push_back(size);
}

// The items follow, each with its words.
template <class Words>
void append_list_start(Words& key, size_t size) {
  key.push_back(kListWord);
  key.push_back(size);
}

// Appends the argument's whole content to the key, so that equal keys mean equal arguments.
// Returns false for what has no comparable content (a Generator, an object): not batchable.
bool append_constant(Key& key, const c10::IValue& value);

}  // namespace autobatch
