#include "autobatch/graph/signature.h"

#include <atomic>
#include <bit>

namespace autobatch {
namespace {

bool append_list(Key& key, const c10::IValue& value) {
  const auto list = value.toListRef();
  append_list_start(key, list.size());
  for (const c10::IValue& item : list) {
    if (!append_constant(key, item)) return false;
  }
  return true;
}

}  // namespace

bool append_constant(Key& key, const c10::IValue& value) {
  if (value.isNone()) {
    append_none(key);
  } else if (value.isInt()) {  // dtypes, layouts and memory formats are ints too
    append_int(key, value.toInt());
  } else if (value.isDouble()) {
    append_double(key, value.toDouble());
  } else if (value.isBool()) {
    append_bool(key, value.toBool());
  } else if (value.isComplexDouble()) {
    key.push_back(kComplexWord);
    key.push_back(std::bit_cast<uint64_t>(value.toComplexDouble().real()));
    key.push_back(std::bit_cast<uint64_t>(value.toComplexDouble().imag()));
  } else if (value.isString()) {
    append_string(key, value.toStringRef());
  } else if (value.isDevice()) {
    key.push_back(kDeviceWord);
    key.push_back(static_cast<uint64_t>(value.toDevice().type()));
    key.push_back(static_cast<uint64_t>(value.toDevice().index()));
  } else if (value.isIntList()) {
    const auto list = value.toIntVector();
    append_int_list_start(key, list.size());
    for (int64_t item : list) key.push_back(static_cast<uint64_t>(item));
  } else if (value.isList()) {
    return append_list(key, value);
  } else {
    return false;
  }
  return true;
}

uint64_t hash_key(const Key& key) {
  const auto mix = [](uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 29;
  };
  // The hash uses two chains, because each multiplication waits for the previous one in its chain.
  uint64_t even = key.size(), odd = 0;
  size_t i = 0;
  for (; i + 1 < key.size(); i += 2) {
    even = mix(even, key[i]);
    odd = mix(odd, key[i + 1]);
  }
  if (i < key.size()) even = mix(even, key[i]);
  return mix(even, odd);
}

Signature* SignatureTable::find(const Key& key) const {
  const auto found = index_.find(hash_key(key));
  if (found == index_.end()) return nullptr;
  for (Signature* s = found->second; s != nullptr; s = s->next) {
    if (s->key.size() == key.size() && std::equal(key.begin(), key.end(), s->key.begin())) return s;
  }
  return nullptr;
}

Signature* SignatureTable::add(const Key& key) {
  static std::atomic<uint64_t> next_serial{0};
  Signature& signature = entries_.emplace_back();
  signature.serial = next_serial++;
  signature.key.assign(key.begin(), key.end());
  Signature*& first = index_[hash_key(key)];
  signature.next = first;
  first = &signature;
  return &signature;
}

Signature* SignatureTable::marked_copy(const Signature& signature, uint64_t mark) {
  Key key;
  for (const uint64_t word : signature.key) key.push_back(word);
  key.push_back(mark);
  if (Signature* known = find(key)) return known;
  Signature* made = add(key);
  Signature copy = signature;
  copy.key = std::move(made->key);
  copy.next = made->next;
  copy.serial = made->serial;
  copy.local = kNone;
  return &(*made = std::move(copy));
}

}  // namespace autobatch
