// The report of a scope: what was captured and how it ran. Counts grow with each flush.
#pragma once

#include "autobatch/export.h"

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace autobatch {

class Trace;
struct Signature;

struct SignatureReport {
  std::string op;          // "aten::linear"
  std::string shapes;      // operand shapes of the first node
  std::string rule;        // "native", "functorch" or "loop"
  std::string note;        // why no better rule ran it; empty if there is no such reason
  std::string site;        // line of user code that first captured it, "model.py:12"
  uint64_t instances = 0;  // nodes that ran
  uint64_t batches = 0;
  uint64_t largest = 0;   // nodes in the largest batch
  uint64_t launches = 0;  // one for each batch; for the rule "loop", one for each node
  uint64_t alone = 0;     // nodes that ran in a call of their own
  // Distinguish rows with the same op, site, shapes and rule.
  uint64_t position = 0;  // position in the line, in the host's units (host_hooks.h)
  uint64_t serial = 0;    // Signature::serial
  uint64_t weights = 0;   // hash of the identities of the weights
  uint64_t context = 0;   // grad mode and autocast state, as one word
  // The signature; null once the tables that own the signature are replaced. Internal.
  const Signature* kind = nullptr;
};

// One flush. When a block has very many flushes, flushes with the same reason and site share a row.
struct FlushReport {
  std::string reason;
  std::string site;
  uint64_t nodes = 0;  // sum over all flushes of this row
  uint64_t count = 0;
  uint64_t batches = 0;  // sum over all flushes of this row
  std::string caller;    // call stack of the user code, as text of the host (host_hooks.h)
};

// An op that ran at once instead of being captured.
struct AtOnceReport {
  std::string op;
  std::string reason;
  std::string site;
  uint64_t count = 0;
  std::string caller;  // as FlushReport::caller
};

// A line of user code where the scope stopped capturing, because deferring the ops did not pay
// (ScopeOptions::adaptive).
struct PauseReport {
  std::string site;
  uint64_t count = 0;
  uint64_t calls = 0;  // calls of functions and modules until capture resumed
  // True: timing trials of whole blocks or maps showed that eager is faster. False: the numbers of
  // nodes, batches and launches showed that batching gains too little.
  bool measured = false;
};

// The graph of one flush, kept so that the lower bound is computed only when it is read. The arrays
// are those of ScheduleInput.
struct BoundInput {
  std::shared_ptr<const void> memory;  // owns the memory of the three spans
  std::span<const uint32_t> signature;
  std::span<const uint32_t> input_begin;
  std::span<const uint32_t> inputs;
  std::vector<uint8_t> batchable;
};

class Report {
 public:
  uint64_t ops = 0;    // ops captured as nodes
  uint64_t views = 0;  // views, captured as offsets and strides without a node
  uint64_t nodes = 0;  // nodes that ran; nodes whose results are unreachable do not
  uint64_t batches = 0;
  uint64_t launches = 0;  // sum of SignatureReport::launches
  // Number of times that result metadata was inferred by running the op on dummy data or its Meta
  // kernel.
  uint64_t inferred = 0;
  uint64_t num_flushes = 0;
  // Number of rewrites by pass over the graph of a flush ("fuse_sums"). A pass is missing if it
  // changed nothing.
  std::map<std::string, uint64_t> passes;
  uint64_t checks = 0;          // assertions on values that were deferred to a flush
  uint64_t backward_calls = 0;  // calls of `backward()` inside the block
  uint64_t gradients = 0;       // captured calls of `autograd.grad`
  // Length in ops of the longest dependency chain, over all flushes. 0 if the only flush is the one
  // at the end of the block.
  uint64_t depth = 0;
  bool is_open = false;  // whether the scope is still open
  // Whether assertions of all code are deferred, not only those of PyTorch.
  bool defers_checks = false;
  std::vector<SignatureReport> signatures;
  std::vector<FlushReport> flushes;
  std::vector<AtOnceReport> at_once;
  std::vector<PauseReport> pauses;
  std::shared_ptr<Trace> trace;  // null without ScopeOptions::profile

  uint64_t launches_saved() const { return nodes - launches; }
  // Returns a lower bound on the number of batches of any schedule, summed over the flushes other
  // than the slices of an Engine. See lower_bound() in schedule.h.
  AUTOBATCH_API uint64_t lower_bound() const;
  // Formats the report as a table.
  AUTOBATCH_API std::string to_string() const;

  // Returns the row of the signature with this serial number as run by `rule`, or null if it is
  // new. The number of rows is limited: all further signatures share the last row.
  SignatureReport* find(uint64_t serial, std::string_view rule);
  SignatureReport& add(uint64_t serial, SignatureReport row);
  void add_flush(FlushReport flush);
  // Adds a row for (op, reason). `op` and `reason` are compared by address, since knows_at_once()
  // runs at every read, so they must outlive the report.
  void add_at_once(const std::string& op, const char* reason, AtOnceReport row);
  bool knows_at_once(const std::string& op, const char* reason);
  void add_pause(const std::string& site, bool measured = false);
  // Adds `calls` to the pause that was added last.
  void add_paused_calls(uint64_t calls);
  void add_bound_input(BoundInput input);
  // Keeps alive the tables that own the signatures of the rows. Rows of earlier tables lose `kind`,
  // so that a long-lived scope does not keep old tables alive.
  void keep(const std::shared_ptr<const void>& tables);

 private:
  std::map<std::pair<uint64_t, std::string>, size_t> index_;  // by serial number and rule
  std::map<std::pair<const void*, const void*>, size_t> at_once_index_;  // by op and reason
  std::map<std::string, size_t> flush_index_;                            // by reason and site
  size_t last_pause_ = 0;
  std::shared_ptr<const void> tables_;
  mutable std::vector<BoundInput> bound_inputs_;
  mutable uint64_t bound_ = 0;
};

}  // namespace autobatch
