// Backward over a flush: goes through the batches in reverse order and differentiates the members
// that a gradient has reached.
#pragma once

#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/flush_record.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace autobatch {

// Makes the state of a new backward pass. `wanted`: by graph input, whether its gradient is needed.
std::unique_ptr<BackwardTask> make_task(const FlushRecord& record, std::vector<uint8_t> wanted);
// Runs the levels from the highest one down to `last`, except levels that have been run already and
// levels that cannot have received a gradient. A level runs before the levels below it because it
// may send gradients to them. Within a level, the parts run in reverse order, each on the nodes
// that a gradient has reached. `keep_graph`: the pass has retain_graph=True.
void run_levels(FlushRecord& record, BackwardTask& task, uint32_t last, bool keep_graph);
// Must be called before a gradient is added to a held value of `level`. If that level or a lower
// one has been run, runs the remaining levels. Then makes the levels up to `level` ready to run
// again on the gradients that arrive from now on. This is correct because backward is linear in the
// gradients.
void expect_gradient(FlushRecord& record, BackwardTask& task, uint32_t level, bool keep_graph);
// Must be called before a node is computed again. Raises eager's error if the node was
// differentiated without retain_graph, or if a graph input that it reads was written to. Writes are
// allowed where the old content is kept and eager does not save the tensor.
void check_computable(const FlushRecord& record, NodeId node);
// Adds a product to a gradient region.
void add_to(const Region& region, const WeightGradTerm& product);
// Computes the gradients of graph inputs from the products collected for them, in as few GEMMs as
// is worthwhile.
void run_products(FlushRecord& record, BackwardTask& task);
// Like run_products, but for one weight, once its products have enough rows for an efficient GEMM.
// Collected products keep the memory of their factors alive.
void run_many_products(FlushRecord& record, BackwardTask& task, ValueId weight);

}  // namespace autobatch
