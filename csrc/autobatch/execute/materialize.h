// The end of a flush: pending tensors become ordinary ones.
#pragma once

#include "autobatch/backward/backward.h"
#include "autobatch/execute/flush.h"
#include "autobatch/graph/pending_tensor.h"

#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

namespace autobatch {

// What failed in a flush.
class Failures {
 public:
  explicit operator bool() const { return first_.cause != nullptr; }
  // Whether nothing more is to be run.
  bool stops() const { return stops_; }
  // Of all, what the user is shown: the error of the node that was captured first.
  const OpFailure& first() const { return first_; }
  const OpFailure& of(NodeId node) const;
  bool concerns(NodeId node) const { return nodes_.count(node) != 0; }
  // A node failed, or nothing more is run.
  void add(NodeId node, std::exception_ptr error);
  void add(std::exception_ptr error);
  // It reads what a failed one would have made.
  void inherit(NodeId node, NodeId from) { nodes_[node] = of(from); }
  void copy_to(std::vector<OpFailure>& losses) const;

 private:
  OpFailure first_;
  bool stops_ = false;
  NodeId first_node_ = kNone;
  std::vector<OpFailure> all_;
  std::unordered_map<NodeId, OpFailure> nodes_;
};

// The pending tensors that somebody can still reach, kept alive for the duration of a flush.
class HeldTensors {
 public:
  // Those of the part; its exports get a tensor if they have none.
  HeldTensors(Graph& graph, Split& part);

  bool empty() const { return tensors_.empty(); }
  // The results of the tape that they look at, some perhaps more than once.
  std::vector<ValueId> results(const Tape& tape) const;
  // Those that nobody else holds any more. Under the host's lock.
  void let_go(Tape& tape);
  // Gives each tensor storage of its own (shared with the views of it that are held, as in eager)
  // and its gradient edge. Those that were not computed because of `failures` become lost. Returns
  // the exports' tensors, or what they were lost to.
  std::vector<Computed> materialize(const std::shared_ptr<FlushRecord>& record,
                                    const Failures& failures);
  // After materialize failed: what is still pending becomes lost. Returns the exports' tensors.
  std::vector<Computed> lose_rest(const OpFailure& failure);

 private:
  std::vector<Computed> take_exports();

  std::vector<c10::intrusive_ptr<PendingTensor>> tensors_;
  std::vector<c10::intrusive_ptr<PendingTensor>> exports_;
};

// Makes the tensors that look at computed results real, where neither these nor any view of them
// have a gradient; the record stays open.
void materialize_results(FlushRecord& record, at::ArrayRef<ValueId> bases);

}  // namespace autobatch
