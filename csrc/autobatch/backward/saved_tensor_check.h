// What eager's autograd makes of an op, found out by trying: the op is run on zeros. For eager's
// error about a tensor that was saved for backward and written to since (what we keep differs from
// what eager saves) the argument in question is marked as written to before the result is
// differentiated.
#pragma once

#include "autobatch/backward/backward.h"

#include <functional>
#include <vector>

namespace autobatch {

// What was written to since the values of a record were captured.
class Written {
 public:
  explicit Written(const FlushRecord& record);

  bool none() const { return bases_.empty() && record_.tape.written_at.empty(); }
  // Raises eager's error if eager would have saved, for this node's backward, a value that is no
  // longer there.
  void check(NodeId node) const;
  // The same of what is read when the node is computed again, all but what eager's formula does not
  // need.
  void check_unwritten(NodeId node) const;
  // The same of one operand.
  void check_unwritten(NodeId node, size_t slot) const;

 private:
  bool is_gone(ValueId id, NodeId reader) const;
  bool is_overwritten(ValueId id) const;
  // Whether what an overwritten operand held is kept (overwrites.h).
  bool is_kept(ValueId id) const;
  [[noreturn]] void raise(ValueId id, NodeId node) const;

  const FlushRecord& record_;
  std::vector<ValueId> bases_;  // sorted
};

// A value, among those that eager saves for this node's backward, of which `is_gone` says that it
// is no longer there; kNone if there is none.
ValueId find_saved_and_gone(const Tape& tape, const Node& node,
                            const std::function<bool(ValueId)>& is_gone);

// Whether eager would have kept anything for this node's backward, so that a second one is an
// error.
bool keeps_anything(const Tape& tape, const Node& node);

// Whether eager keeps the operand itself for this node's backward.
bool saves_operand(const Tape& tape, const Node& node, uint32_t slot);

// Whether eager keeps the result itself for this node's backward.
bool saves_result(const Tape& tape, const Node& node, uint32_t result);

// Of a node's results, the first that in eager has the same autograd node as this one.
uint32_t first_of_one_node(const Tape& tape, const Node& node, uint32_t result);

}  // namespace autobatch
