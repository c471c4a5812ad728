// The tensor object a captured op returns: exact metadata, no data yet. At the flush the same
// object becomes an ordinary tensor, so every reference the user holds is the real one afterwards.
#pragma once

#include "autobatch/common/compat.h"
#include "autobatch/common/free_list.h"
#include "autobatch/export.h"
#include "autobatch/graph/graph.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <thread>

namespace autobatch {

// PyTorch's own, in memory of ours.
struct PendingMeta final : torch::autograd::AutogradMeta, FromFreeList<PendingMeta> {};

class PendingTensor final : public c10::TensorImpl, public FromFreeList<PendingTensor> {
 public:
  // Stands for `value` of `graph`; sizes, strides, dtype, device and requires_grad are the value's.
  PendingTensor(Graph* graph, ValueId value);
  // The same where `value`, `id` in a part that was split from the graph, is no longer in it.
  PendingTensor(Graph* graph, ValueId id, const Value& value);

  Graph* graph() const { return graph_.load(std::memory_order_relaxed); }
  ValueId value() const { return value_.load(std::memory_order_relaxed); }
  bool is_pending() const { return graph() != nullptr; }
  void stand_for(ValueId value) { value_.store(value, std::memory_order_relaxed); }

  // --- for the graph, which knows of its tensors without holding them ---

  // The last reference may go on any thread, while the graph's own looks at the tensor: the graph
  // keeps a weak one until it is told, or the tensor is no longer pending.
  void keep_memory();
  // A reference; null if the last one has gone.
  c10::intrusive_ptr<PendingTensor> hold();
  // No longer pending; returns what graph it was of. Once.
  Graph* leave() { return graph_.exchange(nullptr); }
  // Between the two it is of no graph, which so is not told if the last reference goes.
  class Absence {
   public:
    explicit Absence(PendingTensor& tensor) : tensor_(tensor), graph_(tensor.leave()) {
      tensor.release_memory();
    }
    void end() { tensor_.graph_.store(graph_); }

   private:
    PendingTensor& tensor_;
    Graph* graph_;
  };
  // Lets go what keep_memory took. The tensor may be gone then.
  void release_memory();
  // The last reference has gone.
  void release_resources() override;

  // --- for a host whose objects hold tensors, and are kept with them to be used again ---

  // Such a host made it.
  void allow_rest() { may_rest_ = true; }
  // Leaves its graph, with nothing on it that somebody hung there. False, with nothing done, if it
  // is none that may be used again: not pending, referred to elsewhere, or no tensor on a CPU.
  AUTOBATCH_INTERNAL static bool rest(const at::Tensor& last);
  // After that: stands for another value on a CPU, as a new tensor would.
  AUTOBATCH_INTERNAL void wake(Graph* graph, ValueId value);
  // After rest, in place of that: the last reference may go.
  AUTOBATCH_INTERNAL void end_rest();

  // Turns this into an ordinary tensor over the memory of `memory`, whose keys and version counter
  // it takes, `offset` elements into its storage.
  void become(const at::Tensor& memory, int64_t offset);
  // The flush failed before this was computed: every later use raises an error that names
  // `reason` (what it depends on, and failed).
  void lose(std::shared_ptr<const std::string> reason);
  bool is_lost() const { return lost_ != nullptr; }
  const std::shared_ptr<const std::string>& reason() const { return lost_; }
  // Raises if lost.
  void check_not_lost() const;

  // Any raw read of the data, from Python or C++, goes through these two: they flush. A net for
  // what never dispatches an op (`.tolist()`, `data_ptr()`, pickle), not the usual way.
  bool has_storage() const override;
  const c10::Storage& storage() const override;

  // The defaults copy the raw fields, deferral key and missing storage included.
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter, bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;

 private:
  void look_like(const Value& value);
  void require_data() const;
  const char* tensorimpl_type_name() const override { return "PendingTensor"; }

  std::atomic<Graph*> graph_;  // null once real or lost
  std::atomic<ValueId> value_;
  std::thread::id owner_ = std::this_thread::get_id();
  bool is_kept_ = false;
  bool may_rest_ = false;
  bool has_new_flags_ = true;        // those about strides are as a new tensor's
  PendingMeta* own_meta_ = nullptr;  // autograd_meta_, unless somebody exchanged that
  std::shared_ptr<const std::string> lost_;
};

// The pending tensor behind `tensor`, or null if it is an ordinary one.
inline PendingTensor* as_pending(const c10::TensorImpl* impl) {
  return impl->key_set().has(compat::kDeferKey)
             ? static_cast<PendingTensor*>(const_cast<c10::TensorImpl*>(impl))
             : nullptr;
}
inline PendingTensor* as_pending(const at::TensorBase& tensor) {
  return tensor.defined() ? as_pending(tensor.unsafeGetTensorImpl()) : nullptr;
}

// A new tensor that stands for the value.
AUTOBATCH_INTERNAL at::Tensor make_pending(Graph& graph, ValueId id);

// Whether it is an ordinary dense tensor, or a pending one, by its dispatch keys.
bool is_plain(const c10::TensorImpl& tensor);

// --- of the scope that owns the graph (scope/pending_reads.cpp) ---

// Whether a pending tensor of this thread's scope is a result that has a history: no leaf, and not
// made one by `requires_grad=True`.
AUTOBATCH_INTERNAL bool is_result(const PendingTensor& tensor);

// Computes what the tensors wait for, if they are pending; `reason` goes into the report. Raises if
// one was lost.
AUTOBATCH_INTERNAL void ensure_real(at::ArrayRef<PendingTensor*> tensors,
                                    const std::string& reason);
void ensure_real(const at::TensorBase& tensor, const std::string& reason);

}  // namespace autobatch
