// The layout of an elementwise op's result: sizes by broadcasting, strides as eager's kernels
// choose them, which follow the order of the operands' memory and not that of the dimensions.
#pragma once

#include "autobatch/graph/graph.h"

#include <optional>

namespace autobatch {

// An operand's geometry in the program: what is expanded outside of the graph is copied
// (Graph::add_graph_input), and eager's kernels look at the tensor itself.
const Geometry* given_geometry(const Tape& tape, const Value& value);

// Row-major, some dimensions perhaps expanded: where all operands are, so is the result.
bool row_major_or_expanded(const Geometry& geometry);

// Of the result of a kernel that runs over `operands` element by element, broadcast together:
// dense, in the order that at::TensorIterator finds (ATen/native/TensorIterator.cpp,
// `fast_set_up` and `reorder_dimensions`). `has_number`: a Python number is one of the operands.
// None where they do not broadcast, or where the layout is left to eager (nothing in it).
const Geometry* elementwise_result(GeometryTable& table, at::ArrayRef<const Geometry*> operands,
                                   bool has_number = false);

// The same of `clone` and others that keep the layout of their one operand (torch.preserve_format).
const Geometry* preserved_layout(GeometryTable& table, const Geometry& operand);

// [N, C, H, W] with the channels last; none for other ranks, or without elements.
const Geometry* channels_last(GeometryTable& table, at::IntArrayRef sizes);

// The dimensions in the order of memory, the outermost first.
c10::SmallVector<uint8_t, 6> memory_order(const Geometry& geometry);

// Dense, its dimensions in that order.
const Geometry* dense_in_order(GeometryTable& table, at::IntArrayRef sizes,
                               at::ArrayRef<uint8_t> order);

// An operand expanded to the sizes of `result`, its dimensions in the order of the result's memory:
// elements that stand beside each other there have the same place in both.
const Geometry* in_memory_order(GeometryTable& table, const Geometry& operand,
                                const Geometry& result);

}  // namespace autobatch
