// Packs sequences of different lengths step by step, without padding.
#pragma once

#include "autobatch/rules/batch.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace autobatch {

// The order of packed rows. Sequences are sorted by length, the longest first. Rows are sorted by
// step. At each step, the sequences that have not ended have the first places. Row begin(t) + s is
// step t of the sequence at place s.
class Packing {
 public:
  explicit Packing(const std::vector<int64_t>& lengths);

  int64_t sequences() const { return static_cast<int64_t>(sequence_.size()); }
  int64_t steps() const { return static_cast<int64_t>(begin_.size()) - 1; }
  int64_t rows() const { return begin_.back(); }
  int64_t begin(int64_t step) const { return begin_[step]; }
  // Returns the number of sequences with more than `step` steps.
  int64_t count(int64_t step) const { return step < steps() ? begin_[step + 1] - begin_[step] : 0; }
  // Returns the index, in the constructor's `lengths`, of the sequence at place s.
  int64_t sequence(int64_t s) const { return sequence_[s]; }

 private:
  std::vector<int64_t> sequence_;
  std::vector<int64_t> begin_;
};

// The sequences of all members of a batch, and the positions of their rows. Sequences are numbered
// member by member. Operand 0 of a member is the input of the op, [T, B, ..], or [B, T, ..] if
// `batch_first`.
class Sequences {
 public:
  Sequences(const BatchView& batch, bool batch_first);

  const Packing& packing() const { return *packing_; }

  // Returns for each packed row its index in the members' concatenated tensors. These tensors are
  // [T, B, ..], or [B, T, ..] if `batch_first`.
  std::vector<int64_t> rows(bool batch_first) const;

  // Returns for each place the row that contains the state of `run`, in the members' concatenated
  // states [runs, B, ..].
  std::vector<int64_t> states(int64_t run, int64_t runs) const;

  // Returns, for each packed row of `some`, the packed row of this object that contains the same
  // step of the same sequence. `some` contains the members at `positions` of this object.
  std::vector<int64_t> rows_of(const Sequences& some, const std::vector<int64_t>& positions) const;

 private:
  struct Sequence {
    // The first row and the first sequence of the member that contains this sequence, and the B of
    // this member.
    int64_t first_row, first_sequence, member_width;
    // The index of this sequence among the sequences of the member, and its number of steps.
    int64_t in_member, length;
  };
  std::vector<Sequence> members_;  // the sequences of all members
  std::vector<int64_t> first_;     // by member: the number of its first sequence
  std::vector<int64_t> place_;     // by sequence: its place in the packing
  std::optional<Packing> packing_;
};

}  // namespace autobatch
