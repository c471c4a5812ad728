#include "autobatch/body.h"

#include "autobatch/pool.h"
#include "autobatch/profile.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace autobatch {

// --- what follows from the tape ---

namespace {

constexpr size_t kLargestTiled = size_t{1} << 20;  // elements: they are looked at one by one

class Completer {
 public:
  explicit Completer(Body& body) : body_(body), tape_(body.tape) {}

  void run() {
    place();
    find_uses();
    find_dependences();
    find_tiles();
  }

 private:
  void place() {
    Store& store = body_.store;
    store.places.resize(tape_.values.size());
    store.steps.assign(tape_.values.size(), 0);
    for (ValueId id = 0; id < tape_.values.size(); ++id) {
      const Value& value = tape_.values[id];
      if (value.base != id || value.is_outside()) continue;
      const auto slab = static_cast<uint32_t>(store.lengths.size());
      store.places[id] = {slab, slab, 0, 0};
      store.lengths.push_back(value.geometry->extent);
      store.grad_lengths.push_back(value.geometry->extent);
      store.steps[id] = value.geometry->extent;
    }
    store.slabs.resize(store.lengths.size());
  }

  void find_uses() {
    body_.slab_saved.assign(body_.store.lengths.size(), 0);
    body_.operand_saved.assign(tape_.outside.size(), 0);
    for (const uint8_t weight : body_.is_weight) body_.is_copied.push_back(weight == 0);
    body_.drop_after.resize(tape_.nodes.size());
    std::vector<NodeId> last_use(body_.store.lengths.size(), 0);
    for (NodeId n = 0; n < tape_.nodes.size(); ++n) {
      const Node& node = tape_.nodes[n];
      const Rule& rule = *node.signature->rule;
      const bool saves = tape_.needs_grad(node) && rule.saves();
      body_.heavy = body_.heavy || rule.heavy();
      body_.saves = body_.saves || saves;
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const uint32_t slab = body_.store.places[node.first_value + k].slab;
        last_use[slab] = n;
        if (saves && rule.reads_result(k)) body_.slab_saved[slab] = 1;
      }
      for (size_t slot = 0; slot < node.num_operands; ++slot) {
        const ValueId id = tape_.operands[node.first_operand + slot];
        if (id == kNone) continue;
        const Value& base = tape_.values[tape_.values[id].base];
        const bool saved = saves && rule.reads(slot);
        if (base.is_outside()) {
          if (saved) body_.operand_saved[base.index] = 1;
          if (!rule.copies_regions() || base.base != id) body_.is_copied[base.index] = 0;
          continue;
        }
        const uint32_t slab = body_.store.places[tape_.values[id].base].slab;
        last_use[slab] = n;
        if (saved) body_.slab_saved[slab] = 1;
      }
    }
    for (uint32_t slab = 0; slab < last_use.size(); ++slab) {
      if (!body_.slab_saved[slab]) body_.drop_after[last_use[slab]].push_back(slab);
    }
  }

  // By value: the operands, and the results of the cell, that its gradient goes to.
  void find_dependences() {
    std::vector<uint64_t> operands(tape_.values.size(), 0), results(tape_.values.size(), 0);
    for (ValueId id = 0; id < tape_.values.size(); ++id) {
      const Value& value = tape_.values[id];
      if (!value.requires_grad) continue;
      if (value.parent != kNone) {
        operands[id] = operands[value.parent];
        results[id] = results[value.parent];
      } else if (value.is_outside()) {
        operands[id] = uint64_t{1} << value.index;
      } else {
        const Node& node = tape_.nodes[value.node];
        for (ValueId operand : tape_.operands_of(node)) {
          if (operand == kNone) continue;
          operands[id] |= operands[operand];
          results[id] |= results[operand];
        }
        const Rule::Chain chain = node.signature->rule->chain();
        if (value.index == chain.result) results[id] |= results[node.first_value + chain.from];
      }
      if (const size_t k = result_number(id); k < body_.results.size()) {
        results[id] |= uint64_t{1} << k;
      }
    }
    body_.feeds.assign(body_.results.size(), 0);
    for (size_t k = 0; k < body_.results.size(); ++k) {
      body_.depends.push_back(operands[body_.results[k]]);
      body_.closure.push_back(static_cast<uint8_t>(results[body_.results[k]] | uint64_t{1} << k));
      for (size_t j = 0; j < body_.results.size(); ++j) {
        if (j != k && (results[body_.results[j]] >> k & 1) != 0) body_.feeds[k] = 1;
      }
    }
  }

  // Of each value that gradients go to: the views that ops read, if they are its parts.
  void find_tiles() {
    Tiling& tiling = body_.tiling;
    tiling.number.assign(tape_.values.size(), Tiling::kNone);
    tiling.tiles.resize(tape_.values.size());
    tiling.alone.assign(tape_.values.size(), 0);
    std::vector<uint32_t> reads(tape_.values.size(), 0);  // by base
    for (const ValueId id : tape_.operands) {
      if (id == kNone || !tape_.values[id].requires_grad) continue;
      const ValueId base = tape_.values[id].base;
      ++reads[base];
      std::vector<ValueId>& tiles = tiling.tiles[base];
      const auto same = [&](ValueId tile) { return is_same_part(tile, id); };
      const auto known = std::find_if(tiles.begin(), tiles.end(), same);
      tiling.number[id] = static_cast<uint8_t>(std::min<size_t>(known - tiles.begin(), 64));
      if (known == tiles.end() && tiles.size() <= 64) tiles.push_back(id);
    }
    for (ValueId base = 0; base < tape_.values.size(); ++base) {
      if (!is_weight(base) && are_all_parts(base, tiling.tiles[base])) {
        tiling.alone[base] = reads[base] == 1 && tiling.tiles[base][0] == base ? 1 : 0;
      } else {
        tiling.tiles[base].clear();
      }
    }
    for (ValueId id = 0; id < tape_.values.size(); ++id) {
      if (tiling.tiles[tape_.values[id].base].empty()) tiling.number[id] = Tiling::kNone;
    }
  }

  bool is_weight(ValueId base) const {
    return tape_.values[base].is_outside() && body_.is_weight[tape_.values[base].index] != 0;
  }

  bool is_same_part(ValueId a, ValueId b) const {
    const Value &x = tape_.values[a], &y = tape_.values[b];
    return x.base == y.base && x.offset == y.offset && x.geometry == y.geometry;
  }

  // Whether each element of the base is in exactly one of these views.
  bool are_all_parts(ValueId base, const std::vector<ValueId>& parts) const {
    const auto extent = static_cast<size_t>(tape_.values[base].geometry->extent);
    if (parts.empty() || parts.size() > 64 || extent == 0 || extent > kLargestTiled) return false;
    std::vector<uint8_t> seen(extent, 0);
    size_t elements = 0;
    for (const ValueId id : parts) {
      const Geometry& g = *tape_.values[id].geometry;
      std::vector<int64_t> offsets{tape_.values[id].offset};
      for (int64_t d = 0; d < g.dim(); ++d) {
        std::vector<int64_t> next;
        for (const int64_t offset : offsets) {
          for (int64_t i = 0; i < g.sizes[d]; ++i) next.push_back(offset + i * g.strides[d]);
        }
        if (next.size() > extent) return false;
        offsets = std::move(next);
      }
      for (const int64_t offset : offsets) {
        if (std::exchange(seen[static_cast<size_t>(offset)], 1) != 0) return false;
      }
      elements += offsets.size();
    }
    return elements == extent;
  }

  size_t result_number(ValueId id) const {
    return static_cast<size_t>(std::find(body_.results.begin(), body_.results.end(), id) -
                               body_.results.begin());
  }

  Body& body_;
  const Tape& tape_;
};

// --- one batch of uses ---

// What a batch leaves behind for backward: the body's values for all members.
struct BodyRun {
  BodyRun(const Body& body, int64_t members, bool needs_gradient) : count(members) {
    record.tape = body.tape;
    record.store = body.store;
    record.batches.reserve(body.tape.nodes.size());
    for (NodeId n = 0; n < body.tape.nodes.size(); ++n) {
      const Node& node = body.tape.nodes[n];
      record.order.push_back(n);
      BatchRecord& batch = record.batches.emplace_back();
      batch.signature = node.signature;
      batch.rule = node.signature->rule;
      batch.first = n;
      batch.count = static_cast<uint32_t>(members);
      batch.needs_grad = needs_gradient && body.tape.needs_grad(node);
    }
  }

  FlushRecord record;
  int64_t count;
};

// Whether each [*sizes] of [n, *sizes] is row-major.
bool has_dense_members(const at::Tensor& stacked) {
  int64_t expected = 1;
  for (int64_t d = stacked.dim() - 1; d > 0; --d) {
    if (stacked.size(d) != 1 && stacked.stride(d) != expected) return false;
    expected *= stacked.size(d);
  }
  return true;
}

class Forward {
 public:
  Forward(const Body& body, Batch& batch)
      : body_(body),
        batch_(batch),
        run_(std::make_shared<BodyRun>(body, batch.size(), batch.needs_grad())),
        record_(run_->record) {}

  void run() {
    record_.store.scattered.resize(record_.tape.outside.size());
    bind_operands();
    for (NodeId n = 0; n < body_.tape.nodes.size(); ++n) run_node(n);
    if (!batch_.needs_grad()) return;
    record_.store.scattered.clear();
    for (size_t i = 0; i < record_.tape.outside.size(); ++i) {
      if (!body_.operand_saved[i]) record_.tape.outside[i].data = at::Tensor();
    }
    batch_.record().kept = run_;
  }

 private:
  void bind_operands() {
    for (size_t i = 0; i < record_.tape.outside.size(); ++i) {
      Outside& outside = record_.tape.outside[i];
      if (body_.is_weight[i]) {
        outside.data = batch_.single(i);
        continue;
      }
      if (body_.is_copied[i]) {
        scatter(i);
        continue;
      }
      outside.data = batch_.stacked(i);
      // One memory need not be one value: of views that are held each has its own gradient.
      const bool apart = outside.data.stride(0) != 0 || is_one_value(i);
      if (!apart || !has_dense_members(outside.data)) outside.data = outside.data.contiguous();
      record_.store.steps[outside.value] = batch_.size() == 1 ? 0 : outside.data.stride(0);
    }
  }

  bool is_one_value(size_t i) const {
    for (int64_t m = 1; m < batch_.size(); ++m) {
      if (batch_.operand(m, i) != batch_.operand(0, i)) return false;
    }
    return true;
  }

  // Left where they are.
  void scatter(size_t i) {
    Regions& regions = record_.store.scattered[i];
    regions.reserve(static_cast<size_t>(batch_.size()));
    for (int64_t m = 0; m < batch_.size(); ++m) regions.push_back(batch_.operand_region(m, i));
  }

  void run_node(NodeId n) {
    BatchRecord& batch = record_.batches[n];
    const Node& node = record_.tape.nodes[n];
    const ProfilerRange range([&] { return name_of_batch(record_.tape, node, run_->count); });
    for (uint32_t k = 0; k < node.num_values; ++k) make_slab(node.first_value + k);
    Batch view(record_.tape, record_.store, batch, NodeSpan(record_.order[n], run_->count));
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (batch.rule->below_autograd()) below.emplace();
    batch.rule->forward(view);
    for (const uint32_t slab : body_.drop_after[n]) record_.store.slabs[slab] = at::Tensor();
  }

  // A result of the cell is written where the batch wants it.
  void make_slab(ValueId id) {
    const auto result = std::find(body_.results.begin(), body_.results.end(), id);
    const uint32_t number = record_.store.places[id].slab;
    at::Tensor& slab = record_.store.slabs[number];
    if (result != body_.results.end()) {
      slab = batch_.output(static_cast<size_t>(result - body_.results.begin()));
      return;
    }
    const Value& value = record_.tape.values[id];
    slab = pooled_empty(record_.store.lengths[number] * run_->count,
                        at::TensorOptions().dtype(value.dtype).device(value.device));
  }

  const Body& body_;
  Batch& batch_;
  std::shared_ptr<BodyRun> run_;
  FlushRecord& record_;
};

// Of members whose same results a gradient has reached.
class Backward final : public Enclosing {
 public:
  Backward(const Body& body, BodyRun& run, BackwardBatch& batch)
      : body_(body), run_(run), record_(run.record), batch_(batch) {
    if (!batch.complete()) rows_ = batch.positions();
  }

  void run() {
    GradientSink sink(record_, task_, *this, batch_.size());
    task_.grads.resize(record_.store.grad_lengths.size());
    task_.reached.resize(record_.tape.nodes.size(), 0);
    task_.outside_grads.resize(record_.tape.outside.size());
    task_.tiling = &body_.tiling;
    task_.unwritten.resize(record_.tape.values.size(), 0);
    for (size_t i = 0; i < record_.tape.outside.size(); ++i) {
      task_.outside_wanted.push_back(batch_.needs(i) ? 1 : 0);
      added_at_once_.push_back(body_.is_copied[i] && all_wanted(i) ? 1 : 0);
    }
    seed(sink);
    for (auto n = static_cast<NodeId>(record_.batches.size()); n-- > 0;) run_node(n, sink);
    for (size_t i = 0; i < task_.outside_grads.size(); ++i) {
      if (!task_.outside_grads[i].defined()) continue;
      sink.fill_rest(record_.tape.outside[i].value);
      batch_.add(i, std::move(task_.outside_grads[i]));
    }
  }

  Region target(uint32_t outside) override { return batch_.target(0, batch_.operand(0, outside)); }
  Region member_target(uint32_t outside, int64_t m) override {
    if (!added_at_once_[outside]) return {};
    return batch_.target(m, batch_.operand(m, outside));
  }
  bool is_weight(uint32_t outside) const override { return body_.is_weight[outside] != 0; }
  void add_product(uint32_t outside, const Product& p) override {
    batch_.add_product(outside, p.left, p.right);
  }
  void check_unwritten() const override { batch_.check_unwritten(); }

 private:
  bool all_wanted(size_t i) const {
    for (int64_t m = 0; m < batch_.size(); ++m) {
      if (!batch_.wanted(batch_.operand(m, i))) return false;
    }
    return true;
  }

  // The gradients that came: in the batch's own buffer, which nobody reads again.
  void seed(GradientSink& sink) {
    for (size_t k = 0; k < body_.results.size(); ++k) {
      if ((batch_.reached(0) >> k & 1) == 0) continue;
      task_.grads[record_.store.places[body_.results[k]].grad] = batch_.grad_flat(k);
      sink.mark_reached(record_.tape.values[body_.results[k]]);
    }
  }

  void run_node(NodeId n, GradientSink& sink) {
    BatchRecord& batch = record_.batches[n];
    const Node& node = record_.tape.nodes[n];
    if (task_.reached[n] != 0 && batch.needs_grad) {
      for (uint32_t k = 0; k < node.num_values; ++k) sink.fill_rest(node.first_value + k);
      const ProfilerRange range([&] {
        return name_of_batch(record_.tape, node, static_cast<size_t>(batch_.size())) + ", backward";
      });
      BackwardBatch view(record_, batch, NodeSpan(record_.order[n], batch_.size()), sink,
                         Level::Half::kWhole, rows_);
      std::optional<at::AutoDispatchBelowADInplaceOrView> below;
      if (batch.rule->below_autograd()) below.emplace();
      batch.rule->backward(view);
    }
    for (uint32_t k = 0; k < node.num_values; ++k) {
      task_.grads[record_.store.places[node.first_value + k].grad] = at::Tensor();
    }
  }

  const Body& body_;
  BodyRun& run_;
  FlushRecord& record_;
  BackwardBatch& batch_;
  BackwardTask task_;
  std::vector<int64_t> rows_;
  std::vector<uint8_t> added_at_once_;  // by operand
};

class BodyRule final : public Rule {
 public:
  explicit BodyRule(Body body) : body_(std::move(body)) {}

  bool capture(Draft&) const override { return false; }  // made of other nodes
  void forward(Batch& batch) const override { Forward(body_, batch).run(); }

  void backward(BackwardBatch& batch) const override {
    // Where an op keeps what eager does not, the second time was not refused before.
    if (batch.record().kept == nullptr) raise_consumed("a cell");
    auto& run = *static_cast<BodyRun*>(batch.record().kept.get());
    bool alike = true;
    for (int64_t m = 1; m < batch.size(); ++m) alike &= batch.reached(m) == batch.reached(0);
    if (alike) return Backward(body_, run, batch).run();
    std::vector<std::vector<NodeId>> groups(256);
    for (int64_t m = 0; m < batch.size(); ++m) groups[batch.reached(m)].push_back(batch.member(m));
    for (const std::vector<NodeId>& members : groups) {
      if (members.empty()) continue;
      BackwardBatch part = batch.part(members);
      Backward(body_, run, part).run();
    }
  }

  // One op after the other, on one member.
  std::vector<at::Tensor> eager(const Signature&, at::ArrayRef<at::Tensor> operands,
                                at::ArrayRef<at::Tensor>) const override {
    const Tape& tape = body_.tape;
    std::vector<at::Tensor> values(tape.values.size());
    for (size_t i = 0; i < operands.size(); ++i) values[tape.outside[i].value] = operands[i];
    const auto read = [&](ValueId id) {
      if (id == kNone) return at::Tensor();
      const Value& value = tape.values[id];
      const at::Tensor& base = values[value.base];
      at::Tensor out = base;
      if (value.parent != kNone) {
        out = base.as_strided(value.geometry->sizes, value.geometry->strides,
                              base.storage_offset() + value.offset);
      }
      return value.requires_grad ? out : out.detach();
    };
    for (const Node& node : tape.nodes) {
      std::vector<at::Tensor> inputs, places;
      for (ValueId id : tape.operands_of(node)) inputs.push_back(read(id));
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const Value& value = tape.values[node.first_value + k];
        places.push_back(
            at::empty_strided(value.geometry->sizes, value.geometry->strides,
                              at::TensorOptions().dtype(value.dtype).device(value.device)));
      }
      const auto results = node.signature->rule->eager(*node.signature, inputs, places);
      for (size_t k = 0; k < results.size(); ++k) values[node.first_value + k] = results[k];
    }
    std::vector<at::Tensor> out;
    for (ValueId id : body_.results) out.push_back(values[id]);
    return out;
  }

  bool heavy() const override { return body_.heavy; }
  bool below_autograd() const override { return false; }  // some of its ops' rules record
  bool saves() const override { return body_.saves; }
  bool reads(size_t slot) const override { return body_.operand_saved[slot] != 0; }
  bool reads_result(uint32_t k) const override {
    return body_.slab_saved[body_.store.places[body_.results[k]].slab] != 0;
  }
  bool depends(uint32_t k, size_t slot) const override {
    return (body_.depends[k] >> slot & 1) != 0;
  }
  const Body* body() const override { return &body_; }

 private:
  Body body_;
};

}  // namespace

void Body::complete() { Completer(*this).run(); }

std::shared_ptr<const Rule> make_body_rule(Body body) {
  body.complete();
  return std::make_shared<BodyRule>(std::move(body));
}

}  // namespace autobatch
