// Runs backward over a flush. The batches run in reverse order. In each batch, backward runs for
// the members that a gradient has reached.
#pragma once

#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/flush_record.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace autobatch {

// Creates the state of a new backward pass. `wanted[i]`: whether the gradient of graph input i is
// needed.
std::unique_ptr<BackwardTask> make_task(const FlushRecord& record, std::vector<uint8_t> wanted);
// Runs the levels from the highest level down to `last`. Skips levels that have already run and
// levels that cannot have received a gradient. Higher levels run first, because a level may send
// gradients to lower levels. Within a level, the parts run in reverse order. Each part runs for the
// nodes that a gradient has reached. `keep_graph`: whether the pass has retain_graph=True.
void run_levels(FlushRecord& record, BackwardTask& task, uint32_t last, bool keep_graph);
// Must be called before a gradient is added to a held value of `level`. If `level` or a lower level
// has already run, this function runs the remaining levels and then resets the levels up to
// `level`. These levels can then run again for the gradients that arrive later. Two runs of a level
// give the correct sum, because backward is linear in the gradients.
void expect_gradient(FlushRecord& record, BackwardTask& task, uint32_t level, bool keep_graph);
// Must be called before a node is computed again. Raises the error of eager mode if backward of the
// node has already run without retain_graph, or if a graph input of the node was written to. A
// write is allowed if the old content is kept and eager mode does not save the tensor.
void check_computable(const FlushRecord& record, NodeId node);
// Computes a product, and adds the result to the gradient in `region`.
void add_to(const Region& region, const WeightGradTerm& product);
// Computes the gradients of graph inputs from the products that were collected for them. Joins
// products if one larger GEMM is faster.
void run_products(FlushRecord& record, BackwardTask& task);
// Like run_products, but only for `weight`, and only if the products of this weight have enough
// rows for an efficient GEMM. This call saves memory, because collected products keep their factors
// alive.
void run_many_products(FlushRecord& record, BackwardTask& task, ValueId weight);

}  // namespace autobatch
