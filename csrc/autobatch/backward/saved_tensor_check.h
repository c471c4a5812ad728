// Finds the tensors that autograd saves for an op in eager mode. This library may keep other
// tensors than eager mode. To find the tensors of eager mode, the op runs in a trial, eagerly and
// on zeros. The trial increases the version counter of a tensor and then runs backward. If autograd
// has saved the tensor, backward raises an error.
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
  // Raises the error of eager mode if a value that eager mode saves for this node's backward has
  // been overwritten.
  void check(NodeId node) const;
  // Raises the error of eager mode if computing this node again would read an overwritten operand.
  // Does not check operands that the formula of eager mode does not need. If eager mode does not
  // save an operand itself, the operand may be overwritten as long as its old content is kept.
  void check_unwritten(NodeId node) const;
  // Raises the error of eager mode if this operand was overwritten and its old content is not kept.
  void check_unwritten(NodeId node, size_t slot) const;

 private:
  bool is_gone(ValueId id, NodeId reader) const;
  bool is_overwritten(ValueId id) const;
  // Whether the old content of an overwritten operand is kept (overwrites.h).
  bool is_kept(ValueId id) const;
  [[noreturn]] void raise(ValueId id, NodeId node) const;

  const FlushRecord& record_;
  std::vector<ValueId> bases_;  // bases of overwritten values, sorted
};

// Returns a value that eager mode saves for this node's backward and for which `is_gone` returns
// true, because its content has been overwritten. Returns kNone if there is no such value.
ValueId find_saved_and_gone(const Tape& tape, const Node& node,
                            const std::function<bool(ValueId)>& is_gone);

// Whether eager mode saves any data for this node's backward. If so, a second backward of the node
// is an error.
bool keeps_anything(const Tape& tape, const Node& node);

// Whether eager mode saves the operand itself for this node's backward.
bool saves_operand(const Tape& tape, const Node& node, uint32_t slot);

// Whether eager mode saves the result itself for this node's backward.
bool saves_result(const Tape& tape, const Node& node, uint32_t result);

// Returns the first of the node's results that has the same autograd node as `result` in eager
// mode.
uint32_t first_of_one_node(const Tape& tape, const Node& node, uint32_t result);

}  // namespace autobatch
