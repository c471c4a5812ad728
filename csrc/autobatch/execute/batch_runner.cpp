#include "autobatch/execute/batch_runner.h"

#include "autobatch/common/host_hooks.h"
#include "autobatch/common/pool.h"
#include "autobatch/debug/trace.h"
#include "autobatch/execute/flush.h"
#include "autobatch/execute/sample_eager.h"
#include "autobatch/graph/profiler_ranges.h"
#include "autobatch/graph/slice_costs.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/rules/rule.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/hash.h>

#include <chrono>
#include <iterator>
#include <optional>
#include <sstream>

namespace autobatch {
namespace {

class Executor {
 public:
  Executor(FlushRecord& record, const FlushOptions& options, size_t first_batch)
      : record_(record),
        report_(*options.report),
        first_batch_(first_batch),
        kept_copies_(options.weight_copies),
        costs_(options.costs),
        estimate_(options.estimate) {}

  Failures run() {
    // The batches before `first_batch` are not moved, because an open record has many batches, and
    // each of its many flushes runs only a few of them.
    const auto first = record_.batches.begin() + static_cast<ptrdiff_t>(first_batch_);
    std::vector<BatchRecord> planned(std::make_move_iterator(first),
                                     std::make_move_iterator(record_.batches.end()));
    record_.batches.erase(first, record_.batches.end());
    first_node_ = record_.order.size();
    for (const BatchRecord& batch : planned)
      first_node_ = std::min<size_t>(first_node_, batch.first);
    WeightCopies copies;
    if (kept_copies_ != nullptr) kept_copies_->drop_changed();
    const LentWeightCopies lent(record_.store, &copies, kept_copies_);
    try {
      for (size_t b = 0; b < planned.size(); ++b) {
        BatchRecord& batch = planned[b];
        Trace* trace = record_.trace.get();
        const BatchTimer timer(trace, trace == nullptr ? TraceBatch{} : traced(batch, b));
        !failures_ ? run_timed(std::move(batch)) : run_survivors(batch);
        if (failures_) continue;  // keeps all slabs, because members may run again
        for (uint32_t slab : record_.store.last_use[b]) {
          record_.store.slabs[slab] = at::Tensor();
        }
      }
    } catch (...) {  // an interruption: no more batches run
      failures_.add(std::current_exception());
    }
    if (failures_) drop_what_did_not_run();
    return std::move(failures_);
  }

 private:
  TraceBatch traced(const BatchRecord& batch, size_t number) const {
    TraceBatch traced;
    traced.signature = batch.signature->serial;
    traced.batch = record_.trace->first_batch() + number;
    traced.members = batch.count;
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      const Node& node = record_.tape.nodes[record_.order[i]];
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const Value& value = record_.tape.values[node.first_value + k];
        traced.bytes +=
            static_cast<uint64_t>(value.geometry->numel) * c10::elementSize(value.dtype);
      }
    }
    return traced;
  }

  BatchRecord part_of(const BatchRecord& batch, uint32_t first, uint32_t count) const {
    BatchRecord part;
    part.signature = record_.tape.nodes[record_.order[first]].signature;
    part.rule = part.signature->rule;
    part.needs_grad = batch.needs_grad;
    part.first = first;
    part.count = count;
    return part;
  }

  void run_timed(BatchRecord batch) {
    if (estimate_ != nullptr) add_to_estimate(batch);
    if (costs_ == nullptr) return run_range(std::move(batch));
    const uint64_t serial = batch.signature->serial;
    const size_t members = batch.count;
    const auto began = std::chrono::steady_clock::now();
    run_range(std::move(batch));
    costs_->add(serial, members, std::chrono::steady_clock::now() - began);
  }

  // Must be called before the batch runs, because the run may free the operands of the batch.
  void add_to_estimate(BatchRecord& batch) {
    const std::span<const NodeId> members(record_.order.data() + batch.first, batch.count);
    enter(batch.signature->context);
    make_slabs(batch);  // `view` refers to the slabs of the results
    Batch view(record_.tape, record_.store, batch, members);
    add_batch(*estimate_, view);
  }

  void run_range(BatchRecord batch) {
    try {
      run_batch(batch);
      record_.batches.push_back(std::move(batch));
      return;
    } catch (const std::exception& error) {
      if (host_interrupts(error)) throw;
      if (batch.count == 1) return fail(batch, std::current_exception());
    }
    const uint32_t half = batch.count / 2;
    run_range(part_of(batch, batch.first, half));
    run_range(part_of(batch, batch.first + half, batch.count - half));
  }

  // Runs the members that do not depend on a failed node.
  void run_survivors(const BatchRecord& batch) {
    uint32_t first = batch.first;
    const uint32_t end = batch.first + batch.count;
    for (uint32_t i = first; i <= end; ++i) {
      const NodeId cause = i < end ? reads_failed(record_.order[i]) : kNone;
      if (i < end && cause == kNone) continue;
      if (i > first) run_range(part_of(batch, first, i - first));
      if (i < end) failures_.inherit(record_.order[i], cause);
      first = i + 1;
    }
  }

  // Returns the failed node whose result `node` reads, or kNone if there is no such node.
  NodeId reads_failed(NodeId node) const {
    const Tape& tape = record_.tape;
    for (ValueId id : tape.operands_of(tape.nodes[node])) {
      if (id != kNone && failures_.concerns(tape.values[id].node)) return tape.values[id].node;
    }
    return kNone;
  }

  void run_batch(BatchRecord& batch) {
    const Signature& signature = *batch.signature;
    enter(signature.context);
    const ProfilerRange range([&] {
      const Node& first = record_.tape.nodes[record_.order[batch.first]];
      return name_of_batch(record_.tape, first, batch.count);
    });
    try {
      run_by_rule(batch);
    } catch (const std::exception& error) {
      if (batch.count > 1 || batch.rule == &loop_rule() || host_interrupts(error)) throw;
      batch = part_of(batch, batch.first, 1);
      batch.rule = &loop_rule();  // raises the same error as eager mode
      run_by_rule(batch);
    }
    count(batch);
  }

  // Allocates the slabs of the batch's results, unless an earlier batch has allocated them.
  void make_slabs(const BatchRecord& batch) {
    Store& store = record_.store;
    const Node& node = record_.tape.nodes[record_.order[batch.first]];
    for (uint32_t k = 0; k < node.num_values; ++k) {
      const uint32_t slab = store.places[node.first_value + k].slab;
      if (store.slabs[slab].defined()) continue;
      const Value& value = record_.tape.values[node.first_value + k];
      const auto options = value.options();
      store.slabs[slab] = pooled_empty(store.lengths[slab], options);
    }
  }

  void run_by_rule(BatchRecord& batch) {
    make_slabs(batch);
    const std::span<const NodeId> members(record_.order.data() + batch.first, batch.count);
    Batch view(record_.tape, record_.store, batch, members);
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (batch.rule->below_autograd()) below.emplace();
    batch.rule->forward(view);
  }

  void fail(const BatchRecord& batch, std::exception_ptr error) {
    const NodeId node = record_.order[batch.first];
    const Signature& signature = *batch.signature;
    std::ostringstream context;
    context << "while running " << signature.op->name
            << describe_operands(record_.tape, record_.tape.nodes[node])
            << " of a torch_autobatch.batch() "
            << "block";
    if (!signature.site.empty()) context << "; first captured at " << signature.site;
    try {
      std::rethrow_exception(error);
    } catch (c10::Error& e) {
      e.add_context(context.str());
      failures_.add(node, std::current_exception());
    } catch (const std::exception& e) {
      host_annotate(e, context.str());
      failures_.add(node, std::current_exception());
    }
  }

  // Removes the nodes that did not run from the record's order. Nodes of earlier parts are kept,
  // even if Graph::compact has removed their batches.
  void drop_what_did_not_run() {
    const auto begin = record_.order.begin();
    std::vector<NodeId> order(begin, begin + static_cast<ptrdiff_t>(first_node_));
    for (size_t b = first_batch_; b < record_.batches.size(); ++b) {
      BatchRecord& batch = record_.batches[b];
      const auto first = begin + batch.first;
      batch.first = static_cast<uint32_t>(order.size());
      order.insert(order.end(), first, first + batch.count);
    }
    record_.order = std::move(order);
  }

  void enter(const DispatchContext& context) {
    const uint64_t word = context.word();
    if (guard_.has_value() && word == word_) return;
    guard_.reset();
    guard_.emplace(context);
    word_ = word;
  }

  // Counts the batches of the schedule. A batch that was joined from several signatures
  // (merge_by_weight.h) counts once for each signature.
  void count(const BatchRecord& batch) {
    const uint32_t end = batch.first + batch.count;
    uint32_t first = batch.first;
    // Members of one signature are consecutive. If the first and the last member have the same
    // signature, all members have this signature.
    const bool one = signature_at(first) == signature_at(end - 1);
    for (uint32_t i = first + 1; i < end && !one; ++i) {
      if (signature_at(i) == signature_at(first)) continue;
      count_one(batch, first, i - first);
      first = i;
    }
    count_one(batch, first, end - first);
  }

  const Signature* signature_at(uint32_t i) const {
    return record_.tape.nodes[record_.order[i]].signature;
  }

  void count_one(const BatchRecord& batch, uint32_t first, uint32_t members) {
    const Signature& signature = *signature_at(first);
    // A batch of a single member ran as a loop, without a batching rule. The report still names the
    // rule that would batch the signature.
    const Rule& rule = members == 1 ? *signature.rule : *batch.rule;
    SignatureReport* known = report_.find(signature.serial, rule.report_name());
    SignatureReport& row = known != nullptr ? *known : add_row(signature, rule, first);
    const uint64_t launches = rule.report_name() == "loop" ? members : 1;
    const uint64_t batches = batch.goes_on && first == batch.first ? 0 : 1;
    row.instances += members;
    row.batches += batches;
    row.launches += launches;
    if (launches == members) row.alone += members;
    row.largest = std::max<uint64_t>(row.largest, members);
    row.note = signature.note;
    if (row.note.empty() && rule.report_name() == "loop" && signature.op->random) {
      row.note = "each call draws its own random numbers";
    }
    report_.nodes += members;
    report_.batches += batches;
    report_.launches += launches;
  }

  SignatureReport& add_row(const Signature& signature, const Rule& rule, uint32_t first) {
    const Node& node = record_.tape.nodes[record_.order[first]];
    SignatureReport& row =
        report_.add(signature.serial, {signature.op->name, describe_operands(record_.tape, node),
                                       std::string(rule.report_name()), "", signature.site});
    row.position = signature.position;
    row.serial = signature.serial;
    row.weights = weights_of(signature, node);
    row.context = signature.context.word();
    row.kind = &signature;
    return row;
  }

  // Returns a hash of the storages of the operands that all members share.
  uint64_t weights_of(const Signature& signature, const Node& node) const {
    size_t hash = 0;
    const auto operands = record_.tape.operands_of(node);
    for (size_t slot = 0; slot < operands.size() && slot < 64; ++slot) {
      if ((signature.weight_slots >> slot & 1) == 0 || operands[slot] == kNone) continue;
      const Value& value = record_.tape.values[operands[slot]];
      if (!value.is_graph_input()) continue;
      const at::Tensor& data = record_.tape.graph_inputs[value.index].data;
      const void* memory = data.has_storage() ? data.storage().unsafeGetStorageImpl() : nullptr;
      hash = c10::hash_combine(hash, std::hash<const void*>()(memory));
    }
    return hash;
  }

  FlushRecord& record_;
  Report& report_;
  size_t first_batch_, first_node_ = 0;
  WeightCopies* kept_copies_;
  SliceCosts* costs_;
  EagerEstimate* estimate_;
  std::optional<ContextGuard> guard_;
  uint64_t word_ = 0;
  Failures failures_;
};

}  // namespace

Failures run_batches(FlushRecord& record, const FlushOptions& options, size_t first_batch) {
  return Executor(record, options, first_batch).run();
}

}  // namespace autobatch
