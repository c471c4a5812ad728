// The memory layout of an elementwise op's result. Broadcasting determines the sizes. The strides
// are equal to the strides that eager's kernels produce. These strides depend on the memory order
// of the operands.
#pragma once

#include "autobatch/graph/graph.h"

namespace autobatch {

// Returns the geometry that the operand has in the user's program. A graph input that was expanded
// outside the graph is copied (Graph::add_graph_input), but eager's kernels see the strides of the
// original tensor.
const Geometry* given_geometry(const Tape& tape, const Value& value);

// Whether the geometry is row-major, apart from expanded dimensions. If this is true for all
// operands, the result is row-major.
bool row_major_or_expanded(const Geometry& geometry);

// Returns the geometry of the result of an elementwise kernel over `operands`, broadcast together.
// The returned geometry is dense, with the dimensions in the order that at::TensorIterator finds
// (ATen/native/TensorIterator.cpp, `fast_set_up` and `reorder_dimensions`). `has_number`: whether
// the kernel also has a Python number as an operand. Returns null if the operands do not broadcast,
// or if the result is empty and not row-major. In both cases eager must run the call.
const Geometry* elementwise_result(GeometryTable& table, at::ArrayRef<const Geometry*> operands,
                                   bool has_number = false);

// Returns the result geometry of `clone` and other ops that keep the layout of their operand
// (torch.preserve_format). Returns null if the operand is empty.
const Geometry* preserved_layout(GeometryTable& table, const Geometry& operand);

// Returns the channels-last geometry of [N, C, H, W]. Returns null for other ranks, or if there are
// no elements.
const Geometry* channels_last(GeometryTable& table, at::IntArrayRef sizes);

// Returns the dimensions in memory order, the outermost first.
c10::SmallVector<uint8_t, 6> memory_order(const Geometry& geometry);

// Returns the dense geometry with these sizes. `order` contains the dimensions in memory order, the
// outermost first.
const Geometry* dense_in_order(GeometryTable& table, at::IntArrayRef sizes,
                               at::ArrayRef<uint8_t> order);

// Returns the geometry of the operand expanded to the sizes of `result`, with the dimensions
// permuted to the memory order of `result`. Element i in row-major order is then element i of the
// result's memory.
const Geometry* in_memory_order(GeometryTable& table, const Geometry& operand,
                                const Geometry& result);

}  // namespace autobatch
