// Backward over a flush: the batches are walked in reverse, over the members that a gradient has
// reached.
#pragma once

#include "autobatch/rules/backward_batch.h"
#include "autobatch/rules/flush_record.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace autobatch {

// The state of a new backward pass; `wanted` says for each graph input whether its gradient is.
std::unique_ptr<BackwardTask> make_task(const FlushRecord& record, std::vector<uint8_t> wanted);
// Runs the levels down to `last` that have not been run, those that may have got a gradient: the
// parts of each in reverse, over the reached nodes. A level comes before those below it, for it may
// send gradients there.
void run_levels(FlushRecord& record, BackwardTask& task, uint32_t last, bool keep_graph);
// Before a gradient is added to a held value of the level. Where that level, or one below it, has
// been run, what is left is run too, and they are then ready to run again on what comes from now
// on: backward is linear in it.
void expect_gradient(FlushRecord& record, BackwardTask& task, uint32_t level, bool keep_graph);
// Before a node is computed again: raises eager's errors if it was differentiated without
// retain_graph, or a graph input that it reads was written to.
void check_computable(const FlushRecord& record, NodeId node);
// Adds a product to the region of a gradient.
void add_to(const Region& region, const WeightGradTerm& product);
// Turns the products collected for graph inputs into gradients, in as few GEMMs as pays.
void run_products(FlushRecord& record, BackwardTask& task);
// The same of one weight, once there are enough of them for a GEMM that is worth it: they hold on
// to the memory of their factors.
void run_many_products(FlushRecord& record, BackwardTask& task, ValueId weight);

}  // namespace autobatch
