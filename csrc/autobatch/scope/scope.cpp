#include "autobatch/scope/scope.h"

#include "autobatch/backward/autograd_nodes.h"
#include "autobatch/backward/backward.h"
#include "autobatch/backward/overwrites.h"
#include "autobatch/capture/capture.h"
#include "autobatch/capture/deferred_writes.h"
#include "autobatch/capture/variable_hooks.h"
#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/common/plain_state.h"
#include "autobatch/debug/trace.h"
#include "autobatch/debug/verify.h"
#include "autobatch/execute/flush.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/tensor_views.h"
#include "autobatch/graph/thread_state.h"
#include "autobatch/rules/factories.h"

#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/InferenceMode.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

namespace autobatch {
namespace {

std::atomic<uint64_t> next_scope_id{0};
thread_local std::shared_ptr<Tables> thread_tables;
thread_local int flushes_under_way = 0;

struct FlushMark {
  FlushMark() { ++flushes_under_way; }
  ~FlushMark() { --flushes_under_way; }
};

// Tables with more than kMaxInterned shapes or signatures are replaced when no graph refers to
// them.
constexpr size_t kMaxInterned = 1 << 15;

bool is_full(const Tables& tables) {
  return tables.signatures.size() > kMaxInterned || tables.geometries->size() > kMaxInterned;
}

std::shared_ptr<Tables> tables_of_thread() {
  if (thread_tables == nullptr || is_full(*thread_tables)) {
    thread_tables = std::make_shared<Tables>();
  }
  return thread_tables;
}

// Maps each graph to the scope that owns the graph. There are few graphs, and only slow paths look
// up the owner.
std::mutex owners_mutex;
std::unordered_map<const Graph*, Scope*>& owners() {
  static auto* map = new std::unordered_map<const Graph*, Scope*>();
  return *map;
}

// A custom policy (ScopeOptions::own_policy). Its schedules are validated, so that an error in the
// policy cannot lead to wrong values.
class CheckedPolicy final : public Policy {
 public:
  explicit CheckedPolicy(std::shared_ptr<const Policy> policy) : policy_(std::move(policy)) {}
  std::string_view name() const override { return policy_->name(); }
  Schedule schedule(const ScheduleInput& graph) const override {
    Schedule made = policy_->schedule(graph);
    validate(graph, made);
    return made;
  }

 private:
  std::shared_ptr<const Policy> policy_;
};

void stop_capturing() {
  c10::impl::tls_set_dispatch_key_included(compat::kDeferKey, false);
  capture_state.scope = capture_state.paused = nullptr;
}

void check_may_flush(const Scope& scope, const std::string& reason) {
  TORCH_CHECK(capture_state.may_flush || capture_state.scope != &scope,
              "torch_autobatch: a flush is not allowed here: ", reason);
}

}  // namespace

// Returns a pointer that identifies this thread. pthread_self() is cheaper than the address of a
// thread-local variable.
static const void* this_thread() { return reinterpret_cast<const void*>(pthread_self()); }

bool RecursiveSpinLock::try_lock() {
  const void* self = this_thread();
  const void* owner = owner_.load(std::memory_order_relaxed);
  if (owner != self) {
    if (owner != nullptr) return false;
    if (!owner_.compare_exchange_strong(owner, self, std::memory_order_acquire)) return false;
  }
  ++depth_;
  return true;
}

void RecursiveSpinLock::lock() {
  for (int tries = 0; !try_lock(); ++tries) {
    tries < 100 ? std::this_thread::yield()
                : std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void RecursiveSpinLock::unlock() {
  if (--depth_ == 0) owner_.store(nullptr, std::memory_order_release);
}

int RecursiveSpinLock::unlock_all() {
  if (owner_.load(std::memory_order_relaxed) != this_thread()) return 0;
  const int held = std::exchange(depth_, 0);
  owner_.store(nullptr, std::memory_order_release);
  return held;
}

Scope::Scope(const ScopeOptions& options)
    : id_(++next_scope_id),
      options_(options),
      own_policy_(options.own_policy ? std::make_unique<CheckedPolicy>(options.own_policy)
                                     : nullptr),
      policy_(own_policy_ ? own_policy_.get() : &find_policy(options.policy)),
      tables_(tables_of_thread()),
      graph_(std::make_unique<Graph>(tables_->geometries)),
      verifier_(options.verify ? std::make_unique<Verifier>() : nullptr),
      read_records_(std::make_unique<ReadRecords>()) {
  if (options.profile) report_.trace = std::make_shared<Trace>();
  const std::lock_guard<std::mutex> lock(owners_mutex);
  owners()[graph_.get()] = this;
}

Scope::~Scope() {
  {
    const std::lock_guard<std::mutex> lock(owners_mutex);
    owners().erase(graph_.get());
  }
  if (current() == this) stop_capturing();
}

Scope::Lock::Lock(Scope& scope) : scope_(&scope) {
  if (scope.mutex_.try_lock()) return;
  // The thread that holds the lock may need the GIL, which this thread may hold.
  host_wait([&] { scope.mutex_.lock(); });
}

void Scope::Lock::release() {
  if (Scope* scope = std::exchange(scope_, nullptr)) scope->mutex_.unlock();
}

void Scope::lock(int times) {
  if (times == 0) return;
  if (!mutex_.try_lock()) host_wait([&] { mutex_.lock(); });
  while (--times > 0) mutex_.lock();
}

Scope* Scope::current() {
  return capture_state.scope != nullptr ? capture_state.scope : capture_state.paused;
}

std::shared_ptr<Scope> Scope::enter() {
  if (Scope* open = current()) {
    ++open->depth_;
    return open->shared_from_this();
  }
  register_capture();
  install_variable_hooks();
  clean_ = std::make_unique<at::ThreadLocalState>();
  passive_ = !at::functorch::getDynamicLayerStack().empty();
  capture_state.scope = this;
  own_thread_ = this_thread();
  depth_ = 1;
  report_.is_open = true;
  c10::impl::tls_set_dispatch_key_included(compat::kDeferKey, true);
  return shared_from_this();
}

void Scope::check_thread() const {
  TORCH_CHECK(current() == this && depth_ > 0,
              "torch_autobatch: a scope can be closed only on the thread that opened it, and only "
              "while it is open.");
}

void Scope::exit(bool discard_errors) {
  check_thread();
  if (--depth_ > 0) return;
  resume();  // ends a pause, so that the report counts the calls of the pause
  stop_capturing();
  report_.is_open = false;
  std::exception_ptr error;
  try {
    flush_all("the end of the block");
  } catch (...) {
    error = std::current_exception();
  }
  end_block(discard_errors || error);
  look_at_checks();
  const std::exception_ptr failed = failed_check(0);
  checks_.clear();
  if (failed) std::rethrow_exception(failed);
  if (error && !discard_errors) std::rethrow_exception(error);
}

bool Scope::is_own_thread() const { return own_thread_ == this_thread(); }

std::exception_ptr Scope::failed_check(DeferredChecks::Owner owner) {
  if (!checks_.has_failed(owner)) return nullptr;
  const FlushMark mark;
  return checks_.failure_of(owner);
}

bool Scope::is_computed(const PendingTensor& tensor) const {
  if (tensor.graph() != graph_.get()) return false;
  const Value& value = graph_->value(tensor.value());
  if (value.is_graph_input() || !graph_->is_computed(value.node)) return false;
  return graph_->memory_of(value.base) == nullptr;  // no captured op has written to this memory
}

const void* Scope::element_of(const PendingTensor& tensor) {
  const Lock lock(*this);
  if (!is_computed(tensor)) return nullptr;
  return graph_->open_record()->store.region(graph_->tape(), tensor.value()).address();
}

// Returns a text that says why the running fiber cannot wait for other fibers. The text is part of
// the reason of a flush.
static std::string kept_turn() {
  const Fiber* fiber = Fiber::current();
  if (fiber == nullptr || fiber->turn_kept_by().empty()) return "";
  return " (the instance does not wait for others, because it has set " + fiber->turn_kept_by() +
         ")";
}

void Scope::compute(at::ArrayRef<PendingTensor*> tensors, const std::string& reason,
                    bool values_only) {
  const Waiting waiting = still_waiting(tensors, values_only);
  if (waiting.empty()) return;
  check_may_flush(*this, reason);
  CellTrace::note_read(reason);
  std::exception_ptr error;
  const uint64_t nodes = report_.nodes, batches = report_.batches;
  try {
    Fiber* fiber = this == capture_state.scope ? Fiber::suspendable() : nullptr;
    if (fiber == nullptr || !fiber->wait_for(waiting, reason, values_only)) {
      const std::string full_reason = reason + kept_turn();
      compute_now(waiting, full_reason, values_only);
      add_read(nodes, batches, full_reason);
    }
  } catch (const std::exception& raised) {
    if (checks_.is_empty() || host_interrupts(raised)) throw;
    error = std::current_exception();
  }
  if (!checks_.is_empty()) raise_failed_check(error);
}

// Whether a later op reads the memory of the value. To limit the time of the search, also returns
// true if there are more than kMostNodes later ops.
static bool is_read(const Tape& tape, ValueId id) {
  constexpr size_t kMostNodes = 4096;
  const Value& value = tape.values[id];
  if (tape.nodes.size() - value.node > kMostNodes) return true;
  for (NodeId n = value.node + 1; n < tape.nodes.size(); ++n) {
    for (const ValueId operand : tape.operands_of(tape.nodes[n])) {
      if (operand != kNone && tape.values[operand].base == value.base) return true;
    }
  }
  return false;
}

Scope::Waiting Scope::still_waiting(at::ArrayRef<PendingTensor*> tensors, bool values_only) {
  Waiting waiting;
  const Lock lock(*this);
  check_not_lent();
  for (PendingTensor* tensor : tensors) {
    if (tensor->graph() != graph_.get()) continue;  // not pending in this scope
    if (values_only && is_computed(*tensor)) continue;
    // If an op saves the memory for backward, a write through `x.data` must change this memory.
    const bool alone = is_fresh(*tensor) && !is_read(graph_->tape(), tensor->value());
    alone ? make_alone(*tensor) : waiting.push_back(tensor);
  }
  return waiting;
}

// compute_now() is not inlined into compute(), because the stack frame of compute() is copied when
// a fiber is suspended.
void Scope::compute_now(at::ArrayRef<PendingTensor*> waiting, const std::string& reason,
                        bool values_only) {
  const Lock lock(*this);
  check_not_lent();
  const FlushMark mark;
  settle_all(*this);
  std::vector<ValueId> targets;
  for (const PendingTensor* tensor : waiting) {
    if (tensor->graph() == graph_.get()) targets.push_back(tensor->value());
  }
  if (targets.empty()) return;  // another thread has computed the tensors
  if (checks_.any_waiting() && is_own_thread()) {
    for (const PendingTensor* asked : checks_.asked()) {
      if (asked->graph() == graph_.get() && !is_computed(*asked)) targets.push_back(asked->value());
    }
  }
  if (verifier_ != nullptr) targets.clear();  // the verifier identifies values by number
  FlushOptions options = flush_options(reason);
  options.values_only = values_only;
  run_flush(targets, options);
}

// Runs a part of the graph, and applies the updates that wait for its values, even after an error.
template <class Run>
static void run_and_update(Scope& scope, const Run& run) {
  try {
    run();
  } catch (...) {
    apply_updates(scope);
    throw;
  }
  apply_updates(scope);
}

void Scope::run_flush(at::ArrayRef<ValueId> targets, const FlushOptions& options) {
  run_and_update(*this, [&] { flush_pending(*graph_, targets, options); });
}

// Raises an error if a flush is using the graph's tape. Python code may run inside a flush, through
// the garbage collector or a custom op.
void Scope::check_not_lent() const {
  TORCH_CHECK(!graph_->is_lent(),
              "torch_autobatch: code that runs during a flush (a __del__ method or a custom op) "
              "read a tensor whose value has not been computed yet");
}

bool Scope::is_constant(const at::Tensor& tensor) const {
  const PendingTensor* pending = as_pending(tensor);
  if (pending == nullptr || pending->graph() != graph_.get() || !is_fresh(*pending)) return false;
  return graph_->value(pending->value()).base == pending->value();
}

// Whether the tensor is the result of a factory or the copy of a number (number_tensors.h), and no
// op has written to it. A view is also accepted if no other tensor that uses this memory exists, as
// in `nn.Parameter(torch.empty(n))`.
bool Scope::is_fresh(const PendingTensor& tensor) const {
  if (!graph_->is_fresh(tensor.value())) return false;
  const Value& base = graph_->value(graph_->value(tensor.value()).base);
  const Signature& signature = *graph_->tape().nodes[base.node].signature;
  if (is_factory(signature)) return true;
  return signature.op->name == "aten::clone" && base.geometry->sizes.empty();
}

void Scope::make_alone(PendingTensor& tensor) {
  const Value value = graph_->value(tensor.value());
  const Value& base = graph_->value(value.base);
  const Node& node = graph_->tape().nodes[base.node];
  const PlainStateGuard plain;
  const c10::InferenceMode inference(node.signature->context.inference_mode);
  at::Tensor made;
  if (is_factory(*node.signature)) {
    made = create_alone(*node.signature, base);
  } else {
    const Value& copied = graph_->value(graph_->tape().operands_of(node)[0]);
    const at::Tensor& input = graph_->tape().graph_inputs[copied.index].data;
    made = strided_view(input, {}, {}, copied.offset).clone();
  }
  graph_->detach(tensor.value());
  tensor.become(made, value.offset);
}

void Scope::flush(const std::string& reason) {
  std::exception_ptr error;
  try {
    flush_all(reason);
  } catch (const std::exception& raised) {
    if (checks_.is_empty() || host_interrupts(raised)) throw;
    error = std::current_exception();
  }
  if (!checks_.is_empty()) raise_failed_check(error);
}

void Scope::flush_all(const std::string& reason) {
  check_may_flush(*this, reason);
  const Lock lock(*this);
  check_not_lent();
  CellTrace::note_read(reason);
  const FlushMark mark;
  settle_all(*this);
  run_flush({}, flush_options(reason));
  kept_.clear();
  casts_.clear();
  weight_copies_.clear();
  if (!is_full() || !graph_->tape().values.empty()) return;
  cells_.clear();  // the signatures of cells belong to the old tables
  tables_ = tables_of_thread();
  if (is_full()) tables_ = std::make_shared<Tables>();
  graph_->use(tables_->geometries);
}

void Scope::note_at_once(const std::string& op, const char* reason) {
  if (report_.knows_at_once(op, reason)) return;
  report_.add_at_once(op, reason, {op, reason, current_site(), 1, current_caller()});
}

void Scope::before_write(const at::Tensor& to) {
  read_records_->before_write(*graph_, to);
  weight_copies_.forget(to);
}

void Scope::keep(std::shared_ptr<void> object) { kept_.insert(std::move(object)); }

void Scope::relieve() {
  const Lock lock(*this);
  check_not_lent();
  CellTrace::note_read("max_pending reached");
  const FlushMark mark;
  settle_all(*this);
  const FlushOptions options = flush_options("max_pending reached");
  run_and_update(*this, [&] { relieve_graph(*graph_, options); });
}

bool Scope::run_slice(std::chrono::nanoseconds bound) {
  const Lock lock(*this);
  check_not_lent();
  const FlushMark mark;
  settle_all(*this);
  static const Policy& policy = find_policy("agenda");
  FlushOptions options = flush_options("a slice");
  options.policy = &policy;
  options.values_only = true;
  options.costs = &slice_costs_;
  slice_costs_.begin(bound, graph_->num_waiting());
  bool ran = false;
  run_and_update(*this, [&] { ran = autobatch::run_slice(*graph_, options); });
  return ran;
}

bool Scope::is_full() const { return autobatch::is_full(*tables_); }

FlushOptions Scope::flush_options(const std::string& reason) {
  std::vector<OpFailure>* losses = losses_kept_ > 0 ? &losses_ : nullptr;
  return {policy_,
          &report_,
          clean_.get(),
          tables_,
          verifier_.get(),
          reason,
          losses,
          /*values_only=*/false,
          read_records_.get(),
          is_own_thread() ? &checks_ : nullptr,
          /*costs=*/nullptr,
          &weight_copies_,
          estimates_ ? &estimate_ : nullptr};
}

bool Scope::is_flushing() { return flushes_under_way > 0; }

std::exception_ptr Scope::loss_of(const PendingTensor& tensor) const {
  for (const OpFailure& loss : losses_) {
    if (loss.reason == tensor.reason()) return loss.cause;
  }
  return nullptr;
}

void compute_owned(at::ArrayRef<PendingTensor*> tensors, const Graph& graph,
                   const std::string& reason) {
  if (capture_state.scope != nullptr && &capture_state.scope->graph() == &graph) {
    return capture_state.scope->compute(tensors, reason);
  }
  std::shared_ptr<Scope> scope;
  {
    const std::lock_guard<std::mutex> lock(owners_mutex);
    const auto found = owners().find(&graph);
    if (found != owners().end()) scope = found->second->weak_from_this().lock();
  }
  if (scope != nullptr) scope->compute(tensors, reason);
}

void note_backward_call() {
  if (Scope* scope = Scope::current()) ++scope->report().backward_calls;
}

}  // namespace autobatch
