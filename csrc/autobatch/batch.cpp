#include "autobatch/batch.h"

#include "autobatch/pool.h"
#include "autobatch/rules.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

namespace autobatch {

BatchView::BatchView(const Tape& tape, const Store& store, BatchRecord& record,
                     std::span<const NodeId> members)
    : tape_(tape),
      store_(store),
      record_(record),
      members_(members),
      gathered_(tape.nodes[members[0]].num_operands) {}

bool BatchView::uniform_result(size_t k) const {
  const Geometry* geometry = result_value(0, k).geometry;
  for (int64_t m = 1; m < size(); ++m) {
    if (result_value(m, k).geometry != geometry) return false;
  }
  return true;
}

bool BatchView::uniform(size_t slot) const {
  const Geometry* geometry = operand_value(0, slot).geometry->canonical;
  for (int64_t m = 1; m < size(); ++m) {
    if (operand_value(m, slot).geometry->canonical != geometry) return false;
  }
  return true;
}

BatchView::Gathered& BatchView::regions_of(size_t slot) {
  Gathered& g = gathered_[slot];
  if (!g.ready) {
    g.regions.reserve(members_.size());
    for (int64_t m = 0; m < size(); ++m)
      g.regions.push_back(store_.region(tape_, operand(m, slot)));
    g.layout = layout_of(g.regions);
    g.ready = true;
  }
  return g;
}

bool BatchView::shared(size_t slot) { return regions_of(slot).layout.same; }

at::Tensor BatchView::single(size_t slot) { return region_view(regions_of(slot).regions.front()); }

at::Tensor BatchView::gather(const Gathered& g) {
  const at::Tensor& buffer = *g.regions.front().buffer;
  at::Tensor out = pooled_empty(g.layout.numel, buffer.options());
  gather_into(g.regions, out);
  return out;
}

at::Tensor BatchView::stacked(size_t slot) {
  Gathered& g = regions_of(slot);
  if (g.layout.regular) return regular_view(g.regions, g.layout);
  at::DimVector sizes{size()};
  const auto& each = g.regions.front().geometry->sizes;
  sizes.append(each.begin(), each.end());
  if (at::Tensor copy = kept(slot); copy.defined()) return copy.view(sizes);
  at::Tensor copy = gather(g);
  keep(slot, copy);
  return copy.view(sizes);
}

at::Tensor BatchView::rows(size_t slot, int64_t width) {
  Gathered& g = regions_of(slot);
  const Geometry& first = *g.regions.front().geometry;
  if (g.layout.consecutive && g.layout.numel > 0) {
    return consecutive_view(g.regions, g.layout).view({-1, width});
  }
  if (g.layout.regular && first.numel == width && first.contiguous) {
    const Region& r = g.regions.front();
    return r.buffer->as_strided({size(), width}, {g.layout.step, 1},
                                r.buffer->storage_offset() + r.offset);
  }
  if (at::Tensor copy = kept(slot); copy.defined()) return copy.view({-1, width});
  at::Tensor copy = gather(g);
  keep(slot, copy);
  return copy.view({width == 0 ? 0 : copy.numel() / width, width});
}

at::Tensor BatchView::flat(size_t slot) {
  Gathered& g = regions_of(slot);
  if (g.layout.consecutive) return consecutive_view(g.regions, g.layout);
  if (at::Tensor copy = kept(slot); copy.defined()) return copy;
  at::Tensor copy = gather(g);
  keep(slot, copy);
  return copy;
}

at::Tensor BatchView::flat_repeated(size_t slot) {
  Regions regions;
  bool repeats = false;
  int64_t total = 0;
  for (int64_t m = 0; m < size(); ++m) {
    const Region region = store_.region(tape_, operand(m, slot));
    const int64_t wanted = result_value(m, 0).geometry->numel;
    for (int64_t i = 0; i < wanted; i += region.geometry->numel) regions.push_back(region);
    repeats = repeats || region.geometry->numel != wanted;
    total += wanted;
  }
  if (!repeats) return flat(slot);
  const at::Tensor& buffer = *store_.region(tape_, operand(0, slot)).buffer;
  at::Tensor out = pooled_empty(total, buffer.options());
  gather_into(regions, out);
  return out;
}

void Batch::keep(size_t slot, const at::Tensor& copy) {
  if (!record_.needs_grad || !record_.rule->saves() || !record_.rule->reads(slot)) return;
  if (record_.gathered.empty()) record_.gathered.resize(num_operands());
  record_.gathered[slot] = copy;
}

at::Tensor Batch::output(size_t k) {
  const Place& first = store_.places[node(0).first_value + k];
  const Place& last = store_.places[node(size() - 1).first_value + k];
  const int64_t end = last.offset + result_value(size() - 1, k).geometry->extent;
  const at::Tensor& slab = store_.slabs[first.slab];
  return slab.as_strided({end - first.offset}, {1}, first.offset);
}

at::Tensor Batch::output_stacked(size_t k) {
  const Geometry& g = *result_value(0, k).geometry;
  const Place& first = store_.places[node(0).first_value + k];
  at::DimVector sizes{size()};
  at::DimVector strides{g.extent};
  sizes.append(g.sizes.begin(), g.sizes.end());
  strides.append(g.strides.begin(), g.strides.end());
  return store_.slabs[first.slab].as_strided(sizes, strides, first.offset);
}

at::Tensor Batch::output_rows(size_t k, int64_t width) {
  at::Tensor all = output(k);
  return all.view({width == 0 ? 0 : all.numel() / width, width});
}

}  // namespace autobatch
