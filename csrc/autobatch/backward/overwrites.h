// Memory that is written to after a captured op has read it.
//
// Eager's backward reads what its formulas saved when the op ran. Backward here may compute an op
// again (recompute.h, rule.h), and must then see its operands as the op saw them. So what an
// graph input held is kept (GraphInput::as_read) where it may be overwritten:
//   - before an op that runs in the scope writes to memory which a flush has read;
//   - when a tensor is captured whose memory is also reached through a tensor with a version
//     counter of its own (`x.data`, `set_`), for no counter tells of such a write;
//   - when the scope pauses.
// Eager's formulas read the operands and results that they saved from memory as it is when backward
// runs, and so does backward here. A tensor that the user holds has memory of its own, apart from
// the record's. If the user has written to it and no version counter shows that (UnseenWrite), the
// formulas that saved it read the user's memory.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/graph/storage_aliases.h"

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace autobatch {

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
    uint32_t graph_input;
  };
  void index_new();
  void sweep();

  std::vector<std::weak_ptr<FlushRecord>> new_;  // not in the index yet: most scopes never write
  std::unordered_map<const c10::StorageImpl*, std::vector<Reader>> readers_;
  size_t indexed_ = 0;
  size_t sweep_at_ = 64;
};

// The record's held tensors that hold something else now than what was computed.
std::vector<UnseenWrite> find_unseen_writes(const FlushRecord& record);
// The one of this value; null if there is none.
const UnseenWrite* find_unseen_write(const std::vector<UnseenWrite>& unseen, ValueId base);

// While it lives, the record holds what eager's formulas of these nodes would read. A
// graph input that was overwritten holds its old content, unless a formula saved the tensor. A
// computed value holds what was written to its tensor, if a formula saved it.
class AsReadGuard {
 public:
  AsReadGuard(FlushRecord& record, const BackwardTask& task, NodeSpan nodes);
  ~AsReadGuard();
  AsReadGuard(const AsReadGuard&) = delete;
  AsReadGuard& operator=(const AsReadGuard&) = delete;

 private:
  void replace_graph_input(const Node& node);
  void replace_computed(const std::vector<UnseenWrite>& unseen, const Node& node);
  void exchange(const UnseenWrite& write);

  FlushRecord& record_;
  std::vector<std::pair<uint32_t, at::Tensor>> replaced_;
  std::vector<std::pair<at::Tensor, at::Tensor>> exchanged_;  // memory, and its old content
};

}  // namespace autobatch
