// Finds out by experiment which tensors eager's autograd saves for an op: the op runs eagerly on
// zeros. The experiment is needed because this library keeps other tensors than eager saves. To
// find out whether eager raises its error about a saved tensor that was written to, the tensor's
// version counter is increased before the result is differentiated.
#pragma once

#include "autobatch/backward/backward.h"

#include <functional>
#include <vector>

namespace autobatch {

// The values of a record whose memory was written to after they were captured.
class Written {
 public:
  explicit Written(const FlushRecord& record);

  bool none() const { return bases_.empty() && record_.tape.written_at.empty(); }
  // Raises eager's error if eager would have saved, for this node's backward, a value that has been
  // overwritten.
  void check(NodeId node) const;
  // Raises eager's error if computing this node again would read an overwritten operand.
  // Exceptions: operands that eager's formula does not need, and operands whose old content is
  // kept, unless eager saves the operand itself.
  void check_unwritten(NodeId node) const;
  // Raises eager's error if this operand was overwritten and its old content is not kept.
  void check_unwritten(NodeId node, size_t slot) const;

 private:
  bool is_gone(ValueId id, NodeId reader) const;
  bool is_overwritten(ValueId id) const;
  // Whether the old content of an overwritten operand is kept (overwrites.h).
  bool is_kept(ValueId id) const;
  [[noreturn]] void raise(ValueId id, NodeId node) const;

  const FlushRecord& record_;
  std::vector<ValueId> bases_;  // sorted
};

// Returns a value that eager saves for this node's backward and for which `is_gone` returns true
// (its content has been overwritten); kNone if there is none.
ValueId find_saved_and_gone(const Tape& tape, const Node& node,
                            const std::function<bool(ValueId)>& is_gone);

// Whether eager saves anything for this node's backward, so that a second backward is an error.
bool keeps_anything(const Tape& tape, const Node& node);

// Whether eager saves the operand itself for this node's backward.
bool saves_operand(const Tape& tape, const Node& node, uint32_t slot);

// Whether eager saves the result itself for this node's backward.
bool saves_result(const Tape& tape, const Node& node, uint32_t result);

// Returns the first of the node's results that has the same autograd node as `result` in eager.
uint32_t first_of_one_node(const Tape& tape, const Node& node, uint32_t result);

}  // namespace autobatch
