// Handling of memory that is written to after a captured op has read it.
//
// Eager's backward reads the tensors that its formulas saved when the op ran. Backward here may
// compute an op again (recompute.h, rule.h), and must then read the operands with the content that
// the op read. So the content of a graph input is kept (GraphInput::as_read) where it may be
// overwritten:
//   - before an op that runs in the scope writes to memory which a flush has read;
//   - when a tensor is captured whose memory is also reached through a tensor with a version
//     counter of its own (`x.data`, `set_`), because no version counter shows all writes to such
//     memory;
//   - when the scope pauses.
//
// Eager's formulas read the operands and results that they saved from memory as it is when backward
// runs. Backward in this library does the same. A tensor that the user holds has memory of its own,
// separate from the record's slabs. If the user has written to the tensor and no version counter
// shows the write (UnseenWrite), the formulas that saved the tensor read the user's memory.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/graph/storage_aliases.h"

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace autobatch {

// The records of one scope that may still be differentiated, indexed by the storages that they
// read.
class ReadRecords {
 public:
  void add(const std::shared_ptr<FlushRecord>& record);
  // Must be called before an op writes to the storage of `to`. Keeps the present content of all
  // graph inputs in that storage, both of the records and of `graph`.
  void before_write(Graph& graph, const at::Tensor& to);
  // Keeps the present content of all graph inputs of the records except weights, because writes
  // during a pause are not observed (payoff.h).
  void before_pause();

 private:
  struct Reader {
    std::weak_ptr<FlushRecord> record;
    uint32_t graph_input;
  };
  void index_new();
  void sweep();

  // Records that are not indexed yet. The index is built at the first write, and most scopes have
  // none.
  std::vector<std::weak_ptr<FlushRecord>> new_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Reader>> readers_;
  size_t indexed_ = 0;
  size_t sweep_at_ = 64;
};

// Returns the held tensors whose content differs from the computed values, sorted by base.
std::vector<UnseenWrite> find_unseen_writes(const FlushRecord& record);
// Returns the entry of the value `base`; null if there is none. `unseen` must be sorted by base.
const UnseenWrite* find_unseen_write(const std::vector<UnseenWrite>& unseen, ValueId base);

// During its lifetime the record holds the content that eager's formulas of `nodes` would read. An
// overwritten graph input holds its old content, unless a formula saved the tensor. A computed
// value holds the content that the user wrote to its tensor, if a formula saved it.
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
