#include "autobatch/backward/saved_tensor_check.h"

#include "autobatch/common/compat.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace autobatch {
namespace {

// A run of one node in eager mode, with operands that are zeros.
class Trial {
 public:
  Trial(const Tape& tape, const Node& node) {
    const Signature& signature = *node.signature;
    const ContextGuard context(signature.context);
    const at::AutoGradMode grad_mode(signature.context.grad_mode);
    std::vector<at::Tensor> places;
    for (ValueId id : tape.operands_of(node)) {
      operands_.push_back(id == kNone ? at::Tensor() : zeros(tape.values[id], true));
    }
    for (uint32_t k = 0; k < node.num_values; ++k) {
      places.push_back(zeros(tape.values[node.first_value + k], false));
    }
    results_ = signature.rule->eager(signature, operands_, places);
  }

  at::Tensor& operand(size_t slot) { return operands_[slot]; }
  at::Tensor& result(size_t k) { return results_[k]; }
  size_t num_results() const { return results_.size(); }

  // Whether backward raises an error if `tensor` was written to before.
  bool objects_to(const at::Tensor& tensor) const {
    tensor.unsafeGetTensorImpl()->bump_version();
    return fails("inplace");
  }

  // Whether backward raises an error when it runs for the second time.
  bool objects_to_twice() const { return fails("second time") || fails("second time"); }

 private:
  // Whether backward raises an error whose message contains `text`.
  bool fails(const char* text) const {
    std::vector<at::Tensor> outputs, gradients, inputs;
    for (const at::Tensor& result : results_) {
      if (!result.defined() || !result.requires_grad()) continue;
      outputs.push_back(result);
      gradients.push_back(at::ones_like(result));
    }
    for (const at::Tensor& operand : operands_) {
      if (operand.defined() && operand.requires_grad()) inputs.push_back(operand);
    }
    if (outputs.empty() || inputs.empty()) return false;
    try {
      torch::autograd::grad(outputs, inputs, gradients, std::nullopt, false, true);
      return false;
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace()).find(text) != std::string::npos;
    }
  }

  static at::Tensor zeros(const Value& value, bool as_operand) {
    at::Tensor out = at::zeros(value.geometry->sizes, value.options());
    if (as_operand && value.requires_grad) out.requires_grad_(true);
    return out;
  }

  const c10::impl::ExcludeDispatchKeyGuard no_capture_{compat::kDeferKey};
  std::vector<at::Tensor> operands_;
  std::vector<at::Tensor> results_;
};

// Returns a bit mask of the operands and results that eager mode saves. Bit s is operand s, and bit
// 32 + k is result k. If the op cannot be run on zeros, returns the operands and results that its
// rule reads.
uint64_t what_eager_saves(const Tape& tape, const Node& node) {
  const Rule& rule = *node.signature->rule;
  uint64_t saved = 0;
  if (!rule.saves()) return 0;
  const uint32_t operands = std::min<uint32_t>(node.num_operands, 32);
  try {
    for (uint32_t s = 0; s < operands; ++s) {
      if (tape.operands[node.first_operand + s] == kNone) continue;
      Trial trial(tape, node);
      if (trial.objects_to(trial.operand(s))) saved |= uint64_t{1} << s;
    }
    for (uint32_t k = 0; k < std::min<uint32_t>(node.num_values, 32); ++k) {
      Trial trial(tape, node);
      if (k < trial.num_results() && trial.objects_to(trial.result(k))) {
        saved |= uint64_t{1} << (32 + k);
      }
    }
  } catch (const std::exception& error) {
    if (host_interrupts(error)) throw;
    for (uint32_t s = 0; s < operands; ++s) {
      if (rule.reads(s)) saved |= uint64_t{1} << s;
    }
    for (uint32_t k = 0; k < std::min<uint32_t>(node.num_values, 32); ++k) {
      if (rule.reads_result(k)) saved |= uint64_t{1} << (32 + k);
    }
  }
  return saved;
}

// Like what_eager_saves, but caches the result for each signature and set of operands that require
// grad. Several threads may run backward at the same time.
uint64_t eager_saves(const Tape& tape, const Node& node) {
  uint64_t differentiable = 0;
  for (uint32_t s = 0; s < std::min<uint32_t>(node.num_operands, 64); ++s) {
    const ValueId id = tape.operands[node.first_operand + s];
    if (id != kNone && tape.values[id].requires_grad) differentiable |= uint64_t{1} << s;
  }
  static std::mutex mutex;
  auto& known = node.signature->saved;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(differentiable); found != known.end()) return found->second;
  }
  // The lock is not held during this call, because it may run Python code.
  const uint64_t saved = what_eager_saves(tape, node);
  const std::lock_guard<std::mutex> lock(mutex);
  return known.emplace(differentiable, saved).first->second;
}

// Whether the in-place op `node` writes to the memory of its operand.
bool is_written_by(const Tape& tape, ValueId operand, const Node& node) {
  return tape.values[operand].base == tape.values[tape.operands[node.first_operand]].base;
}

}  // namespace

bool saves_operand(const Tape& tape, const Node& node, uint32_t slot) {
  const Rule& rule = *node.signature->rule;
  return slot >= 32 ? rule.saves() && rule.reads(slot) : (eager_saves(tape, node) >> slot & 1) != 0;
}

bool saves_result(const Tape& tape, const Node& node, uint32_t result) {
  return result < 32 && (eager_saves(tape, node) >> (32 + result) & 1) != 0;
}

ValueId find_saved_and_gone(const Tape& tape, const Node& node,
                            const std::function<bool(ValueId)>& is_gone) {
  for (uint32_t s = 0; s < node.num_operands; ++s) {
    const ValueId operand = tape.operands[node.first_operand + s];
    if (operand == kNone) continue;
    // Eager mode saves a copy of the operand that an in-place op writes to (slot 0). If another
    // operand has the same memory, the op overwrites that operand.
    const bool gone = node.in_place
                          ? s > 0 && (is_gone(operand) || is_written_by(tape, operand, node))
                          : is_gone(operand);
    if (gone && saves_operand(tape, node, s)) return operand;
  }
  for (uint32_t k = 0; k < node.num_values; ++k) {
    const ValueId result = node.first_value + k;
    if (is_gone(result) && saves_result(tape, node, k)) return result;
  }
  return kNone;
}

bool keeps_anything(const Tape& tape, const Node& node) {
  const Rule& rule = *node.signature->rule;
  if (!rule.saves() || rule.below_autograd()) return rule.saves();
  try {
    return Trial(tape, node).objects_to_twice();
  } catch (const std::exception& error) {
    if (host_interrupts(error)) throw;
    return true;
  }
}

uint32_t first_of_one_node(const Tape& tape, const Node& node, uint32_t result) {
  const OpInfo& op = *node.signature->op;
  if (node.signature->rule->subgraph() != nullptr) return result;  // each result has separate ops
  if (!op.composite) return 0;                                     // one formula for all results
  if (op.random) return result;  // a trial would draw random numbers
  static std::mutex mutex;
  static std::map<const OpInfo*, std::vector<uint32_t>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = known.try_emplace(&op);
  std::vector<uint32_t>& first = entry->second;
  if (is_new) {
    try {
      Trial trial(tape, node);
      std::vector<const void*> nodes;
      for (size_t k = 0; k < trial.num_results(); ++k) {
        nodes.push_back(trial.result(k).grad_fn().get());
        first.push_back(static_cast<uint32_t>(std::find(nodes.begin(), nodes.end(), nodes.back()) -
                                              nodes.begin()));
      }
    } catch (const std::exception& error) {  // the op fails on zeros
      if (host_interrupts(error)) throw;
      first.clear();
    }
  }
  return result < first.size() ? first[result] : result;
}

Written::Written(const FlushRecord& record) : record_(record) {
  for (const GraphInput& graph_input : record.tape.graph_inputs) {
    if (graph_input.counted && graph_input.counter.current_version() != graph_input.version) {
      bases_.push_back(graph_input.value);
    }
  }
  for (const HeldMemory& memory : record.memories) {
    if (memory.counter.current_version() != memory.version) bases_.push_back(memory.base);
  }
  std::sort(bases_.begin(), bases_.end());
}

bool Written::is_gone(ValueId id, NodeId reader) const {
  // A write through another alias does not change the version counter of `x.data`.
  if (record_.tape.values[id].kind == ViewKind::kData) return false;
  const ValueId base = record_.tape.values[id].base;
  if (std::binary_search(bases_.begin(), bases_.end(), base)) return true;
  const auto written = record_.tape.written_at.find(base);
  return written != record_.tape.written_at.end() && reader < written->second;
}

// Only graph inputs can be overwritten. A captured write creates a new value, and a held tensor
// does not share memory with the record.
bool Written::is_overwritten(ValueId id) const {
  const ValueId base = record_.tape.values[id].base;
  return record_.tape.values[base].is_graph_input() &&
         record_.tape.values[id].kind != ViewKind::kData &&
         std::binary_search(bases_.begin(), bases_.end(), base);
}

bool Written::is_kept(ValueId id) const {
  const Tape& tape = record_.tape;
  return tape.graph_inputs[tape.values[tape.values[id].base].index].as_read.defined();
}

void Written::check_unwritten(NodeId id) const {
  const Tape& tape = record_.tape;
  const Node& node = tape.nodes[id];
  for (uint32_t s = 0; s < node.num_operands; ++s) {
    const ValueId operand = tape.operands[node.first_operand + s];
    if (operand == kNone || !is_overwritten(operand)) continue;
    // In eager mode, a formula reads only operands that it has saved. The content of other operands
    // does not matter, with one exception. If results are saved or the op is composite, saved
    // tensors may depend on any operand.
    const uint64_t saved = eager_saves(tape, node);
    if (is_kept(operand) && !saves_operand(tape, node, s)) continue;
    const bool may_matter = s >= 32 || (saved >> s & 1) != 0 || (saved >> 32) != 0;
    if (may_matter || node.signature->op->composite) raise(operand, id);
  }
}

void Written::check_unwritten(NodeId id, size_t slot) const {
  const Tape& tape = record_.tape;
  const ValueId operand = tape.operands[tape.nodes[id].first_operand + slot];
  if (operand != kNone && is_overwritten(operand) && !is_kept(operand)) raise(operand, id);
}

void Written::check(NodeId id) const {
  const Tape& tape = record_.tape;
  const ValueId gone =
      find_saved_and_gone(tape, tape.nodes[id], [&](ValueId value) { return is_gone(value, id); });
  if (gone != kNone) raise(gone, id);
}

void Written::raise(ValueId id, NodeId node) const {
  const Value& value = record_.tape.values[id];
  TORCH_CHECK(false,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: [",
              c10::toString(value.dtype), " ", at::IntArrayRef(value.geometry->sizes),
              "], saved by ", record_.tape.nodes[node].signature->op->name,
              " in a batch() block, was modified after it was saved. Write to a copy of the tensor "
              "(clone()), or use the out-of-place op.");
}

}  // namespace autobatch
