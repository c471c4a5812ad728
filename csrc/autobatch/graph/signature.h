// A signature is the key that decides which nodes can be batched. Each signature is interned as one
// object. If two hashes are equal, the signatures are compared in full, word by word. (DyNet
// compares hashes only.)
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

// The metadata of one result of an op, as inferred for a signature.
struct ResultMeta {
  const Geometry* geometry = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool requires_grad = false;
};

// Position of a tensor operand in the op's arguments. `element` is the index in a list argument, or
// kNone if the argument is not a list.
struct Slot {
  uint32_t argument = 0;
  uint32_t element = kNone;
};

using Key = c10::SmallVector<uint64_t, 32>;

struct Signature {
  std::vector<uint64_t> key;
  const OpInfo* op = nullptr;
  const Rule* rule = nullptr;            // rule of the batches; a generic rule may run a loop
  std::shared_ptr<const Rule> own_rule;  // owner of `rule` if only this signature uses it
  DispatchContext context;
  std::vector<c10::IValue> arguments;  // arguments of the first node; None replaces tensors
  std::vector<Slot> slots;             // one slot per operand
  uint64_t weight_slots = 0;           // bit s: operand s is a weight, the same for all nodes
  uint32_t variadic = kNone;           // list argument whose length is not in the key, if any
  std::vector<ResultMeta> results;     // inferred once (generic rules only)
  bool returns_list = false;           // the op has one return, a Tensor[] of all its results
  std::string site;                    // first line of user code that captured the op in `scope`
  uint64_t position = 0;               // position within that line (Place::position)
  uint64_t scope = 0;                  // id of the last scope that captured the signature
  std::string note;                    // for the report: why no better rule runs the batches
  // Maps each set of operands that require grad to the operands and results that eager saves
  // (saved_tensor_check.cpp).
  std::unordered_map<uint64_t, uint64_t> saved;
  Signature* next = nullptr;  // next entry of the table with the same hash
  uint64_t serial = 0;        // unique in this process; never reused
  uint32_t local = kNone;     // dense number within the flush in progress
};

class SignatureTable {
 public:
  // Returns the signature with this key, or null.
  Signature* find(const Key& key) const;
  Signature* add(const Key& key);
  // Returns a copy of `signature` for `mark`. Nodes with the copy are not batched with nodes of
  // `signature` or of a copy for another mark.
  Signature* marked_copy(const Signature& signature, uint64_t mark);
  size_t size() const { return entries_.size(); }

 private:
  std::deque<Signature> entries_;                   // a deque, so addresses stay valid
  ska::flat_hash_map<uint64_t, Signature*> index_;  // key: hash; value: head of a linked list
};

uint64_t hash_key(const Key& key);

// An argument becomes a sequence of words that begins with a mark of its type. The functions below
// append an argument to a Key, or to another class `Words` with the same push_back.
enum WordMark : uint64_t {
  kNoneWord = 1,
  kIntWord,
  kDoubleWord,
  kBoolWord,
  kComplexWord,
  kStringWord,
  kIntListWord,
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

// Appends the start of a list of integers. The caller must then append the items, one word per
// item.
template <class Words>
void append_int_list_start(Words& key, size_t size) {
  key.push_back(kIntListWord);
  key.push_back(size);
}

// Appends the start of a list. The caller must then append the items. Each item has the words of an
// argument.
template <class Words>
void append_list_start(Words& key, size_t size) {
  key.push_back(kListWord);
  key.push_back(size);
}

// Appends the argument's whole content to the key, so that equal keys mean equal arguments. Returns
// false for a value without comparable content, such as a Generator. A call with such a value
// cannot be batched.
bool append_constant(Key& key, const c10::IValue& value);

}  // namespace autobatch
