// Autocast in a scope: its own kernels run on pending tensors, and the casts and ops that they call
// are captured as any others, so that native rules serve them. Only the casts of ordinary tensors
// are made at once and kept: one cast of a weight is one weight for all instances, as in autocast's
// own cache, which has those of leaves that require grad alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <utility>

namespace autobatch {

class CastCache {
 public:
  // Undefined if there is none, or the tensor was written to since.
  at::Tensor find(const at::Tensor& tensor, c10::ScalarType to) const;
  void add(const at::Tensor& tensor, c10::ScalarType to, const at::Tensor& cast);
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    at::Tensor tensor;  // held, so that its address stays its own
    uint32_t version;
    bool records;  // whether autograd recorded the cast
    at::Tensor cast;
  };
  struct Key {
    const c10::TensorImpl* tensor;
    c10::ScalarType to;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.tensor) ^ static_cast<size_t>(key.to);
    }
  };
  std::unordered_map<Key, Entry, Hash> entries_;
};

// While one lives on the thread, autocast's kernel of a captured op runs.
class CastingGuard {
 public:
  CastingGuard() { ++depth_; }
  ~CastingGuard() { --depth_; }
  CastingGuard(const CastingGuard&) = delete;
  CastingGuard& operator=(const CastingGuard&) = delete;
  static bool is_casting() { return depth_ > 0; }

 private:
  static thread_local int depth_;
};

}  // namespace autobatch
