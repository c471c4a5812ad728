// Handles memory that is written to after a captured op has read the memory.
//
// In eager mode, backward reads the tensors that its formulas saved when the op ran. Backward in
// this library may compute an op again (recompute.h, rule.h). The operands must then have the
// content that the op read when it first ran. So the content of a graph input is kept
// (GraphInput::as_read) in these cases:
//   - An op that runs in the scope will write to memory that a flush has read.
//   - A tensor is captured, and another tensor with the same memory has a different version counter
//     (`x.data`, `set_`). No version counter shows all writes to such memory.
//   - The scope pauses.
//
// When backward runs in eager mode, its formulas read the current content of the operands and
// results that they saved. Backward in this library also reads the current content. The memory of a
// tensor that the user holds is separate from the record's slabs. The user may write to such a
// tensor without a change of its version counter (UnseenWrite). Formulas that saved the tensor then
// read the user's memory.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/graph/storage_aliases.h"

#include <memory>
#include <unordered_map>
#include <vector>

namespace autobatch {

// The records of one scope that may still be used by a backward pass, indexed by the storages that
// they read.
class ReadRecords {
 public:
  void add(const std::shared_ptr<FlushRecord>& record);
  // Must be called before an op writes to the storage of `to`. Keeps the current content of all
  // graph inputs in that storage, both of the records and of `graph`.
  void before_write(Graph& graph, const at::Tensor& to);
  // Writes during a pause are not observed (payoff.h). So this function keeps the current content
  // of all graph inputs of the records, except weights.
  void before_pause();

 private:
  struct Reader {
    std::weak_ptr<FlushRecord> record;
    uint32_t graph_input;
  };
  void index_new();
  void sweep();

  // The records that were not added to the index `readers_` yet. The index is built only at the
  // first write, because most scopes have no writes.
  std::vector<std::weak_ptr<FlushRecord>> new_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Reader>> readers_;
  size_t indexed_ = 0;
  size_t sweep_at_ = 64;
};

// Returns the held tensors whose content differs from the computed values, sorted by base.
std::vector<UnseenWrite> find_unseen_writes(const FlushRecord& record);
// Returns the entry of the value `base`, or null if there is no such entry. `unseen` must be sorted
// by base.
const UnseenWrite* find_unseen_write(const std::vector<UnseenWrite>& unseen, ValueId base);

// While a guard exists, the record contains the data that the formulas of `nodes` would read in
// eager mode. An overwritten graph input has its old content, unless a formula saved the tensor. A
// computed value that a formula saved has the content that the user wrote to the value's tensor.
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
  std::vector<std::pair<at::Tensor, at::Tensor>> exchanged_;  // pairs of memory and its old content
};

}  // namespace autobatch
