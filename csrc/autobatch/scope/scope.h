// The scope: while one is open on a thread, that thread's ops are captured.
#pragma once

#include "autobatch/capture/autocast.h"
#include "autobatch/capture/call_cache.h"
#include "autobatch/capture/known_values.h"
#include "autobatch/capture/running_statistics.h"
#include "autobatch/cells/cell_template.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/execute/flush.h"
#include "autobatch/export.h"
#include "autobatch/graph/eager_estimate.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/intern_tables.h"
#include "autobatch/graph/signature.h"
#include "autobatch/graph/slice_costs.h"
#include "autobatch/options.h"
#include "autobatch/plan/checks.h"
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
#include <string_view>
#include <vector>

namespace autobatch {

class BlockHistory;
class ReadMemory;
class Trials;
class Verifier;

// A recursive mutex for a lock that one thread takes over and over, hardly ever against another.
class RecursiveSpinLock {
 public:
  bool try_lock();
  void lock();
  void unlock();
  // Lets go what this thread holds, for `lock` to take it again so many times.
  int unlock_all();

 private:
  std::atomic<const void*> owner_{nullptr};  // something that only the owner's thread has
  int depth_ = 0;
};

// What is interned: outlives a scope, so that a training loop pays for each shape once.
struct Tables : InternTables {
  CallMemo memo;
};

// The capturing state of one thread. Nested BatchScopes share one.
class Scope : public std::enable_shared_from_this<Scope> {
 public:
  AUTOBATCH_INTERNAL explicit Scope(const ScopeOptions& options);
  AUTOBATCH_INTERNAL ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  // The scope open on this thread, which may be paused, or null.
  AUTOBATCH_INTERNAL static Scope* current();

  // Held by whoever captures into, or flushes, this scope's graph: other threads may read its
  // pending tensors at any time.
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

  // Starts capturing on this thread. Where a scope is open already this one joins it; the one in
  // effect is returned.
  AUTOBATCH_INTERNAL std::shared_ptr<Scope> enter();
  // Raises where the scope can't be closed: it is not open, or not on this thread.
  AUTOBATCH_INTERNAL void check_thread() const;
  // The reverse of enter. The outermost exit flushes; if `discard_errors`, a failing flush is not
  // reported (an exception is on its way already), but the failure of a check is, which comes
  // first.
  AUTOBATCH_INTERNAL void exit(bool discard_errors = false);

  // Computes everything pending. Raises the first error of a captured op; what was computed
  // before it is usable, what was not is lost and says so when used.
  AUTOBATCH_INTERNAL void flush(const std::string& reason = "scope.flush()");

  // Computes half of what is pending, where more of it than `max_pending` allows is.
  void relieve();

  // Computes what those of the tensors that are this scope's wait for; the rest stays pending, but
  // for what joins in the same batches. A captured factory's result is made alone.
  // `values_only`: the tensors themselves may stay pending, where `element_of` gives what they
  // stand for.
  void compute(at::ArrayRef<PendingTensor*> tensors, const std::string& reason,
               bool values_only = false);
  // Runs what is ready for about so long (graph/slice_costs.h), and leaves it pending. False: there
  // was nothing. Raises as `flush` does.
  bool run_slice(std::chrono::nanoseconds bound);
  // Whether its elements lie somewhere, though it is still pending.
  bool is_computed(const PendingTensor& tensor) const;
  // Whether it is pending, and what a factory (zeros, full) makes: it can be made alone.
  bool is_constant(const at::Tensor& tensor) const;
  // Where the first element of a pending tensor lies that was computed; null if there is none yet.
  const void* element_of(const PendingTensor& tensor);

  // --- checks that wait (checks.h) ---

  Checks& checks() { return checks_; }
  // Of the code that runs: the tensor's truth is `expected`, or the check has failed. This thread's
  // next flush computes it and raises the error, before anything else, and again each flush after
  // it and the end of the block (or the fiber).
  AUTOBATCH_INTERNAL void check_later(const at::Tensor& asked, bool expected,
                                      std::unique_ptr<Check> check);
  // Computes what checks wait for. Raises what has failed of the code that runs.
  AUTOBATCH_INTERNAL void settle_checks(const std::string& reason);
  // Whether a check waits for a value that stands in the memory of this tensor.
  bool is_checked(const at::Tensor& tensor) const;
  // Checks::failure_of; what that runs is not suspended.
  AUTOBATCH_INTERNAL std::exception_ptr failed_check(Checks::Owner owner);

  // --- where deferring does not pay (payoff.h) ---

  // Right after the outermost `enter`: what is known of blocks opened at that place.
  AUTOBATCH_INTERNAL void begin_block(std::shared_ptr<BlockHistory> history,
                                      const std::function<uint64_t()>& identity);
  // The same of a map: also where it is in a block. Whether instances are to run as in a loop.
  AUTOBATCH_INTERNAL bool begin_map(std::shared_ptr<BlockHistory> history,
                                    const std::function<uint64_t()>& identity);
  // Captures again.
  void resume();
  // While one lives instances of a map wait for each other, and the scope does not pause.
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
  // All locks that this thread holds on the scope, and as many again.
  int unlock() { return mutex_.unlock_all(); }
  void lock(int times);
  // What made a tensor be lost, while the causes are kept.
  AUTOBATCH_INTERNAL std::exception_ptr loss_of(const PendingTensor& tensor) const;
  // Those that nobody will ask for any more; of a scope that is open for long.
  void forget_losses() { losses_.clear(); }
  // Whether what was interned has become so much that it is to go once nothing is pending.
  bool is_full() const;
  // From now on ops run at once for so many calls, where nothing is pending. Until `resume`.
  void pause_for(uint64_t calls);
  // Keeps the causes. Not for good: an error may hold on to the frames that it passed through.
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
  // For whoever asks for it after the scope is gone.
  const std::shared_ptr<Report>& shared_report() const { return shared_report_; }
  Graph& graph() { return *graph_; }
  const Graph& graph() const { return *graph_; }
  Tables& tables() { return *tables_; }
  CellTable& cells() { return cells_; }
  CastCache& casts() { return casts_; }
  KnownValues& known_values() { return known_; }
  std::deque<StatisticsUpdate>& updates() { return updates_; }
  const ScopeOptions& options() const { return options_; }
  const at::ThreadLocalState& clean_state() const { return *clean_; }
  const std::shared_ptr<Tables>& shared_tables() const { return tables_; }
  // For the report, with the line that is running. The strings are known by their addresses.
  AUTOBATCH_INTERNAL void note_at_once(const std::string& op, const char* reason);
  // Until what is pending now has run.
  AUTOBATCH_INTERNAL void keep(std::shared_ptr<void> object);
  // Null unless options().verify.
  Verifier* verifier() { return verifier_.get(); }
  ReadMemory& read_memory() { return *read_memory_; }
  // Never 0, and never that of another scope of this process.
  uint64_t id() const { return id_; }
  bool is_open() const { return depth_ > 0; }
  // Opened once, so whoever closes it next ends it.
  bool is_outermost() const { return depth_ == 1; }
  // Opened inside a functorch transform, which must see each op: captures nothing.
  bool is_passive() const { return passive_; }

 private:
  FlushOptions flush_options(const std::string& reason);
  // Those of the tensors that are not there yet. What can be made alone is made.
  using Waiting = c10::SmallVector<PendingTensor*, 4>;
  Waiting still_waiting(at::ArrayRef<PendingTensor*> tensors, bool values_only);
  C10_NOINLINE void compute_now(at::ArrayRef<PendingTensor*> waiting, const std::string& reason,
                                bool values_only);
  // The flush itself, and what waits for values of it.
  void run_flush(at::ArrayRef<ValueId> targets, const FlushOptions& options);
  bool is_fresh(const PendingTensor& tensor) const;
  void make_alone(PendingTensor& tensor);
  bool is_own_thread() const;
  void flush_all(const std::string& reason);
  void look_at_checks();
  void raise_failed_check(const std::exception_ptr& error);
  void check_not_lent() const;
  // After a read of the code that runs, which began with these counts in the report.
  void add_read(uint64_t nodes_before, uint64_t batches_before, const std::string& reason);
  bool may_pause() const;
  // For so many calls.
  void pause(uint64_t calls);
  // Whether the block or map runs eagerly.
  bool begin_trial(const std::function<uint64_t()>& identity);
  void end_block(bool failed);

  uint64_t id_;
  ScopeOptions options_;
  std::unique_ptr<const Policy> own_policy_;
  const Policy* policy_;
  std::shared_ptr<Tables> tables_;
  CellTable cells_;
  CastCache casts_;
  KnownValues known_;
  std::deque<StatisticsUpdate> updates_;
  std::unique_ptr<Graph> graph_;
  const std::shared_ptr<Report> shared_report_ = std::make_shared<Report>();
  Report& report_ = *shared_report_;
  std::unique_ptr<Verifier> verifier_;
  std::unique_ptr<ReadMemory> read_memory_;
  std::unique_ptr<at::ThreadLocalState> clean_;  // of the thread before capture began
  RecursiveSpinLock mutex_;
  Checks checks_;
  const void* own_thread_ = nullptr;  // that it is open on
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<OpFailure> losses_;
  int losses_kept_ = 0;
  int depth_ = 0;
  int maps_ = 0;
  bool passive_ = false;
  Payoff payoff_;
  SliceCosts slice_costs_;
  std::shared_ptr<BlockHistory> history_;
  Trials* trials_ = nullptr;  // of the history; null: none
  EagerEstimate estimate_;
  bool estimates_ = false;
  bool is_eager_ = false;      // for the whole of the block
  uint64_t calls_before_ = 0;  // the block
  uint64_t paused_at_ = 0;     // of the thread's calls
};

// Scope::compute of the scope that the graph belongs to.
void compute_owned(at::ArrayRef<PendingTensor*> tensors, const Graph& graph,
                   const std::string& reason);

}  // namespace autobatch
