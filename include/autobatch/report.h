// The report of a scope. The report describes the captured ops and their batches. The counts grow
// with each flush.
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
  std::string op;          // such as "aten::linear"
  std::string shapes;      // operand shapes of the first node
  std::string rule;        // "native", "functorch" or "loop"
  std::string note;        // why no better rule was used; empty if there is no reason
  std::string site;        // first line of user code that captured the signature: "model.py:12"
  uint64_t instances = 0;  // nodes that ran
  uint64_t batches = 0;
  uint64_t largest = 0;   // nodes in the largest batch
  uint64_t launches = 0;  // one per batch; for the rule "loop", one per node
  uint64_t alone = 0;     // nodes that ran without sharing a call
  // The next members distinguish rows with the same op, site, shapes and rule.
  uint64_t position = 0;  // position in the line, in the host's units (host_hooks.h)
  uint64_t serial = 0;    // Signature::serial
  uint64_t weights = 0;   // hash of the identities of the weights
  uint64_t context = 0;   // grad mode and autocast state, as one word
  // The signature. The pointer is null if the tables that own the signature were replaced. For
  // internal use.
  const Signature* kind = nullptr;
};

// A row of the report for one flush. If a block has very many flushes, flushes with the same reason
// and site share one row.
struct FlushReport {
  std::string reason;
  std::string site;
  uint64_t nodes = 0;  // sum over all flushes of this row
  uint64_t count = 0;
  uint64_t batches = 0;  // sum over all flushes of this row
  std::string caller;    // call stack of the user code, in the host's format (host_hooks.h)
};

// An op that ran eagerly instead of being captured.
struct AtOnceReport {
  std::string op;
  std::string reason;
  std::string site;
  uint64_t count = 0;
  std::string caller;  // see FlushReport::caller
};

// A line of user code where the scope stopped capturing, because deferring the ops did not save
// time (ScopeOptions::adaptive).
struct PauseReport {
  std::string site;
  uint64_t count = 0;
  uint64_t calls = 0;  // calls of functions and modules until capture resumed
  // True if time measurements of whole blocks or maps showed that eager is faster. False if the
  // numbers of nodes, batches and launches showed that batching saves too little time.
  bool measured = false;
};

// The graph of one flush. The graph is stored so that the lower bound can be computed later, when
// the bound is read. The arrays have the same meaning as in ScheduleInput.
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
  uint64_t nodes = 0;  // nodes that ran; nodes with unreachable results do not run
  uint64_t batches = 0;
  uint64_t launches = 0;  // sum of SignatureReport::launches
  // Number of times that result metadata was inferred. Metadata is inferred by running the op on
  // dummy data, or by running its Meta kernel.
  uint64_t inferred = 0;
  uint64_t num_flushes = 0;
  // Number of rewrites of flush graphs by each pass. The key is the name of the pass, such as
  // "fuse_sums". A pass that changed nothing has no entry.
  std::map<std::string, uint64_t> passes;
  uint64_t checks = 0;          // assertions on values that a flush verifies later
  uint64_t backward_calls = 0;  // calls of `backward()` inside the block
  uint64_t gradients = 0;       // captured calls of `autograd.grad`
  // Length of the longest dependency chain over all flushes, in ops. The length is 0 if the block
  // has only the flush at its end.
  uint64_t depth = 0;
  bool is_open = false;  // whether the scope is still open
  // Whether the assertions of all code are deferred, and not only the assertions in PyTorch's code.
  bool defers_checks = false;
  std::vector<SignatureReport> signatures;
  std::vector<FlushReport> flushes;
  std::vector<AtOnceReport> at_once;
  std::vector<PauseReport> pauses;
  std::shared_ptr<Trace> trace;  // null without ScopeOptions::profile

  uint64_t launches_saved() const { return nodes - launches; }
  // Returns a lower bound on the number of batches of any schedule. The bound is the sum of the
  // bounds of all flushes. The slices of an Engine are not counted. See lower_bound() in
  // schedule.h.
  AUTOBATCH_API uint64_t lower_bound() const;
  // Returns the report as a table.
  AUTOBATCH_API std::string to_string() const;

  // Returns the row for the signature with this serial number and for `rule`, or null if there is
  // no row yet. The number of rows is limited. When the limit is reached, all new signatures share
  // the last row.
  SignatureReport* find(uint64_t serial, std::string_view rule);
  SignatureReport& add(uint64_t serial, SignatureReport row);
  void add_flush(FlushReport flush);
  // Adds a row for (op, reason). knows_at_once() runs at every read, so it compares `op` and
  // `reason` by address. `op` and `reason` must outlive the report, because the report stores their
  // addresses.
  void add_at_once(const std::string& op, const char* reason, AtOnceReport row);
  bool knows_at_once(const std::string& op, const char* reason);
  void add_pause(const std::string& site, bool measured = false);
  // Adds `calls` to the pause that was recorded last.
  void add_paused_calls(uint64_t calls);
  void add_bound_input(BoundInput input);
  // Holds a reference to the tables that own the signatures of the rows. Sets `kind` to null in the
  // rows of earlier tables, so that a long-lived scope does not hold references to old tables.
  void keep(const std::shared_ptr<const void>& tables);

 private:
  std::map<std::pair<uint64_t, std::string>, size_t> index_;  // key: serial number and rule
  std::map<std::pair<const void*, const void*>, size_t> at_once_index_;  // key: op and reason
  std::map<std::string, size_t> flush_index_;                            // key: reason and site
  size_t last_pause_ = 0;
  std::shared_ptr<const void> tables_;
  mutable std::vector<BoundInput> bound_inputs_;
  mutable uint64_t bound_ = 0;
};

}  // namespace autobatch
