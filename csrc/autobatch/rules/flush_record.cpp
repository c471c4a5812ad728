#include "autobatch/rules/flush_record.h"

#include "autobatch/common/pool.h"

namespace autobatch {

void raise_consumed(const std::string& op) {
  TORCH_CHECK(false,
              "Trying to backward through the graph a second time (or directly access saved "
              "tensors after they have already been freed). Saved intermediate values of the "
              "graph are freed when you call .backward() or autograd.grad(). Specify "
              "retain_graph=True if you need to backward through the graph a second time or "
              "if you need to access saved tensors after calling backward. (",
              op, " in a batch() block)");
}

ValueId FlushRecord::cut(ValueId id) const {
  if (is_held.empty()) return kNone;
  for (; id != kNone; id = tape.values[id].parent) {
    if (is_held[id]) return id;
  }
  return kNone;
}

ElementMap FlushRecord::element_map(ValueId id, ValueId cut) {
  const ValueId of = tape.counted_in(cut);
  if (id != of) return *tape.find_element_map(id, of);
  return {of, element_map_geometries.intern_contiguous(tape.values[of].geometry->sizes), 0};
}

void FlushRecord::free_saved() {
  freed = true;
  memories.release();
  for (uint32_t slab = 0; slab < store.slabs.size(); ++slab) free_slab(slab);
  for (BatchRecord& batch : batches) {
    batch.drop_kept();
  }
  for (GraphInput& graph_input : tape.graph_inputs)
    graph_input.data = graph_input.as_read = at::Tensor();
}

bool FlushRecord::has_values(ValueId id) const {
  const Value& base = tape.values[tape.values[id].base];
  if (base.is_graph_input()) return tape.graph_inputs[base.index].data.defined();
  const at::Tensor& slab = store.slabs[store.places[tape.values[id].base].slab];
  return slab.defined() && slab.is_contiguous();
}

// Frees the slab's memory, except for one element. Keeps the slab's size and dtype, because
// backward may run again for ops that save nothing.
void FlushRecord::free_slab(uint32_t number) {
  at::Tensor& slab = store.slabs[number];
  if (slab.defined()) slab = strided_view(pooled_empty(1, slab.options()), {slab.numel()}, {0}, 0);
}

}  // namespace autobatch
