#include "autobatch/rules/by_shape.h"

#include <map>

namespace autobatch {
namespace {

using at::Tensor;

Regions operand_regions(const BatchView& batch, size_t slot, const Members& members) {
  Regions regions;
  for (int64_t m : members) {
    regions.push_back(batch.operand_region(m, slot));
  }
  return regions;
}

Regions result_regions(const BatchView& batch, uint32_t k, const Members& members) {
  Regions regions;
  for (int64_t m : members) {
    regions.push_back(batch.result_region(m, k));
  }
  return regions;
}

Tensor stacked(Regions regions) {
  if (regions.size() == 1) return region_view(regions.front()).unsqueeze(0);
  return stacked_of(RegionRows(std::move(regions)));
}

// Returns the dimensions of [n, *sizes], sorted by descending stride of the members. Dimension 0
// stays first. Copies in this order have longer contiguous runs.
at::DimVector memory_order(at::IntArrayRef strides) {
  at::DimVector order{0};
  for (int64_t d = 1; d <= static_cast<int64_t>(strides.size()); ++d) order.push_back(d);
  std::stable_sort(order.begin() + 1, order.end(), [&](int64_t a, int64_t b) {
    return strides[static_cast<size_t>(a - 1)] > strides[static_cast<size_t>(b - 1)];
  });
  return order;
}

const Geometry* permuted(GeometryTable& geometries, const Geometry& g, const at::DimVector& order) {
  at::DimVector sizes, strides;
  for (size_t d = 1; d < order.size(); ++d) {
    sizes.push_back(g.sizes[static_cast<size_t>(order[d] - 1)]);
    strides.push_back(g.strides[static_cast<size_t>(order[d] - 1)]);
  }
  return geometries.intern(sizes, strides);
}

}  // namespace

std::vector<Members> groups_of(const BatchView& batch) {
  std::map<std::vector<const Geometry*>, size_t> known;
  std::vector<Members> groups;
  for (int64_t m = 0; m < batch.size(); ++m) {
    std::vector<const Geometry*> geometries;
    for (size_t slot = 0; slot < batch.num_operands(); ++slot) {
      geometries.push_back(batch.given(slot) ? batch.operand_value(m, slot).geometry : nullptr);
    }
    const auto [found, is_new] = known.try_emplace(std::move(geometries), groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(m);
  }
  return groups;
}

Tensor stacked_of(const BatchView& batch, size_t slot, const Members& members) {
  return stacked(operand_regions(batch, slot, members));
}

bool lies_stacked(const BatchView& batch, size_t slot, const Members& members) {
  return layout_of(operand_regions(batch, slot, members)).regular;
}

Tensor results_of(const BatchView& batch, uint32_t k, const Members& members) {
  return stacked(result_regions(batch, k, members));
}

Tensor gradients_of(BackwardBatch& batch, uint32_t k, const Members& members) {
  Regions regions;
  for (int64_t m : members) regions.push_back(batch.grad_region(m, k));
  return stacked(std::move(regions));
}

void put_results(const Batch& batch, uint32_t k, const Members& members, const Tensor& values) {
  Regions places = result_regions(batch, k, members);
  const Geometry& g = *places.front().geometry;
  const at::DimVector sizes = stacked_sizes(static_cast<int64_t>(members.size()), g.sizes);
  const Tensor from = values.reshape(sizes).permute(memory_order(g.strides)).contiguous();
  GeometryTable geometries;
  const int64_t each = g.numel;
  const Geometry* piece = geometries.intern_contiguous({each});
  Regions pieces;
  for (size_t i = 0; i < members.size(); ++i) {
    pieces.push_back({&from, static_cast<int64_t>(i) * each, piece});
    places[i].geometry = piece;
  }
  copy_regions(pieces, places);
}

void add_gradients(BackwardBatch& batch, size_t slot, const Members& members,
                   const Tensor& gradient) {
  const auto& each = batch.operand_value(members.front(), slot).geometry->sizes;
  const Tensor rows = gradient.reshape(stacked_sizes(static_cast<int64_t>(members.size()), each));
  const at::DimVector order = memory_order(rows.strides().slice(1));
  const Tensor values = rows.permute(order).contiguous();
  GeometryTable geometries;
  const Geometry* piece = geometries.intern_contiguous(values.sizes().slice(1));
  Regions from, to;
  for (size_t i = 0; i < members.size(); ++i) {
    const ValueId id = batch.operand(members[i], slot);
    if (!batch.wanted(id)) continue;
    Region target = batch.target(members[i], id);
    target.geometry = permuted(geometries, *target.geometry, order);
    from.push_back({&values, static_cast<int64_t>(i) * piece->numel, piece});
    to.push_back(target);
  }
  add_regions(from, to);
}

}  // namespace autobatch
