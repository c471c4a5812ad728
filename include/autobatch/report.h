// What happened in a scope: counted at each flush, printed on demand.
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
  std::string shapes;      // of the operands of the first node
  std::string rule;        // "native", "functorch" or "loop"
  std::string note;        // why not better, if so
  std::string site;        // the user's line that first captured it
  uint64_t instances = 0;  // nodes run
  uint64_t batches = 0;
  uint64_t largest = 0;   // nodes in the largest batch
  uint64_t launches = 0;  // calls made: batches, or nodes where a loop ran them
  uint64_t alone = 0;     // nodes that no other one ran with
  // What tells rows of one op and line apart, besides shapes and rule.
  uint64_t position = 0;            // what of the line, as whoever embeds the library counts
  uint64_t serial = 0;              // of the signature
  uint64_t weights = 0;             // a hash of which tensors the weights are
  uint64_t context = 0;             // grad mode, autocast
  const Signature* kind = nullptr;  // the library's own; null once its tables are gone
};

// A flush; of very many in one block, several for one reason at one line.
struct FlushReport {
  std::string reason;
  std::string site;
  uint64_t nodes = 0;  // of all of them
  uint64_t count = 0;
  uint64_t batches = 0;  // of all of them
  std::string caller;    // of whoever embeds the library (current_caller in host_hooks.h)
};

// An op that was not deferred.
struct AtOnceReport {
  std::string op;
  std::string reason;
  std::string site;
  uint64_t count = 0;
  std::string caller;  // as FlushReport's
};

// A place where ops ran at once from then on, since deferring did not pay (ScopeOptions::adaptive).
struct PauseReport {
  std::string site;
  uint64_t count = 0;
  uint64_t calls = 0;     // of functions and modules, until the scope captured again
  bool measured = false;  // by the clock: a whole block, or a map, was faster eagerly
};

// The scheduler's input, kept until somebody asks for the lower bound.
struct BoundInput {
  std::shared_ptr<const void> memory;  // of these three
  std::span<const uint32_t> signature;
  std::span<const uint32_t> input_begin;
  std::span<const uint32_t> inputs;
  std::vector<uint8_t> batchable;
};

class Report {
 public:
  uint64_t ops = 0;    // captured as nodes
  uint64_t views = 0;  // captured as address arithmetic
  uint64_t nodes = 0;  // run: captured ones less those that nobody needed
  uint64_t batches = 0;
  uint64_t launches = 0;
  uint64_t inferred = 0;  // calls whose results' shapes were found out by trying
  uint64_t num_flushes = 0;
  uint64_t checks = 0;          // of values, that waited for a flush
  uint64_t backward_calls = 0;  // `backward()` started inside the block
  uint64_t gradients = 0;       // calls of `autograd.grad` that were captured
  // Ops of the longest chain in which each reads the one before, over all flushes; 0 if the only
  // one is that of the end.
  uint64_t depth = 0;
  bool is_open = false;        // the scope is
  bool defers_checks = false;  // those of all code (ScopeOptions)
  std::vector<SignatureReport> signatures;
  std::vector<FlushReport> flushes;
  std::vector<AtOnceReport> at_once;
  std::vector<PauseReport> pauses;
  std::shared_ptr<Trace> trace;  // with ScopeOptions::profile

  uint64_t launches_saved() const { return nodes - launches; }
  // The fewest batches any schedule needs: unbatchable nodes, and for each signature the most
  // nodes of it on any one path, summed over the flushes.
  AUTOBATCH_API uint64_t lower_bound() const;
  // A table for people.
  AUTOBATCH_API std::string to_string() const;

  // The row of a signature (by its serial number) as run by `rule`; null if it is new. When there
  // are very many, the rest share one row.
  SignatureReport* find(uint64_t serial, std::string_view rule);
  SignatureReport& add(uint64_t serial, SignatureReport row);
  void add_flush(FlushReport flush);
  // The strings are known by their addresses, for this is asked at every read.
  void add_at_once(const std::string& op, const char* reason, AtOnceReport row);
  bool knows_at_once(const std::string& op, const char* reason);
  void add_pause(const std::string& site, bool measured = false);
  // That ran in the pause which was added last.
  void add_paused_calls(uint64_t calls);
  void add_bound_input(BoundInput input);
  // Keeps the tables that the rows' signatures live in. Rows of earlier tables lose `kind`, so that
  // a scope that is open for long does not hold on to old tables.
  void keep(const std::shared_ptr<const void>& tables);

 private:
  std::map<std::pair<uint64_t, std::string>, size_t> index_;             // of signatures
  std::map<std::pair<const void*, const void*>, size_t> at_once_index_;  // by op and reason
  std::map<std::string, size_t> flush_index_;                            // by reason and line
  size_t last_pause_ = 0;
  std::shared_ptr<const void> tables_;
  mutable std::vector<BoundInput> bound_inputs_;
  mutable uint64_t bound_ = 0;
};

}  // namespace autobatch
