// Ends a flush by turning pending tensors into ordinary tensors.
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

// The failures of a flush.
class Failures {
 public:
  explicit operator bool() const { return first_.cause != nullptr; }
  // Whether the flush failed as a whole (for example, by an interruption), so that no more nodes
  // may run.
  bool stops() const { return stops_; }
  // The failure that is raised in the user's code. If several nodes failed, this is the failure of
  // the node that was captured first.
  const OpFailure& first() const { return first_; }
  const OpFailure& of(NodeId node) const;
  bool concerns(NodeId node) const { return nodes_.count(node) != 0; }
  // Records the failure of a node.
  void add(NodeId node, std::exception_ptr error);
  // Records a failure after which no more nodes may run.
  void add(std::exception_ptr error);
  // Records that `node` cannot run because it reads a result of the failed node `from`.
  void inherit(NodeId node, NodeId from) { nodes_[node] = of(from); }
  void copy_to(std::vector<OpFailure>& losses) const;

 private:
  OpFailure first_;
  bool stops_ = false;
  NodeId first_node_ = kNone;
  std::vector<OpFailure> all_;
  std::unordered_map<NodeId, OpFailure> nodes_;
};

// The pending tensors that are still referenced, kept alive for the duration of a flush.
class HeldTensors {
 public:
  // Holds the tensors of `part`. Makes a tensor for each export without a tensor. `computed`
  // contains the values of the nodes of `part` that have already been computed.
  HeldTensors(Graph& graph, Split& part, const Store& computed);

  bool empty() const { return tensors_.empty(); }
  // Returns the results of `tape` that the held tensors represent or are views of, possibly with
  // duplicates.
  std::vector<ValueId> results(const Tape& tape) const;
  // Releases tensors that have no other reference. The caller must hold the host's lock
  // (host_hold).
  void let_go(Tape& tape);
  // Gives each tensor its own storage and its gradient edge. As in eager mode, the held views of a
  // tensor share its storage. Tensors that were not computed because of `failures` become lost.
  // Returns the tensors of the exports, or the reasons why they were lost.
  std::vector<Computed> materialize(const std::shared_ptr<FlushRecord>& record,
                                    const Failures& failures);
  // Must be called after materialize has failed. Marks the tensors that are still pending as lost.
  // Returns the tensors of the exports, or the reasons why they were lost.
  std::vector<Computed> lose_rest(const OpFailure& failure);

 private:
  std::vector<Computed> take_exports();

  std::vector<c10::intrusive_ptr<PendingTensor>> tensors_;
  std::vector<c10::intrusive_ptr<PendingTensor>> exports_;
  std::vector<c10::intrusive_ptr<PendingTensor>> function_results_;  // user code dropped these
};

// Turns the tensors of computed results and of their views into real tensors. Neither the results
// nor their views may have gradients. The record stays open.
void materialize_results(FlushRecord& record, at::ArrayRef<ValueId> bases);

}  // namespace autobatch
