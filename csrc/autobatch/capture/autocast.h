// Implements autocast in a scope. Autocast's own kernels run on pending tensors. The casts and ops
// that these kernels call are captured like other ops, so that native rules can batch them. Only
// casts of ordinary tensors run eagerly. The results of these casts are cached, so that all
// instances share one cast of a weight. (Autocast's own cache holds only casts of leaves that
// require grad.)
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace autobatch {

class CastCache {
 public:
  // Returns the cached cast of `tensor` to the dtype `to`. Returns an undefined tensor if there is
  // no cached cast, or if the tensor was written to after the cast. Also returns an undefined
  // tensor if autograd recorded the cached cast but would not record a new cast, or the reverse.
  at::Tensor find(const at::Tensor& tensor, c10::ScalarType to) const;
  void add(const at::Tensor& tensor, c10::ScalarType to, const at::Tensor& cast);
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    at::Tensor tensor;  // kept alive, so that its address is not reused
    uint32_t version;
    bool needs_grad;  // whether autograd recorded the cast
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

// While a guard exists, this thread runs the autocast kernel of a captured op.
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
