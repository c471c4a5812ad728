// Implements GradAccumulator, which finds the region of a value's gradient in the buffers of a
// backward pass.
#include "autobatch/backward/backward.h"
#include "autobatch/common/device_traits.h"
#include "autobatch/common/pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace autobatch {

bool GradAccumulator::wanted(ValueId id) const {
  const Value& value = record_.tape.values[id];
  if (!value.requires_grad) return false;
  if (!value.is_graph_input()) return true;
  return task_.graph_input_wanted[value.index] != 0 || record_.cut(id) != kNone;
}

Region GradAccumulator::target_behind(ValueId id) {
  const ValueId parent = record_.tape.values[id].parent;
  return resolve(id, parent == kNone ? kNone : record_.cut(parent), false);
}

Region GradAccumulator::target_if_wanted(ValueId id) {
  const Value& value = record_.tape.values[id];
  if (!value.requires_grad) return {nullptr, 0, value.geometry};
  // This is the common case. Nodes of the lowest level do not read values that depend on a held
  // value.
  const bool straight = level_ == 0 || record_.is_held.empty();
  if (straight && !value.is_graph_input() && enclosing_ == nullptr) {
    mark_reached(value);
    return begin(id, true);
  }
  return wanted(id) ? target_to_add(id) : Region{nullptr, 0, value.geometry};
}

Region GradAccumulator::resolve(ValueId id, ValueId cut, bool may_be_fresh) {
  const Value& value = record_.tape.values[id];
  const Value& base = record_.tape.values[value.base];
  const auto options = value.options();
  if (cut != kNone) {
    const uint32_t index = record_.export_index.at(export_key(level_, cut));
    at::Tensor& grad = export_gradient(index);
    if (!record_.tape.values[cut].geometry->overlapping) {
      return {&grad, value.offset, value.geometry};
    }
    const ElementMap map = record_.element_map(id, cut);
    return {&grad, map.offset, map.geometry};
  }
  if (base.is_graph_input()) {
    if (enclosing_ != nullptr && enclosing_->is_weight(base.index)) {
      const Region whole = enclosing_->target(base.index);
      return {whole.buffer, whole.offset + value.offset, value.geometry};
    }
    at::Tensor& grad = task_.graph_input_grads[base.index];
    if (task_.partition != nullptr) fill_before_adding(id);
    if (!grad.defined()) grad = pooled_zeros(base.geometry->extent * count_, options);
    return {&grad, value.offset, value.geometry};
  }
  mark_reached(value);
  if (enclosing_ == nullptr) return begin(id, may_be_fresh);
  if (task_.partition != nullptr) fill_before_adding(id);
  return {&buffer(value.base), record_.store.places[value.base].grad_offset + value.offset,
          value.geometry};
}

at::Tensor& GradAccumulator::export_gradient(uint32_t index) {
  at::Tensor& grad = task_.export_grads[index];
  if (grad.defined()) return grad;
  const LevelExport& e = record_.exports[index];
  const Value& value = record_.tape.values[e.value];
  if (!wants_few_launches(value.device)) return grad = pooled_zeros(e.length, value.options());
  if (task_.export_zeros.empty()) task_.export_zeros.resize(record_.exports.size());
  if (!task_.export_zeros[index].defined()) make_export_zeros(value);
  return grad = std::exchange(task_.export_zeros[index], at::Tensor());
}

void GradAccumulator::make_export_zeros(const Value& like) {
  std::vector<uint32_t> together;
  int64_t length = 0;
  for (uint32_t index = 0; index < record_.exports.size(); ++index) {
    const LevelExport& e = record_.exports[index];
    const Value& value = record_.tape.values[e.value];
    const auto here = record_.export_index.find(export_key(level_, e.value));
    if (here == record_.export_index.end() || here->second != index) continue;
    if (value.dtype != like.dtype || value.device != like.device) continue;
    together.push_back(index);
    length += e.length;
  }
  const at::Tensor zeros = pooled_zeros(length, like.options());
  int64_t start = 0;
  for (const uint32_t index : together) {
    const int64_t own = record_.exports[index].length;
    task_.export_zeros[index] = zeros.narrow(0, start, own);
    start += own;
  }
}

bool GradAccumulator::is_fresh(ValueId id) const {
  const Value& value = record_.tape.values[id];
  if (value.base == kNone || enclosing_ != nullptr) return false;
  const Value& base = record_.tape.values[value.base];
  return !base.is_graph_input() && wanted(id) && record_.cut(id) == kNone &&
         task_.begun[value.base] == 0 && value.geometry->contiguous &&
         value.geometry->numel == base.geometry->extent && value.geometry->numel != 0;
}

// Returns the gradient region of a computed result. On a CPU, the buffer is not filled with zeros,
// because the first gradient of most results covers the whole result.
Region GradAccumulator::begin(ValueId id, bool may_be_fresh) {
  const Value& value = record_.tape.values[id];
  const Value& base = record_.tape.values[value.base];
  const Allocation& place = record_.store.places[value.base];
  at::Tensor& grad = task_.grads[place.grad];
  Region region{&grad, place.grad_offset + value.offset, value.geometry};
  const bool is_whole =
      value.geometry->contiguous && value.geometry->numel == base.geometry->extent;
  // On devices where a call is expensive, one call fills the buffer with zeros. The first gradient
  // may overwrite the zeros.
  if (wants_few_launches(value.device)) {
    buffer(value.base);
    region.fresh = std::exchange(task_.begun[value.base], 1) == 0 && may_be_fresh && is_whole;
    return region;
  }
  if (!grad.defined()) grad = pooled_empty(record_.store.grad_lengths[place.grad], base.options());
  if (std::exchange(task_.begun[value.base], 1) != 0) return region;
  region.fresh = may_be_fresh && is_whole;
  if (!region.fresh) clear(value.base);
  return region;
}

void GradAccumulator::clear(ValueId base) {
  const Allocation& place = record_.store.places[base];
  const at::Tensor& grad = task_.grads[place.grad];
  const size_t item = grad.element_size();
  std::memset(
      static_cast<char*>(grad.mutable_data_ptr()) + static_cast<size_t>(place.grad_offset) * item,
      0, static_cast<size_t>(record_.tape.values[base].geometry->extent) * item);
}

void GradAccumulator::complete(std::span<const NodeId> nodes) {
  const Node& first = record_.tape.nodes[nodes.front()];
  if (wants_few_launches(record_.tape.values[first.first_value].device)) return;
  for (uint32_t k = 0; k < first.num_values; ++k) {
    const auto result = [&](NodeId node) { return record_.tape.nodes[node].first_value + k; };
    const bool any = std::any_of(nodes.begin(), nodes.end(), [&](NodeId node) {
      return task_.grads[record_.store.places[result(node)].grad].defined();
    });
    if (!any) continue;
    for (const NodeId node : nodes) begin(result(node), false);
  }
}

at::Tensor& GradAccumulator::buffer(ValueId id) {
  const Allocation& place = record_.store.places[id];
  at::Tensor& grad = task_.grads[place.grad];
  if (!grad.defined()) {
    const Value& base = record_.tape.values[id];
    grad = pooled_zeros(record_.store.grad_lengths[place.grad] * count_, base.options());
  }
  return grad;
}

at::Tensor& GradAccumulator::gradient_of_base(ValueId base) {
  const Value& value = record_.tape.values[base];
  return value.is_graph_input() ? task_.graph_input_grads[value.index]
                                : task_.grads[record_.store.places[base].grad];
}

Region GradAccumulator::fresh(ValueId id) {
  const Partition& partition = *task_.partition;
  const Value& value = record_.tape.values[id];
  const uint8_t tile = partition.number[id];
  if (tile == Partition::kNone || !wanted(id)) return {};
  at::Tensor& grad = gradient_of_base(value.base);
  uint64_t& unwritten = task_.unwritten[value.base];
  const uint64_t bit = uint64_t{1} << tile;
  if (!grad.defined()) {
    const int64_t length = record_.tape.values[value.base].geometry->extent * count_;
    grad = enclosing_->gradient_memory(value.base, length);
    unwritten = ~uint64_t{0} >> (64 - partition.tiles[value.base].size());
  }
  if ((unwritten & bit) == 0) return {};
  unwritten &= ~bit;
  if (!record_.tape.values[value.base].is_graph_input()) mark_reached(value);
  return {&grad, value.offset, value.geometry};  // each base has a separate buffer
}

at::Tensor* GradAccumulator::untouched_graph_input(ValueId id) {
  const Value& value = record_.tape.values[id];
  if (!value.is_graph_input() || value.base != id || enclosing_ != nullptr) return nullptr;
  if (record_.cut(id) != kNone || !value.geometry->contiguous) return nullptr;
  at::Tensor& grad = task_.graph_input_grads[value.index];
  return grad.defined() ? nullptr : &grad;
}

at::Tensor* GradAccumulator::untouched(ValueId id) {
  const Value& value = record_.tape.values[id];
  const Value& base = record_.tape.values[value.base];
  if (!wanted(id) || !value.geometry->contiguous) return nullptr;
  if (value.geometry->numel != base.geometry->extent || value.geometry->numel == 0) return nullptr;
  if (base.is_graph_input() && enclosing_->is_weight(base.index)) return nullptr;
  at::Tensor& grad = gradient_of_base(value.base);
  if (grad.defined()) return nullptr;
  if (!base.is_graph_input()) mark_reached(value);
  return &grad;
}

void GradAccumulator::fill_rest(ValueId base) {
  uint64_t& unwritten = task_.unwritten[base];
  for (uint8_t tile = 0; unwritten != 0; ++tile, unwritten >>= 1) {
    if ((unwritten & 1) == 0) continue;
    const ValueId id = task_.partition->tiles[base][tile];
    const Value& value = record_.tape.values[id];
    const Region region{&gradient_of_base(base), value.offset, value.geometry};
    regular_view(RegionRows(region, count_, step(id))).zero_();
  }
}

// Must be called before a gradient is added to the gradient of `id`. Fills the unwritten tiles of
// the base with zeros, unless `id` is a tile that was already written to.
void GradAccumulator::fill_before_adding(ValueId id) {
  const ValueId base = record_.tape.values[id].base;
  const uint8_t tile = task_.partition->number[id];
  if (tile == Partition::kNone || (task_.unwritten[base] >> tile & 1) != 0) fill_rest(base);
}

bool GradAccumulator::is_alone(ValueId id) const {
  return task_.partition != nullptr && task_.partition->alone[record_.tape.values[id].base] != 0;
}

void GradAccumulator::mark_reached(const Value& value) {
  task_.reached[value.node] |= static_cast<uint8_t>(1u << std::min<uint32_t>(value.index, 7));
}

int64_t GradAccumulator::step(ValueId id) const {
  const Value& base = record_.tape.values[record_.tape.values[id].base];
  if (base.is_graph_input() && enclosing_->is_weight(base.index)) return 0;
  return base.geometry->extent;
}

Region GradAccumulator::gradient(ValueId id) const {
  const Allocation& place = record_.store.places[id];
  return {&task_.grads[place.grad], place.grad_offset, record_.tape.values[id].geometry};
}

}  // namespace autobatch
