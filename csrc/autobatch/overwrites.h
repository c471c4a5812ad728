// Memory that is written to after a captured op has read it.
//
// Eager's backward reads what its formulas saved when the op ran. Backward here may compute an op
// again (replay.h, rules.h), and must then see its operands as the op saw them. So what an outside
// tensor held is kept (Outside::as_read) where it may be overwritten:
//   - before an op that runs in the scope writes to memory which a flush has read;
//   - when a tensor is captured whose memory is also reached through a tensor with a version
//     counter of its own (`x.data`, `set_`), for no counter tells of such a write;
//   - when the scope pauses.
// What eager saves directly, an operand or a result, is read from memory as it is by then, as eager
// reads it. (A held tensor has a copy of what was computed. So that is where it is read from, if it
// was written to and no version counter says so.)
#pragma once

#include "autobatch/backward.h"

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace autobatch {

// From now on the memory of this tensor is reached through two version counters.
void note_alias(const at::TensorBase& tensor);
// Whether another tensor, with a version counter of its own, may write to its memory.
bool may_change_unseen(const at::Tensor& tensor);

// What the tensor holds now, in memory of its own of the same strides.
at::Tensor copy_as_read(const at::Tensor& tensor);
// Whether the memory holds something else by now than what was read. False where that was not kept.
bool is_overwritten(const Outside& outside);

// The records of one scope that may still be differentiated, by the memory that they read.
class ReadMemory {
 public:
  void add(const std::shared_ptr<FlushRecord>& record);
  // Keeps what the records have read of the memory that is about to be written to. `graph`: also
  // what its computed nodes have read.
  void before_write(Graph& graph, const at::Tensor& to);
  // The same of all memory but that of weights: writes are not seen from now on (payoff.h).
  void before_pause();

 private:
  struct Reader {
    std::weak_ptr<FlushRecord> record;
    uint32_t outside;
  };
  void index_new();
  void sweep();

  std::vector<std::weak_ptr<FlushRecord>> new_;  // not in the index yet: most scopes never write
  std::unordered_map<const c10::StorageImpl*, std::vector<Reader>> readers_;
  size_t indexed_ = 0;
  size_t sweep_at_ = 64;
};

// Of the record's held tensors those that hold something else by now.
std::vector<UnseenWrite> find_unseen_writes(const FlushRecord& record);
// Null if the value is not among them.
const UnseenWrite* find_unseen_write(const std::vector<UnseenWrite>& unseen, ValueId base);

// While it lives, what these nodes read is what eager's formulas would: outside tensors that were
// overwritten hold what was read of them unless a formula saves them, and computed values hold what
// was written to their tensors if one does.
class AsReadGuard {
 public:
  AsReadGuard(FlushRecord& record, const BackwardTask& task, NodeSpan nodes);
  ~AsReadGuard();
  AsReadGuard(const AsReadGuard&) = delete;
  AsReadGuard& operator=(const AsReadGuard&) = delete;

 private:
  void replace_outside(const Node& node);
  void replace_computed(const std::vector<UnseenWrite>& unseen, const Node& node);
  void exchange(const UnseenWrite& write);

  FlushRecord& record_;
  std::vector<std::pair<uint32_t, at::Tensor>> replaced_;
  std::vector<std::pair<at::Tensor, at::Tensor>> exchanged_;  // memory, and what it held
};

}  // namespace autobatch
