// One call over the rows of all instances, and the layout of elementwise operands in such a call.
#include "autobatch/rules/rowwise.h"

#include "autobatch/common/pool.h"
#include "autobatch/rules/elementwise_layout.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <string_view>

namespace autobatch {

using at::Tensor;
using torch::jit::Stack;

namespace {

bool needs_gradient(const BatchView& batch, size_t slot) {
  for (int64_t m = 0; m < batch.size(); ++m) {
    if (batch.operand_value(m, slot).requires_grad) return true;
  }
  return false;
}

}  // namespace

// --- the call ---

LocalGraph RowsCall::call(BatchView& batch, bool needs_grad) const {
  const at::AutoGradMode grad_mode(needs_grad);
  LocalGraph graph;
  for (size_t s = 0; s < batch.num_operands(); ++s) {
    if (!batch.given(s)) {
      graph.inputs.emplace_back();
      continue;
    }
    graph.inputs.push_back(leaf(operand(batch, s), needs_grad && needs_gradient(batch, s)));
  }
  const Signature& signature = batch.signature();
  Stack stack = rebuild(signature, graph.inputs);
  adjust(batch, stack);
  signature.op->handle.callBoxed(stack);
  graph.outputs = results_of(stack);
  return graph;
}

void RowsCall::forward(Batch& batch) const {
  LocalGraph graph = call(batch, batch.needs_grad());
  put(batch, graph);
  if (batch.needs_grad()) batch.record().local.push_back(std::move(graph));
}

void RowsCall::put(Batch& batch, const LocalGraph& graph) const {
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    Tensor out = batch.output(k);
    const Tensor& result = graph.outputs[k];
    TORCH_INTERNAL_ASSERT(result.numel() == out.numel() &&
                          result.scalar_type() == out.scalar_type());
    out.view(result.sizes()).copy_(result.detach());
  }
}

std::vector<Tensor> RowsCall::gradients(BackwardBatch& batch, const LocalGraph& graph) const {
  std::vector<Tensor> out;
  for (size_t k = 0; k < graph.outputs.size(); ++k) {
    const Tensor& result = graph.outputs[k];
    out.push_back(result.requires_grad() ? batch.grad_flat(k).view(result.sizes()) : Tensor());
  }
  return out;
}

void RowsCall::backward(BackwardBatch& batch) const {
  if (batch.record().local.empty()) return loop_rule().backward(batch);
  const LocalGraph* graph = &batch.record().local.front();
  LocalGraph again;
  if (!batch.complete()) {  // omit rows without a gradient, because 0 * NaN is NaN
    batch.check_unwritten();
    const ContextGuard context(batch.signature().context);
    again = call(batch, true);
    graph = &again;
  }
  const std::vector<Tensor> grads = differentiate(*graph, gradients(batch, *graph));
  for (size_t s = 0; s < grads.size(); ++s) {
    if (grads[s].defined() && batch.needs(s)) add_gradient(batch, s, grads[s]);
  }
}

// --- broadcasting over rows ---

bool repeats_along(const Geometry& small, at::IntArrayRef large) {
  if (small.sizes == large) return true;
  if (small.dim() > static_cast<int64_t>(large.size()) || small.numel == 0) return false;
  size_t first = 0;
  while (first < small.sizes.size() && small.sizes[first] == 1) ++first;
  const size_t shift = large.size() - small.sizes.size();
  for (size_t d = first; d < small.sizes.size(); ++d) {
    if (small.sizes[d] != large[d + shift]) return false;
  }
  return true;
}

namespace {

// Returns the operand's size in dimension `d` of a result of rank `rank`, or 1 if the operand does
// not have this dimension.
int64_t aligned_size(const Geometry& g, size_t rank, size_t d) {
  const size_t missing = rank - g.sizes.size();
  return d < missing ? 1 : g.sizes[d - missing];
}

// Returns the dimension along which rows are counted. In most cases, this is the first dimension.
// If all dimensions before the second-to-last dimension have size 1, rows are counted along the
// second-to-last dimension. An example is [1, T, d] in a minibatch of size 1.
size_t row_dim(at::IntArrayRef sizes) {
  const size_t last = sizes.size() < 2 ? 0 : sizes.size() - 2;
  return c10::multiply_integers(sizes.begin(), sizes.begin() + last) == 1 ? last : 0;
}

}  // namespace

Spread spread_of(at::ArrayRef<const Geometry*> operands, at::IntArrayRef sizes, bool row_major) {
  if (!row_major) return Spread::kExpanded;
  const size_t along = row_dim(sizes);
  bool elements = true, rows = !sizes.empty() && (along > 0 || sizes.size() < 3 || sizes[0] != 1);
  for (const Geometry* g : operands) {
    elements = elements && repeats_along(*g, sizes);
    for (size_t d = along + 1; d < sizes.size(); ++d) {
      // The number of rows is not compared, because [T, d] * [T, 1] must have the same spread for T
      // = 1 and for larger T.
      if (g->sizes.size() == sizes.size() && g->sizes[d] != sizes[d]) elements = false;
      rows = rows && aligned_size(*g, sizes.size(), d) != 0;
    }
  }
  return elements ? Spread::kElements : rows ? Spread::kRows : Spread::kExpanded;
}

void add_spread_key(NodeBuilder& builder, Spread spread, at::ArrayRef<const Geometry*> operands,
                    at::IntArrayRef sizes) {
  const size_t along = row_dim(sizes);
  builder.key(static_cast<uint64_t>(spread) << 32 | along << 16 | sizes.size());
  for (const Geometry* g : operands) builder.key(g->sizes.size());
}

bool one_value(const BatchView& batch, size_t slot) {
  if (batch.size() > 1 && &batch.node(0) == &batch.node(1)) {
    // In a subgraph, all members have the same value numbers, so the regions are compared.
    return batch.operand_region(0, slot).offset == batch.operand_region(1, slot).offset;
  }
  const ValueId first = batch.operand(0, slot);
  for (int64_t m = 1; m < batch.size(); ++m) {
    if (batch.operand(m, slot) != first) return false;
  }
  return true;
}

namespace {

// Returns the sizes of a row of member m's operand. The sizes are aligned with the dimensions of
// the result.
at::DimVector row_sizes(const BatchView& batch, size_t slot, int64_t m = 0) {
  const auto& result = batch.result_value(m, 0).geometry->sizes;
  at::DimVector sizes;
  for (size_t d = row_dim(result) + 1; d < result.size(); ++d) {
    sizes.push_back(aligned_size(*batch.operand_value(m, slot).geometry, result.size(), d));
  }
  return sizes;
}

bool has_rows_of_one_size(const BatchView& batch) {
  for (size_t slot = 0; slot < batch.num_operands(); ++slot) {
    if (batch.uniform(slot)) continue;
    const at::DimVector first = row_sizes(batch, slot);
    for (int64_t m = 1; m < batch.size(); ++m) {
      if (row_sizes(batch, slot, m) != first) return false;
    }
  }
  return true;
}

// Returns, for each row of operand `slot`, how often the call uses the row. The call uses a row
// once, or once for each row of the member's result.
Counts row_counts(const BatchView& batch, size_t slot) {
  const size_t along = row_dim(batch.result_value(0, 0).geometry->sizes);
  Counts counts;
  for (int64_t m = 0; m < batch.size(); ++m) {
    const auto& result = batch.result_value(m, 0).geometry->sizes;
    const int64_t own = aligned_size(*batch.operand_value(m, slot).geometry, result.size(), along);
    if (own == result[along]) {
      counts.insert(counts.end(), static_cast<size_t>(own), 1);
    } else {
      counts.push_back(result[along]);
    }
  }
  return counts;
}

// The backward kernel of aten::_prelu_kernel allocates the gradient of each operand with the
// operand's sizes. If PyTorch must resize a gradient, it prints a warning. Therefore the call must
// not broadcast the first operand.
constexpr std::string_view kNeverBroadcastsFirst = "aten::_prelu_kernel";

// Whether the call takes the operand once for all members. `is_one(slot)` is true if all members
// have the same operand in this slot. If this is true for all slots, the first operand is still
// repeated for each member, because the result must have a row for each member.
template <class IsOne>
bool stands_once(const BatchView& batch, size_t slot, const IsOne& is_one) {
  if (!is_one(slot)) return false;
  if (slot != 0 || batch.size() == 1) return true;
  if (batch.signature().op->name == kNeverBroadcastsFirst) return false;
  for (size_t other = 1; other < batch.num_operands(); ++other) {
    if (!is_one(other)) return true;
  }
  return false;
}

bool is_one_row(const BatchView& batch, size_t slot) {
  const auto& result = batch.result_value(0, 0).geometry->sizes;
  const size_t along = row_dim(result);
  return stands_once(batch, slot, [&](size_t s) {
    return one_value(batch, s) &&
           aligned_size(*batch.operand_value(0, s).geometry, result.size(), along) == 1;
  });
}

// Regions of the members' values, with geometries from in_memory_order. The geometries exist as
// long as this object.
class OrderedRegions {
 public:
  explicit OrderedRegions(const BatchView& batch) : batch_(batch) {}

  // `region_of(m)` returns the region of member m's value.
  template <class RegionOf>
  Regions of(const RegionOf& region_of) {
    Regions regions;
    regions.reserve(static_cast<size_t>(batch_.size()));
    for (int64_t m = 0; m < batch_.size(); ++m) {
      Region region = region_of(m);
      region.geometry = in_order(*region.geometry, *batch_.result_value(m, 0).geometry);
      regions.push_back(region);
    }
    return regions;
  }

 private:
  const Geometry* in_order(const Geometry& own, const Geometry& result) {
    const Geometry*& known = known_[{&own, &result}];
    if (known == nullptr) known = in_memory_order(table_, own, result);
    return known;
  }

  const BatchView& batch_;
  GeometryTable table_;
  std::map<std::pair<const Geometry*, const Geometry*>, const Geometry*> known_;
};

bool are_row_major(const BatchView& batch) {
  for (int64_t m = 0; m < batch.size(); ++m) {
    if (!batch.result_value(m, 0).geometry->contiguous) return false;
  }
  return true;
}

bool is_as_large(const BatchView& batch, size_t slot) {
  for (int64_t m = 0; m < batch.size(); ++m) {
    const auto& own = batch.operand_value(m, slot).geometry->sizes;
    if (own != batch.result_value(m, 0).geometry->sizes) return false;
  }
  return true;
}

}  // namespace

Tensor expanded(BatchView& batch, size_t slot) {
  if (are_row_major(batch) && is_as_large(batch, slot)) return batch.flat(slot);
  OrderedRegions ordered(batch);
  return flat_of(RegionRows(ordered.of([&](int64_t m) { return batch.operand_region(m, slot); })));
}

void add_expanded(BackwardBatch& batch, size_t slot, const Tensor& gradient) {
  if (are_row_major(batch) && is_as_large(batch, slot)) return batch.add(slot, gradient);
  OrderedRegions ordered(batch);
  scatter_add(plain(gradient), ordered.of([&](int64_t m) {
    const ValueId id = batch.operand(m, slot);
    return batch.wanted(id) ? batch.target(m, id)
                            : Region{nullptr, 0, batch.operand_value(m, slot).geometry};
  }));
}

Tensor results_in_order(BackwardBatch& batch) {
  if (are_row_major(batch)) return batch.result_flat(0);
  OrderedRegions ordered(batch);
  return flat_of(RegionRows(ordered.of([&](int64_t m) { return batch.result_region(m, 0); })));
}

Tensor gradients_in_order(BackwardBatch& batch) {
  const Tensor flat = batch.grad_flat(0);  // a gradient that has not arrived is zero
  if (are_row_major(batch)) return flat;
  OrderedRegions ordered(batch);
  return flat_of(RegionRows(ordered.of([&](int64_t m) { return batch.grad_region(m, 0); })));
}

Tensor elements(BatchView& batch, size_t slot) {
  return batch.uniform_result(0) ? batch.stacked(slot) : expanded(batch, slot);
}

Tensor elements_of_results(BackwardBatch& batch) {
  return batch.uniform_result(0) ? batch.result_stacked(0) : results_in_order(batch);
}

Tensor elements_of_gradients(BackwardBatch& batch) {
  return batch.uniform_result(0) ? batch.grad_stacked(0) : gradients_in_order(batch);
}

void add_elements(BackwardBatch& batch, size_t slot, const Tensor& passed, Tensor gradient) {
  const bool same = gradient.is_same(passed);
  if (!batch.uniform_result(0) && !are_row_major(batch)) return add_expanded(batch, slot, gradient);
  same ? batch.pass_on(slot, gradient) : batch.add(slot, std::move(gradient));
}

bool is_one_element(const BatchView& batch, size_t slot) {
  return batch.num_operands() > 1 && stands_once(batch, slot, [&](size_t s) {
           return batch.operand_value(0, s).geometry->numel == 1 && one_value(batch, s);
         });
}

Spread spread_in(const BatchView& batch, at::ArrayRef<const Geometry*> operands, bool row_major) {
  const Spread spread = spread_of(operands, batch.result_value(0, 0).geometry->sizes, row_major);
  return spread == Spread::kRows && !has_rows_of_one_size(batch) ? Spread::kExpanded : spread;
}

at::DimVector spread_sizes(const BatchView& batch, size_t slot) {
  at::DimVector sizes = row_sizes(batch, slot);
  const size_t along = row_dim(batch.result_value(0, 0).geometry->sizes);
  int64_t rows = 0;
  for (int64_t m = 0; m < batch.size(); ++m) {
    rows += batch.result_value(m, 0).geometry->sizes[along];
  }
  sizes.insert(sizes.begin(), is_one_row(batch, slot) ? 1 : rows);
  return sizes;
}

Tensor spread_rows(BatchView& batch, size_t slot) {
  at::DimVector sizes = row_sizes(batch, slot);
  const int64_t width = c10::multiply_integers(sizes);
  if (is_one_row(batch, slot)) {
    sizes.insert(sizes.begin(), 1);
    return batch.single(slot).reshape(sizes);
  }
  const Tensor rows = repeat_rows(batch.rows(slot, width), row_counts(batch, slot));
  sizes.insert(sizes.begin(), rows.size(0));
  return rows.view(sizes);
}

void add_spread_rows(BackwardBatch& batch, size_t slot, const Tensor& gradient) {
  if (is_one_row(batch, slot)) return batch.add_single(slot, gradient);
  const Counts counts = row_counts(batch, slot);
  const auto repeated = [](int64_t c) { return c != 1; };
  if (std::none_of(counts.begin(), counts.end(), repeated)) return batch.add(slot, gradient);
  const int64_t width = c10::multiply_integers(gradient.sizes().slice(1));
  const Tensor rows = gradient.reshape({gradient.size(0), width});
  Tensor sums = pooled_empty({static_cast<int64_t>(counts.size()), width}, rows.options());
  segment_sum(rows, counts, sums);
  batch.add(slot, sums);
}

}  // namespace autobatch
