// The order in which the instances of a map use ordinary memory that they share, such as buffers of
// modules.
//
// In a loop, each instance ends before the next one begins. In a map, a later instance runs while
// an earlier one waits for a value. So the later instance may read a buffer before the earlier one
// has written to it. The first map of a function is watched: the uses of ordinary memory are noted.
// If an instance reads memory that a later instance has written, or writes memory that a later
// instance has used, the order is broken, and the results can differ from those of a loop. Then the
// memory that the instances have written becomes *ordered* for as long as it exists. An instance
// that uses ordered memory first waits for the end of all earlier instances, as in a loop.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace autobatch {

class Fiber;
class FiberPool;
class Scope;

// The order of one map. An object of this class exists while the map runs.
class MemoryOrder {
 public:
  // The part of a storage that a strided tensor uses, in elements.
  struct Part {
    int64_t begin, end;
    int64_t step;  // the greatest common divisor of the strides
    bool operator==(const Part&) const = default;
  };

  // `watches`: whether to note the uses of memory.
  AUTOBATCH_INTERNAL MemoryOrder(Scope& scope, const FiberPool& pool, bool watches);
  AUTOBATCH_INTERNAL ~MemoryOrder();
  MemoryOrder(const MemoryOrder&) = delete;
  MemoryOrder& operator=(const MemoryOrder&) = delete;

  bool is_ordered(const c10::Storage& storage) const;
  // Whether each call must look at its arguments, so that calls cannot be repeated from the cache.
  bool looks_at_calls() const { return !stale_.empty(); }
  // Notes the memory that a call reads and writes. Must be called when the running instance does
  // not have to wait for other instances any more.
  void note(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
  // Describes the first use that broke the order, for a warning. Empty if there is none.
  const std::string& broken() const { return broken_; }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // The last instances that used a part; -1: none.
  struct Use {
    Part part;
    int64_t reader = -1, writer = -1;
  };
  struct Uses {
    Weak storage;
    bool is_written = false;
    std::vector<Use> parts;
  };

  void note(const std::string& op, const at::Tensor& tensor, bool writes, int64_t instance);
  void forget_released();
  void order_written();
  void add_ordered(c10::Storage storage);

  Scope& scope_;
  const FiberPool& pool_;
  std::vector<c10::Storage> stale_;  // the ordered memory, and a mark that makes calls be noted
  bool watches_;
  std::unordered_map<const c10::StorageImpl*, Uses> uses_;
  size_t forget_at_ = 4096;  // number of entries
  std::string broken_;
};

// Whether the memory is ordered in a map that runs.
bool is_ordered(Scope& scope, const c10::Storage& storage);

}  // namespace autobatch
