// Implements BackwardBatch, a rule's access to a batch in backward.
#include "autobatch/backward/backward.h"
#include "autobatch/backward/saved_tensor_check.h"
#include "autobatch/common/pool.h"
#include "autobatch/rules/linear.h"
#include "autobatch/rules/rule.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <utility>

namespace autobatch {

BackwardBatch::BackwardBatch(FlushRecord& flush, BatchRecord& record, NodeSpan members,
                             GradAccumulator& accumulator, Level::Half half,
                             std::span<const int64_t> rows)
    : BatchView(flush.tape, flush.store, record, members, rows),
      flush_(flush),
      accumulator_(accumulator),
      half_(half) {}

void BackwardBatch::add_to_result(size_t k, const at::Tensor& gradient) {
  Regions targets;
  for (int64_t m = 0; m < size(); ++m) {
    targets.push_back(target(m, node(m).first_value + static_cast<ValueId>(k)));
  }
  scatter_add(plain(gradient), targets);
}

// Whether the k-th results of all members have the same geometry and are adjacent in memory, in the
// order in which forward wrote the results.
bool BackwardBatch::lies_evenly(size_t k) const {
  if (!complete() || !uniform_result(k)) return false;
  for (int64_t m = 0; m < size(); ++m) {
    if (members_[m] != flush_.order[record_.first + m]) return false;
  }
  return true;
}

// Returns the regions that `region_of` returns for the members. If the regions are evenly spaced
// (`step` elements apart), the first region and `step` describe all regions.
template <class RegionOf>
RegionRows BackwardBatch::located(bool even, int64_t step, const RegionOf& region_of) {
  if (even) return {region_of(0), size(), step};
  Regions regions(members_.size());
  for (int64_t m = 0; m < size(); ++m) regions[m] = region_of(m);
  return RegionRows(std::move(regions));
}

RegionRows BackwardBatch::located_results(size_t k) {
  const ValueId id = node(0).first_value + static_cast<ValueId>(k);
  const int64_t step = in_subgraph() ? store_.steps[id] : tape_.values[id].geometry->extent;
  const bool even = in_subgraph() ? rows_.empty() : lies_evenly(k);
  return located(even, step, [&](int64_t m) { return result_region(m, k); });
}

// Whether the gradients of the k-th results of all members are adjacent in memory. Returns false if
// the gradients are in two buffers.
bool BackwardBatch::has_even_gradients(size_t k) const {
  if (in_subgraph()) return true;
  if (!lies_evenly(k)) return false;
  const ValueId id = node(0).first_value + static_cast<ValueId>(k);
  const Allocation& first = store_.places[id];
  const Allocation& last = store_.places[node(size() - 1).first_value + static_cast<ValueId>(k)];
  const int64_t before = (size() - 1) * tape_.values[id].geometry->extent;
  return last.grad == first.grad && last.grad_offset == first.grad_offset + before;
}

RegionRows BackwardBatch::located_gradients(size_t k) {
  const ValueId id = node(0).first_value + static_cast<ValueId>(k);
  const bool even = has_even_gradients(k);
  accumulator_.buffer(id);
  for (int64_t m = 1; m < size() && !even; ++m) {
    accumulator_.buffer(node(m).first_value + static_cast<ValueId>(k));
  }
  const int64_t step = tape_.values[id].geometry->extent;
  return located(even, step, [&](int64_t m) { return grad_region(m, k); });
}

at::Tensor BackwardBatch::rows_of(const RegionRows& located, int64_t width) {
  if (located.layout().consecutive) return consecutive_rows(located, width);
  const at::Tensor all = gathered_copy(located);
  return rows_view(all, all.numel(), width, 0);
}

bool BackwardBatch::shared(size_t slot) {
  if (!BatchView::shared(slot)) return false;
  if (in_subgraph()) return true;
  const ValueId first = operand(0, slot);
  for (int64_t m = 1; m < size(); ++m) {
    const ValueId id = operand(m, slot);
    if (id == first) continue;
    if (tape_.values[id].base != tape_.values[first].base) return false;
    if (accumulator_.wanted(id) != accumulator_.wanted(first) ||
        flush_.cut(id) != flush_.cut(first))
      return false;
  }
  return true;
}

void BackwardBatch::check_unwritten(std::optional<size_t> slot) const {
  if (accumulator_.enclosing() != nullptr) return accumulator_.enclosing()->check_unwritten();
  const Written* written = accumulator_.task().written.get();
  if (written == nullptr) return;
  for (int64_t m = 0; m < size(); ++m) {
    slot ? written->check_unwritten(members_[m], *slot) : written->check_unwritten(members_[m]);
  }
}

bool BackwardBatch::needs(size_t slot) {
  const int64_t different = in_subgraph() ? 1 : size();
  for (int64_t m = 0; m < different; ++m) {
    const ValueId id = operand(m, slot);
    if (id != kNone && accumulator_.wanted(id)) return true;
  }
  return false;
}

// Returns the gradient buffer of the operands if a whole gradient tensor can become the buffer, and
// null otherwise. This is possible if the members' operands fill the buffer in order and without
// gaps, and no gradient has been written to the buffer. On success, marks the producers of the
// operands as reached.
at::Tensor* BackwardBatch::untouched(size_t slot, int64_t numel, c10::ScalarType dtype) {
  if (in_subgraph()) return untouched_of_all(slot, numel, dtype);
  at::Tensor* buffer = nullptr;
  int64_t end = 0, whole = 0;
  for (int64_t m = 0; m < size(); ++m) {
    const ValueId id = operand(m, slot);
    const Value& value = tape_.values[id];
    if (value.node == kNone || !accumulator_.wanted(id) || flush_.cut(id) != kNone) return nullptr;
    const Allocation& place = store_.places[value.base];
    at::Tensor& grad = accumulator_.task().grads[place.grad];
    if (grad.defined() || (buffer != nullptr && buffer != &grad)) return nullptr;
    if (place.grad_offset + value.offset != end || !value.geometry->contiguous) return nullptr;
    if (value.dtype != dtype) return nullptr;
    buffer = &grad;
    end += value.geometry->numel;
    whole = store_.grad_lengths[place.grad];
  }
  if (end == 0 || end != whole || end != numel) return nullptr;
  for (int64_t m = 0; m < size(); ++m) {
    accumulator_.mark_reached(operand_value(m, slot));
    accumulator_.task().begun[operand_value(m, slot).base] = 1;
  }
  return buffer;
}

// Like `untouched`, but in a subgraph, where one value represents the operands of all members.
at::Tensor* BackwardBatch::untouched_of_all(size_t slot, int64_t numel, c10::ScalarType dtype) {
  const Value& value = operand_value(0, slot);
  const int64_t elements = size() * tape_.values[value.base].geometry->extent;
  if (value.dtype != dtype || numel != elements) return nullptr;
  return accumulator_.untouched(operand(0, slot));
}

// Returns the gradient regions of the operands in `slot`. A region has no buffer if its gradient is
// not needed. Sets `all` to whether all gradients are needed.
RegionRows BackwardBatch::targets(size_t slot, bool& all) {
  all = true;
  if (in_subgraph()) {
    const ValueId id = operand(0, slot);
    all = accumulator_.wanted(id);
    return {all ? target(0, id) : Region{nullptr, 0, tape_.values[id].geometry}, size(),
            all ? accumulator_.step(id) : 0};
  }
  Regions regions(members_.size());
  for (int64_t m = 0; m < size(); ++m) {
    regions[m] = accumulator_.target_if_wanted(operand(m, slot));
    all = all && regions[m].buffer != nullptr;
  }
  return RegionRows(std::move(regions));
}

void BackwardBatch::add(size_t slot, at::Tensor&& gradient) {
  const at::Tensor& kept = gradient;
  const bool ours = kept.use_count() == 1 && kept.has_storage() &&
                    kept.storage().use_count() == 1 && kept.is_contiguous() && !kept.is_conj() &&
                    !kept.is_neg() && kept.storage().nbytes() == kept.nbytes();
  at::Tensor* buffer = ours ? untouched(slot, kept.numel(), kept.scalar_type()) : nullptr;
  if (buffer == nullptr) return add(slot, kept);
  *buffer = kept.view({-1});
}

void BackwardBatch::add(size_t slot, const at::Tensor& gradient) {
  if (at::Tensor* buffer = untouched(slot, gradient.numel(), gradient.scalar_type())) {
    *buffer = pooled_empty(gradient.numel(), gradient.options());
    buffer->view(gradient.sizes()).copy_(gradient);
    return;
  }
  if (const at::Tensor to = in_subgraph() ? fresh(slot) : at::Tensor(); to.defined()) {
    to.copy_(gradient.reshape(to.sizes()));
    return;
  }
  bool all = true;
  const RegionRows to = targets(slot, all);
  const Region& first = to.first();
  const Geometry& g = *first.geometry;
  const auto put = [&](const at::Tensor& there, const at::Tensor& values) {
    first.fresh ? there.copy_(values) : there.add_(values);
  };
  if (all && size() > 1 && to.layout().same && !g.overlapping) {
    return put(region_view(first), gradient.reshape(stacked_sizes(size(), g.sizes)).sum(0));
  }
  for (const Region& region : to.listed()) all = all && region.fresh == first.fresh;
  if (all) {
    const Layout& layout = to.layout();
    if (layout.consecutive && (size() == 1 || layout.numel > 0) && !g.overlapping) {
      put(consecutive_view(to), gradient.reshape({-1}));
      return;
    }
    const bool disjoint = layout.step >= g.extent && !g.overlapping;  // members share no memory
    if (layout.regular && !layout.same && disjoint) {
      put(regular_view(to), gradient.reshape(stacked_sizes(size(), g.sizes)));
      return;
    }
  }
  scatter_add(plain(gradient), to.all());
}

void BackwardBatch::add_computed(size_t slot, at::IntArrayRef sizes,
                                 c10::function_ref<void(at::Tensor&)> compute) {
  const at::TensorOptions options = operand_value(0, slot).options();
  const int64_t numel = c10::multiply_integers(sizes);
  if (at::Tensor* buffer = untouched(slot, numel, operand_value(0, slot).dtype)) {
    at::Tensor out = pooled_empty(sizes, options);
    compute(out);
    *buffer = out.view({-1});
    return;
  }
  const at::Tensor there = in_subgraph() ? fresh(slot) : fresh_run(slot);
  const bool in_place = there.defined() && there.is_contiguous();
  at::Tensor out = in_place ? there.view(sizes) : pooled_empty(sizes, options);
  compute(out);
  if (in_place) return;
  there.defined() ? void(there.copy_(out.view(there.sizes()))) : add(slot, out);
}

at::Tensor BackwardBatch::fresh(size_t slot) {
  if (!in_subgraph()) return fresh_side_by_side(slot);
  const ValueId id = operand(0, slot);
  const Region region = accumulator_.fresh(id);
  if (region.buffer == nullptr) return {};
  return regular_view(RegionRows(region, size(), accumulator_.step(id)));
}

at::Tensor BackwardBatch::fresh_side_by_side(size_t slot) {
  const Geometry* geometry = operand_value(0, slot).geometry;
  for (int64_t m = 1; m < size(); ++m) {
    if (operand_value(m, slot).geometry != geometry) return {};
  }
  const at::Tensor run = fresh_run(slot);
  if (!run.defined()) return {};
  return run.view(stacked_sizes(size(), geometry->sizes));
}

// Like `fresh`, but outside of a subgraph and for members of any sizes. Returns a 1-D tensor.
// Checks all members before it marks the gradient of any member as begun.
at::Tensor BackwardBatch::fresh_run(size_t slot) {
  if (!accumulator_.is_fresh(operand(0, slot))) return {};
  const Allocation& first = store_.places[operand_value(0, slot).base];
  int64_t end = first.grad_offset;
  for (int64_t m = 0; m < size(); ++m) {
    if (!accumulator_.is_fresh(operand(m, slot))) return {};
    const Value& value = operand_value(m, slot);
    const Allocation& place = store_.places[value.base];
    if (place.grad != first.grad || place.grad_offset != end) return {};
    end += value.geometry->numel;
  }
  for (int64_t m = 0; m < size(); ++m) accumulator_.target_to_add(operand(m, slot));
  const at::Tensor& buffer = accumulator_.task().grads[first.grad];
  return dense_view(buffer, {end - first.grad_offset}, first.grad_offset);
}

void BackwardBatch::pass_on(size_t slot, const at::Tensor& gradient) {
  const bool may =
      in_subgraph() && gradient.is_contiguous() && accumulator_.is_alone(operand(0, slot));
  at::Tensor* buffer =
      may ? untouched_of_all(slot, gradient.numel(), gradient.scalar_type()) : nullptr;
  if (buffer == nullptr) return add(slot, gradient);
  *buffer = gradient.view({-1});
}

void BackwardBatch::add_single(size_t slot, const at::Tensor& gradient) {
  const Region target = accumulator_.target(operand(0, slot));
  if (target.geometry->overlapping) {
    scatter_add(plain(gradient), {target});
    return;
  }
  region_view(target).add_(gradient.reshape(target.geometry->sizes));
}

void BackwardBatch::add_repeated(size_t slot, const at::Tensor& gradient) {
  const int64_t width = operand_value(0, slot).geometry->numel;
  std::vector<int64_t> counts;
  for (int64_t m = 0; m < size(); ++m) {
    if (operand_value(m, slot).geometry->numel != width || width == 0) break;
    counts.push_back(result_value(m, 0).geometry->numel / width);
  }
  if (counts.size() == members_.size()) {  // the usual case: each repetition is a row
    at::Tensor sums = pooled_empty({size(), width}, gradient.options());
    segment_sum(plain(gradient).view({-1, width}), counts, sums);
    add(slot, sums);
    return;
  }
  Regions targets;
  bool repeats = false;
  for (int64_t m = 0; m < size(); ++m) {
    const ValueId id = operand(m, slot);
    const Geometry* geometry = tape_.values[id].geometry;
    const Region to = accumulator_.wanted(id) ? target(m, id) : Region{nullptr, 0, geometry};
    const int64_t elements = result_value(m, 0).geometry->numel;
    for (int64_t i = 0; i < elements; i += geometry->numel) targets.push_back(to);
    repeats = repeats || geometry->numel != elements;
  }
  repeats ? scatter_add(plain(gradient), targets) : add(slot, gradient);
}

void BackwardBatch::add_rows(size_t slot, const at::Tensor& indices, const at::Tensor& rows,
                             int64_t skip, at::IntArrayRef times) {
  if (!needs(slot)) return;
  if (at::Tensor* whole = accumulator_.untouched_graph_input(operand(0, slot))) {
    const Value& value = operand_value(0, slot);
    *whole = pooled_empty(value.geometry->numel, value.options());
    const at::Tensor target = whole->view(value.geometry->sizes);
    return index_add_rows(target, indices, rows, skip, times, /*fresh=*/true);
  }
  index_add_rows(region_view(accumulator_.target(operand(0, slot))), indices, rows, skip, times);
}

void BackwardBatch::add_product(size_t slot, const at::Tensor& left, const at::Tensor& right) {
  ValueId id = operand(0, slot);
  const Value& base = tape_.values[operand_value(0, slot).base];
  const bool cut = flush_.cut(id) != kNone;
  WeightGradTerm product{left, right};
  if (right.defined() && !cut && is_transposed(tape_, id)) {  // the product is for the base
    id = tape_.values[id].base;
    std::swap(product.left, product.right);
  }
  Enclosing* enclosing = accumulator_.enclosing();
  if (enclosing != nullptr) {
    const bool whole = tape_.values[id].base == id;
    if (whole && base.is_graph_input() && enclosing->is_weight(base.index)) {
      return enclosing->add_product(base.index, product);
    }
  } else if (base.is_graph_input() && !cut) {
    accumulator_.task().products[id].push_back(product);
    return run_many_products(flush_, accumulator_.task(), id);
  }
  add_to(accumulator_.target(id), product);
}

std::vector<int64_t> BackwardBatch::positions() const {
  std::vector<int64_t> out;
  int64_t at = 0;
  for (int64_t m = 0; m < size(); ++m) {  // members keep the order of the batch
    if (in_subgraph()) {
      out.push_back(row(m));
      continue;
    }
    while (flush_.order[record_.first + at] != members_[m]) ++at;
    out.push_back(at++);
  }
  return out;
}

const LocalGraph& BackwardBatch::member_local(int64_t m) {
  // Members keep the order of the batch. If all members are selected, the search ends immediately.
  const auto first = flush_.order.begin() + record_.first;
  auto at = first + m;
  while (*at != members_[m]) ++at;
  return record_.local[at - first];
}

at::Tensor BackwardBatch::member_grad(int64_t m, size_t k) {
  accumulator_.buffer(node(m).first_value + static_cast<ValueId>(k));
  return region_view(grad_region(m, k));
}

void BackwardBatch::member_add(int64_t m, size_t slot, const at::Tensor& gradient) {
  const ValueId id = operand(m, slot);
  if (accumulator_.wanted(id)) scatter_add(plain(gradient), {target(m, id)});
}

}  // namespace autobatch
