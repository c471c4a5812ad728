// Checks the order in which the instances of a map use ordinary memory that they share, such as
// buffers of modules.
//
// In a loop, each instance ends before the next one begins. In a map, a later instance runs while
// an earlier one waits for a value. So the later instance may read a buffer before the earlier one
// has written to it. The first map of a function is watched: the uses of ordinary memory are
// recorded. The order is broken if an instance reads memory that a later instance has written, or
// writes memory that a later instance has used. Then the results can differ from the results of a
// loop. In this case, the memory that the instances have written becomes *ordered* until it is
// freed. An instance that uses ordered memory first waits for the end of all earlier instances, as
// in a loop.
#pragma once

#include "autobatch/export.h"
#include "autobatch/graph/op_registry.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace autobatch {

class FiberPool;
class Scope;

// Checks the order of one map. An object of this class exists while the map runs.
class MemoryOrder {
 public:
  // The part of a storage that a strided tensor uses, in elements.
  struct Part {
    int64_t begin, end;
    int64_t step;  // the greatest common divisor of the strides
    bool operator==(const Part&) const = default;
  };

  // `watches` tells whether the uses of memory are recorded.
  AUTOBATCH_INTERNAL MemoryOrder(Scope& scope, const FiberPool& pool, bool watches);
  AUTOBATCH_INTERNAL ~MemoryOrder();
  MemoryOrder(const MemoryOrder&) = delete;
  MemoryOrder& operator=(const MemoryOrder&) = delete;

  bool is_ordered(const c10::Storage& storage) const;
  // Whether the arguments of each call must be checked, so that cached calls cannot be used first.
  bool looks_at_calls() const { return !stale_.empty(); }
  // Records the memory that a call reads and writes. Must be called when the running instance does
  // not have to wait for another instance.
  void note(const OpInfo& op, at::ArrayRef<c10::IValue> arguments);
  // Describes the first use that broke the order, for a warning. Empty if the order is not broken.
  const std::string& broken() const { return broken_; }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  // The last instances that have read and written a part; -1: none.
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
  std::vector<c10::Storage> stale_;  // ordered storages, and an empty storage if the map is watched
  bool watches_;
  std::unordered_map<const c10::StorageImpl*, Uses> uses_;
  size_t forget_at_ = 4096;  // number of entries at which the entries of freed memory are dropped
  std::string broken_;
};

// Whether the memory is ordered in a running map.
bool is_ordered(Scope& scope, const c10::Storage& storage);

}  // namespace autobatch
