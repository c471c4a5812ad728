#include "autobatch/rules/batch.h"

#include "autobatch/common/pool.h"
#include "autobatch/kernels/packed_weights.h"
#include "autobatch/kernels/to_device.h"
#include "autobatch/rules/rule.h"

namespace autobatch {

void BatchRecord::drop_kept() {
  local.clear();
  if (rule == nullptr || rule->saves()) kept.reset();
}

BatchView::BatchView(const Tape& tape, const Store& store, BatchRecord& record, NodeSpan members,
                     std::span<const int64_t> rows)
    : tape_(tape),
      store_(store),
      record_(record),
      members_(members),
      rows_(rows),
      located_(tape.nodes[members[0]].num_operands) {}

WeightCopies* BatchView::weight_copies(size_t slot, int64_t m) const {
  const Value& value = operand_value(m, slot);
  const size_t num_views =
      in_subgraph() ? 1 : 0;  // a subgraph reads a view (Subgraph::bind_weight)
  const bool kept = store_.kept_copies != nullptr && value.is_graph_input() &&
                    store_.kept_copies->keep(tape_.graph_inputs[value.index], num_views);
  return kept ? store_.kept_copies : store_.copies;
}

bool BatchView::uniform_result(size_t k) const {
  if (in_subgraph()) return true;
  if (k == 0 && uniform_first_.has_value()) return *uniform_first_;
  const Geometry* geometry = result_value(0, k).geometry;
  bool uniform = true;
  for (int64_t m = 1; m < size() && uniform; ++m) {
    uniform = result_value(m, k).geometry == geometry;
  }
  if (k == 0) uniform_first_ = uniform;
  return uniform;
}

bool BatchView::uniform(size_t slot) const {
  if (in_subgraph()) return true;
  const Geometry* geometry = operand_value(0, slot).geometry->canonical;
  for (int64_t m = 1; m < size(); ++m) {
    if (operand_value(m, slot).geometry->canonical != geometry) return false;
  }
  return true;
}

const RegionRows& BatchView::located(size_t slot) {
  RegionRows& known = located_[slot];
  if (known.count() != 0) return known;
  if (in_subgraph() && rows_.empty()) {
    const int64_t step = store_.steps[operand_value(0, slot).base];
    return known = RegionRows(operand_region(0, slot), size(), step);
  }
  Regions regions(members_.size());
  if (in_subgraph()) {
    for (int64_t m = 0; m < size(); ++m) regions[m] = operand_region(m, slot);
  } else {
    for (int64_t m = 0; m < size(); ++m) regions[m] = store_.region(tape_, operand(m, slot));
  }
  return known = RegionRows(std::move(regions));
}

bool BatchView::shared(size_t slot) { return located(slot).layout().same; }

at::Tensor BatchView::single(size_t slot) { return region_view(located(slot).first()); }

const at::Tensor& BatchView::gathered(size_t slot) {
  if (gathered_.empty()) gathered_.resize(located_.size());
  at::Tensor& copy = gathered_[slot];
  if (!copy.defined()) copy = gathered_copy(located(slot));
  return copy;
}

at::Tensor BatchView::stacked(size_t slot) {
  const RegionRows& g = located(slot);
  if (g.layout().regular) return regular_view(g);
  return dense_view(gathered(slot), stacked_sizes(size(), g.first().geometry->sizes), 0);
}

at::Tensor BatchView::rows(size_t slot, int64_t width) {
  const RegionRows& g = located(slot);
  const Geometry& first = *g.first().geometry;
  if (g.layout().consecutive && g.layout().numel > 0) {
    return consecutive_rows(g, width);
  }
  if (g.layout().regular && first.numel == width && first.contiguous) {
    const Region& r = g.first();
    return strided_view(*r.buffer, {size(), width}, {g.layout().step, 1}, r.offset);
  }
  const at::Tensor& copy = gathered(slot);
  return rows_view(copy, copy.numel(), width, 0);
}

at::Tensor BatchView::flat(size_t slot) {
  const RegionRows& g = located(slot);
  return g.layout().consecutive ? consecutive_view(g) : gathered(slot);
}

at::Tensor BatchView::flat_repeated(size_t slot) {
  const auto elements = [&](int64_t m) { return result_value(m, 0).geometry->numel; };
  bool repeats = false;
  int64_t total = 0;
  for (int64_t m = 0; m < size(); ++m) {
    repeats = repeats || operand_value(m, slot).geometry->numel != elements(m);
    total += elements(m);
  }
  if (!repeats) return flat(slot);
  const int64_t width = operand_value(0, slot).geometry->numel;
  bool even = width > 0;
  for (int64_t m = 0; m < size(); ++m) {
    even = even && operand_value(m, slot).geometry->numel == width;
  }
  if (even) return repeated_rows(slot, width, total / width);
  Regions regions;
  for (int64_t m = 0; m < size(); ++m) {
    const Region region = operand_region(m, slot);
    for (int64_t i = 0; i < elements(m); i += region.geometry->numel) regions.push_back(region);
  }
  at::Tensor out = pooled_empty(total, operand_region(0, slot).buffer->options());
  gather_into(regions, out);
  return out;
}

// Returns the operands as one 1-D tensor. The operand of each member is a row of `width` elements,
// which is repeated to the size of the member's result. `count` is the total number of repetitions.
at::Tensor BatchView::repeated_rows(size_t slot, int64_t width, int64_t count) {
  if (shared(slot)) {
    const at::Tensor row = single(slot).reshape({1, width}).expand({count, width});
    return width == 1 ? row.squeeze(1) : row.reshape({count * width});
  }
  const at::Tensor each = rows(slot, width);
  const at::Tensor counts = at::empty({size()}, at::kLong);
  auto* to = counts.mutable_data_ptr<int64_t>();
  for (int64_t m = 0; m < size(); ++m) to[m] = result_value(m, 0).geometry->numel / width;
  const at::Tensor repeated = at::repeat_interleave(each, to_device(counts, each.device()),
                                                    /*dim=*/0, /*output_size=*/count);
  return repeated.reshape({count * width});
}

namespace {

// Returns the number of elements from the start of region `first` to the end of region `last`.
int64_t length_to(const Region& first, const Region& last) {
  return last.offset + last.geometry->extent - first.offset;
}

}  // namespace

at::Tensor Batch::output(size_t k) {
  const Region first = result_region(0, k);
  return strided_view(*first.buffer, {length_to(first, result_region(size() - 1, k))}, {1},
                      first.offset);
}

at::Tensor Batch::output_stacked(size_t k) {
  const Region first = result_region(0, k);
  return regular_view(RegionRows(first, size(), first.geometry->extent));
}

at::Tensor Batch::output_rows(size_t k, int64_t width) {
  const Region first = result_region(0, k);
  return rows_view(*first.buffer, length_to(first, result_region(size() - 1, k)), width,
                   first.offset);
}

}  // namespace autobatch
