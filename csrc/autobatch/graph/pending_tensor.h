// The tensor object that a captured op returns. The tensor has exact metadata, but no data yet. The
// flush turns the same object into an ordinary tensor, so all references that the user holds stay
// valid.
#pragma once

#include "autobatch/common/compat.h"
#include "autobatch/common/free_list.h"
#include "autobatch/export.h"
#include "autobatch/graph/graph.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace autobatch {

// PyTorch's AutogradMeta, allocated from a free list.
struct PendingMeta final : torch::autograd::AutogradMeta, FromFreeList<PendingMeta> {};

class PendingTensor final : public c10::TensorImpl, public FromFreeList<PendingTensor> {
 public:
  // Makes a tensor that stands for `value` of `graph`. The tensor has the sizes, strides, dtype,
  // device and requires_grad of the value.
  PendingTensor(Graph* graph, ValueId value);
  // Makes a tensor that stands for `value`, which has number `id` in a part split from the graph.
  PendingTensor(Graph* graph, ValueId id, const Value& value);

  Graph* graph() const { return graph_.load(std::memory_order_relaxed); }
  ValueId value() const { return value_.load(std::memory_order_relaxed); }
  bool is_pending() const { return graph() != nullptr; }
  void stand_for(ValueId value) { value_.store(value, std::memory_order_relaxed); }

  // --- for the graph, which holds no strong references to its tensors ---

  // Makes the graph hold a weak reference until the graph has detached the tensor or the tensor is
  // no longer pending. The weak reference is needed because another thread may drop the last strong
  // reference while the graph's thread uses the tensor.
  void keep_memory();
  // Returns a strong reference, or null if no strong reference is left.
  c10::intrusive_ptr<PendingTensor> hold();
  // Removes the tensor from its graph and returns the graph. Later calls return null.
  Graph* leave() { return graph_.exchange(nullptr); }
  // Removes the tensor from its graph until end() is called. If the last reference is dropped
  // before end(), the graph is not notified.
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
  // Drops the reference that keep_memory took. The call may free the tensor.
  void release_memory();
  // Called when the last strong reference is dropped.
  void release_resources() override;

  // --- requests to autograd (capture/history_requests.h) ---

  // A function that is called once the tensor is real and has its autograd node. The argument is
  // the tensor.
  using Request = void (*)(const at::Tensor&);
  // Keeps the tensor alive until it is real or lost. If it becomes real, answer_requests() calls
  // `request`.
  void add_request(Request request);
  bool has_requests() const { return requests_ != nullptr; }
  AUTOBATCH_INTERNAL bool has_request(Request request) const;
  void answer_requests();

  // --- for a host that keeps its tensor objects for reuse ---

  // Marks the tensor as made by a host that keeps its tensor objects for reuse.
  void allow_rest() { may_rest_ = true; }
  // Removes the tensor from its graph and resets its autograd metadata. Returns false and changes
  // nothing if the tensor cannot be reused. A reusable tensor is pending, belongs to this thread,
  // has no extra metadata, and is not referenced elsewhere.
  AUTOBATCH_INTERNAL static bool rest(const at::Tensor& last);
  // Must be called after rest(). Makes the tensor stand for another value, like a new tensor.
  AUTOBATCH_INTERNAL void wake(Graph* graph, ValueId value);
  // Must be called after rest() if wake() is not called. Allows the last reference to be dropped.
  AUTOBATCH_INTERNAL void end_rest();

  // Turns this object into an ordinary tensor whose data begins `offset` elements after the start
  // of the storage of `memory`. The tensor gets the dispatch keys and the version counter of
  // `memory`.
  void become(const at::Tensor& memory, int64_t offset);
  // Marks the tensor as lost: the flush failed before the tensor was computed. Every later use
  // raises an error with `reason`, which describes the failure that caused the loss. Drops the
  // requests. Returns the reference with which the requests kept the tensor alive, or null.
  // Releasing the reference may destroy the tensor.
  c10::intrusive_ptr<PendingTensor> lose(std::shared_ptr<const std::string> reason);
  bool is_lost() const { return lost_ != nullptr; }
  const std::shared_ptr<const std::string>& reason() const { return lost_; }
  // Raises an error if the tensor is lost.
  void check_not_lost() const;

  // Any raw read of the data, from Python or C++, calls has_storage() or storage(). Both functions
  // flush, so that reads without an op (`.tolist()`, `data_ptr()`, pickle) are covered.
  bool has_storage() const override;
  const c10::Storage& storage() const override;

  // The functions shallow_copy_and_detach() flush first, because the base class copies the raw
  // fields. Without the flush, the copy would have the capture key and no storage.
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

  struct Requests {
    c10::intrusive_ptr<PendingTensor> tensor;
    std::vector<Request> all;
  };

  std::atomic<Graph*> graph_;  // null once the tensor is computed or lost
  std::atomic<ValueId> value_;
  std::thread::id owner_ = std::this_thread::get_id();
  bool is_kept_ = false;
  bool may_rest_ = false;
  bool has_new_flags_ = true;        // the flags about strides are those of a new tensor
  PendingMeta* own_meta_ = nullptr;  // autograd_meta_, unless PyTorch has replaced it
  std::shared_ptr<const std::string> lost_;
  std::unique_ptr<Requests> requests_;
};

// Returns the pending or lost tensor behind `tensor`, or null for an ordinary tensor.
inline PendingTensor* as_pending(const c10::TensorImpl* impl) {
  return impl->key_set().has(compat::kDeferKey)
             ? static_cast<PendingTensor*>(const_cast<c10::TensorImpl*>(impl))
             : nullptr;
}
inline PendingTensor* as_pending(const at::TensorBase& tensor) {
  return tensor.defined() ? as_pending(tensor.unsafeGetTensorImpl()) : nullptr;
}

// Returns a new tensor that stands for the value.
AUTOBATCH_INTERNAL at::Tensor make_pending(Graph& graph, ValueId id);

// Whether a tensor on the memory of `base` has requests.
bool has_requests(const Tape& tape, ValueId base);

// Whether the dispatch keys are the keys of an ordinary dense tensor or of a pending tensor.
bool is_plain(const c10::TensorImpl& tensor);

// --- implemented in scope/pending_reads.cpp ---

// Whether a pending tensor of this thread's scope is a result with an autograd history: it is not a
// leaf, and `requires_grad=True` has not made it a leaf.
AUTOBATCH_INTERNAL bool is_result(const PendingTensor& tensor);

// Computes the tensors that are pending. The report shows `reason`. Raises an error if a tensor is
// lost.
AUTOBATCH_INTERNAL void ensure_real(at::ArrayRef<PendingTensor*> tensors,
                                    const std::string& reason);
void ensure_real(const at::TensorBase& tensor, const std::string& reason);

}  // namespace autobatch
