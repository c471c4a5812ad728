// The scope. While a scope is open on a thread, the ops of this thread are captured.
#pragma once

#include "autobatch/capture/autocast.h"
#include "autobatch/capture/call_cache.h"
#include "autobatch/capture/known_values.h"
#include "autobatch/capture/memory_updates.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/execute/flush.h"
#include "autobatch/export.h"
#include "autobatch/graph/eager_estimate.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/intern_tables.h"
#include "autobatch/graph/signature.h"
#include "autobatch/graph/slice_costs.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/options.h"
#include "autobatch/plan/deferred_checks.h"
#include "autobatch/report.h"
#include "autobatch/schedule.h"
#include "autobatch/scope/payoff.h"

#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace autobatch {

class BlockHistory;
class ReadRecords;
class Trials;
class Verifier;

// A recursive spin lock. One thread takes it repeatedly, and there is almost never contention.
class RecursiveSpinLock {
 public:
  bool try_lock();
  void lock();
  void unlock();
  // Releases the lock completely. Returns how many times this thread held the lock, so that the
  // caller can later take the lock the same number of times.
  int unlock_all();

 private:
  std::atomic<const void*> owner_{nullptr};  // identifies the thread that holds the lock, or null
  int depth_ = 0;
};

// Interned shapes, signatures and cached calls. The tables exist longer than a scope, so that a
// training loop handles each shape only once.
struct Tables : InternTables {
  CallCache calls;
};

// The capture state of one thread. Nested BatchScopes share one Scope.
class Scope : public std::enable_shared_from_this<Scope> {
 public:
  AUTOBATCH_INTERNAL explicit Scope(const ScopeOptions& options);
  AUTOBATCH_INTERNAL ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  // Returns the scope open on this thread, or null. The scope may be paused.
  AUTOBATCH_INTERNAL static Scope* current();

  // A thread must hold the lock to capture into this scope's graph or to flush the graph, because
  // other threads may read the scope's pending tensors at any time.
  class Lock {
   public:
    explicit Lock(Scope& scope);
    ~Lock() { release(); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void release();

   private:
    Scope* scope_;
  };

  // Starts capturing on this thread. If a scope is already open on this thread, joins the open
  // scope. Returns the open scope.
  AUTOBATCH_INTERNAL std::shared_ptr<Scope> enter();
  // Raises an error if the scope is not open, or if it was opened on another thread.
  AUTOBATCH_INTERNAL void check_thread() const;
  // Reverses `enter`. The outermost exit flushes. `discard_errors` must be true if another
  // exception is already propagating. If `discard_errors` is true, the error of a failed flush is
  // not raised. The error of a failed check is always raised, and takes precedence over the error
  // of the flush.
  AUTOBATCH_INTERNAL void exit(bool discard_errors = false);

  // Computes all pending tensors. Raises the first error of a captured op. Tensors that depend on
  // the failed op are lost, and raise an error when they are used. Other tensors can be used.
  AUTOBATCH_INTERNAL void flush(const std::string& reason = "scope.flush()");

  // If there are `max_pending` pending nodes, computes about half of them.
  void relieve();

  // Computes the given tensors that belong to this scope, and the nodes that these tensors depend
  // on. Other nodes stay pending, unless they join the same batches. The result of a captured
  // factory is created without a flush. With `values_only`, the tensors themselves may stay
  // pending, and `element_of` returns the addresses of their values.
  void compute(at::ArrayRef<PendingTensor*> tensors, const std::string& reason,
               bool values_only = false);
  // Runs ready batches for about the time `bound` (graph/slice_costs.h), and leaves their tensors
  // pending. Returns false if no node was ready. Raises errors as `flush` does.
  bool run_slice(std::chrono::nanoseconds bound);
  // Whether the tensor's value is computed, although the tensor is still pending.
  AUTOBATCH_INTERNAL bool is_computed(const PendingTensor& tensor) const;
  // Whether the tensor is pending and can be created without a flush: the result of a factory
  // (zeros, full) or the copy of a number.
  bool is_constant(const at::Tensor& tensor) const;
  // Returns the address of the first element of a pending tensor; null if its value is not computed
  // yet.
  const void* element_of(const PendingTensor& tensor);

  // --- deferred checks (deferred_checks.h) ---

  DeferredChecks& checks() { return checks_; }
  // Defers a check of the running code. The check fails if the truth value of `asked` is not
  // `expected`. This thread's next flush computes `asked`. If the check failed, the flush raises
  // the error of the check instead of any other error. Each later flush and the end of the block
  // (or fiber) raise the same error again.
  AUTOBATCH_INTERNAL void check_later(const at::Tensor& asked, bool expected,
                                      std::unique_ptr<Check> check);
  // Computes the values of all deferred checks. Raises the error of a failed check of the running
  // code.
  AUTOBATCH_INTERNAL void settle_checks(const std::string& reason);
  // Whether a deferred check waits for a value in the memory of this tensor.
  bool is_checked(const at::Tensor& tensor) const;
  // Returns DeferredChecks::failure_of(owner). No fiber is suspended during the call.
  AUTOBATCH_INTERNAL std::exception_ptr failed_check(DeferredChecks::Owner owner);

  // --- blocks that are not worth deferring (payoff.h) ---

  // Must be called right after the outermost `enter`. `history` contains the statistics of the
  // blocks opened at the same place of the program. For `identity` see Trials::Identity.
  AUTOBATCH_INTERNAL void begin_block(std::shared_ptr<BlockHistory> history,
                                      const std::function<uint64_t()>& identity);
  // Like begin_block(), but for a map, which may also run inside a block. Returns whether the
  // instances run eagerly, as in a loop.
  AUTOBATCH_INTERNAL bool begin_map(std::shared_ptr<BlockHistory> history,
                                    const std::function<uint64_t()>& identity);
  // Ends a pause: ops are captured again.
  void resume();
  // Marks that a map runs. The instances of a map wait for each other, so the scope does not pause
  // while the map runs.
  class MapMark {
   public:
    explicit MapMark(Scope& scope) : scope_(scope) {
      scope_.resume();
      ++scope_.maps_;
    }
    ~MapMark() { --scope_.maps_; }
    MapMark(const MapMark&) = delete;
    MapMark& operator=(const MapMark&) = delete;

   private:
    Scope& scope_;
  };

  // --- for fibers (fibers.h) ---

  // Whether this thread runs a flush.
  static bool is_flushing();
  // Releases all locks that this thread holds on the scope, and returns their number. `lock` later
  // takes the lock the same number of times.
  int unlock() { return mutex_.unlock_all(); }
  void lock(int times);
  // Returns the error that caused the loss of the tensor. Returns null if the error was not kept
  // (see LossesKept).
  AUTOBATCH_INTERNAL std::exception_ptr loss_of(const PendingTensor& tensor) const;
  // Drops the kept errors. A scope that stays open for a long time calls this function when it does
  // not need the errors any more.
  void forget_losses() { losses_.clear(); }
  // Whether the interned tables are so large that they are replaced when nothing is pending.
  bool is_full() const;
  // While an instance of this class exists, the scope keeps the errors that caused the loss of
  // tensors (loss_of). Afterwards the errors are dropped, because an error may hold references to
  // the stack frames that it passed through.
  class LossesKept {
   public:
    explicit LossesKept(Scope& scope) : scope_(scope) { ++scope_.losses_kept_; }
    ~LossesKept() {
      if (--scope_.losses_kept_ == 0) scope_.losses_.clear();
    }
    LossesKept(const LossesKept&) = delete;
    LossesKept& operator=(const LossesKept&) = delete;

   private:
    Scope& scope_;
  };

  const Report& report() const { return report_; }
  Report& report() { return report_; }
  // Returns a pointer that keeps the report alive after the scope is destroyed.
  const std::shared_ptr<Report>& shared_report() const { return shared_report_; }
  Graph& graph() { return *graph_; }
  const Graph& graph() const { return *graph_; }
  Tables& tables() { return *tables_; }
  const Tables& tables() const { return *tables_; }
  CellTable& cells() { return cells_; }
  CastCache& casts() { return casts_; }
  KnownValues& known_values() { return known_; }
  MemoryUpdates& updates() { return updates_; }
  const ScopeOptions& options() const { return options_; }
  const at::ThreadLocalState& clean_state() const { return *clean_; }
  const std::shared_ptr<Tables>& shared_tables() const { return tables_; }
  // Adds an op that runs eagerly to the report, with the line of code that is running. The report
  // identifies `op` and `reason` by their addresses.
  AUTOBATCH_INTERNAL void note_at_once(const std::string& op, const char* reason);
  // Keeps the object alive until all nodes that are pending at the time of the call have run.
  AUTOBATCH_INTERNAL void keep(std::shared_ptr<void> object);
  // Returns null unless options().verify is true.
  Verifier* verifier() { return verifier_.get(); }
  ReadRecords& read_records() { return *read_records_; }
  // Must be called before a write to an ordinary tensor.
  void before_write(const at::Tensor& to);
  // Returns a number that is never 0 and is unique among the scopes of this process.
  uint64_t id() const { return id_; }
  bool is_open() const { return depth_ > 0; }
  int depth() const { return depth_; }  // number of open blocks
  // Whether only one block is open, so that the next `exit` ends the scope.
  bool is_outermost() const { return depth_ == 1; }
  // Whether the scope was opened inside a functorch transform. Such a scope captures nothing,
  // because the transform must handle each op.
  bool is_passive() const { return passive_; }

 private:
  FlushOptions flush_options(const std::string& reason);
  // Returns the tensors that still need a flush. Tensors that need no flush are created
  // immediately.
  using Waiting = c10::SmallVector<PendingTensor*, 4>;
  Waiting still_waiting(at::ArrayRef<PendingTensor*> tensors, bool values_only);
  C10_NOINLINE void compute_now(at::ArrayRef<PendingTensor*> waiting, const std::string& reason,
                                bool values_only);
  // Runs the flush, and then applies the updates that wait for the flush's values.
  void run_flush(at::ArrayRef<ValueId> targets, const FlushOptions& options);
  bool is_fresh(const PendingTensor& tensor) const;
  void make_alone(PendingTensor& tensor);
  bool is_own_thread() const;
  void flush_all(const std::string& reason);
  void look_at_checks();
  void raise_failed_check(const std::exception_ptr& error);
  void check_not_lent() const;
  // Records a read of the running code (payoff.h). `nodes_before` and `batches_before` are the
  // report's counts before the read.
  void add_read(uint64_t nodes_before, uint64_t batches_before, const std::string& reason);
  bool may_pause() const;
  // Pauses for this many calls.
  void pause(uint64_t calls);
  // Begins the trial of a block or map. Returns whether the block or map runs eagerly.
  bool begin_trial(bool is_map, const std::function<uint64_t()>& identity);
  void end_block(bool failed);

  uint64_t id_;
  ScopeOptions options_;
  std::unique_ptr<const Policy> own_policy_;
  const Policy* policy_;
  std::shared_ptr<Tables> tables_;
  CellTable cells_;
  CastCache casts_;
  WeightCopies weight_copies_;  // shared by all flushes
  KnownValues known_;
  MemoryUpdates updates_;
  std::unique_ptr<Graph> graph_;
  const std::shared_ptr<Report> shared_report_ = std::make_shared<Report>();
  Report& report_ = *shared_report_;
  std::unique_ptr<Verifier> verifier_;
  std::unique_ptr<ReadRecords> read_records_;
  std::unique_ptr<at::ThreadLocalState> clean_;  // state of the thread before capture began
  RecursiveSpinLock mutex_;
  DeferredChecks checks_;
  const void* own_thread_ = nullptr;  // identifies the thread that opened the scope
  std::unordered_set<std::shared_ptr<void>> kept_;
  std::vector<OpFailure> losses_;
  int losses_kept_ = 0;
  int depth_ = 0;
  int maps_ = 0;
  bool passive_ = false;
  Payoff payoff_;
  SliceCosts slice_costs_;
  std::shared_ptr<BlockHistory> history_;
  Trials* trials_ = nullptr;  // the trials in history_ for this block; null: none
  EagerEstimate estimate_;
  bool estimates_ = false;
  bool is_eager_ = false;      // whether the whole block runs eagerly
  uint64_t calls_before_ = 0;  // CaptureState::calls when the block began
  uint64_t paused_at_ = 0;     // CaptureState::calls when the pause began
};

// Calls Scope::compute of the scope that owns the graph.
void compute_owned(at::ArrayRef<PendingTensor*> tensors, const Graph& graph,
                   const std::string& reason);

}  // namespace autobatch
