#include "autobatch/signature.h"

#include <atomic>
#include <bit>
#include <cstring>

namespace autobatch {
namespace {

enum Tag : uint64_t {
  kNoneTag = 1,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kIntList,
  kDoubleList,
  kBoolList,
  kList,
  kDevice
};

bool append_list(Key& key, const c10::IValue& value) {
  const auto list = value.toListRef();
  append_list_start(key, list.size());
  for (const c10::IValue& item : list) {
    if (!append_constant(key, item)) return false;
  }
  return true;
}

}  // namespace

void append_none(Key& key) { key.push_back(kNoneTag); }

void append_int(Key& key, int64_t value) {
  key.push_back(kInt);
  key.push_back(static_cast<uint64_t>(value));
}

void append_double(Key& key, double value) {
  key.push_back(kDouble);
  key.push_back(std::bit_cast<uint64_t>(value));
}

void append_bool(Key& key, bool value) {
  key.push_back(kBool);
  key.push_back(value ? 1 : 0);
}

void append_string(Key& key, std::string_view text) {
  key.push_back(kString);
  key.push_back(text.size());
  for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof(word), text.size() - i));
    key.push_back(word);
  }
}

void append_int_list_start(Key& key, size_t size) {
  key.push_back(kIntList);
  key.push_back(size);
}

void append_list_start(Key& key, size_t size) {
  key.push_back(kList);
  key.push_back(size);
}

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
    key.push_back(kComplex);
    key.push_back(std::bit_cast<uint64_t>(value.toComplexDouble().real()));
    key.push_back(std::bit_cast<uint64_t>(value.toComplexDouble().imag()));
  } else if (value.isString()) {
    append_string(key, value.toStringRef());
  } else if (value.isDevice()) {
    key.push_back(kDevice);
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
  // Two chains, since each multiplication waits for the one before it.
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

Signature* SignatureTable::apart(const Signature& signature, uint64_t mark) {
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
