#include "autobatch/graph/graph.h"

#include "autobatch/graph/flush_progress.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/graph/signature.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace autobatch {
namespace {

// Sizes of the graph that this thread flushed last. The next graph probably has the same sizes.
struct TapeSizes {
  size_t nodes = 0, values = 0, operands = 0, graph_inputs = 0;
};
thread_local TapeSizes last_sizes;
std::atomic<uint64_t> graphs{0};

void reserve(Tape& tape, const TapeSizes& sizes) {
  tape.nodes.reserve(sizes.nodes);
  tape.values.reserve(sizes.values);
  tape.operands.reserve(sizes.operands);
  tape.graph_inputs.reserve(sizes.graph_inputs);
}

std::mutex& orphans_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

}  // namespace

Graph::Graph(std::shared_ptr<GeometryTable> geometries)
    : geometries_(std::move(geometries)), numbering_(graphs++ << 32) {
  reserve(tape_, last_sizes);
  graph_input_index_.reserve(last_sizes.graph_inputs);
}

Graph::~Graph() {
  static const auto kReason =
      std::make_shared<const std::string>("its scope ended before the tensor was computed");
  std::vector<c10::intrusive_ptr<PendingTensor>> last;  // destroyed after the mutex is unlocked
  const std::lock_guard<std::mutex> lock(orphans_mutex());
  bury_orphans();
  for (Value& value : tape_.values) {
    if (value.tensor != nullptr) last.push_back(value.tensor->lose(kReason));
  }
}

const ElementMap* Tape::find_element_map(ValueId id, ValueId of) const {
  const auto known = element_maps.find(id);
  if (known == element_maps.end()) return nullptr;
  for (const ElementMap& map : known->second) {
    if (map.of == of) return &map;
  }
  return nullptr;
}

ValueId Tape::counted_in(ValueId id) const {
  const auto known = element_maps.find(id);
  if (known == element_maps.end()) return id;
  for (const ElementMap& map : known->second) {
    if (!map.geometry->overlapping) return map.of;
  }
  return id;
}

ValueId Graph::add_view(ValueId parent, const Geometry* geometry, int64_t offset,
                        bool requires_grad, ViewKind kind) {
  const auto id = static_cast<ValueId>(tape_.values.size());
  Value value = tape_.values[parent];
  value.parent = parent;
  value.geometry = geometry;
  value.offset = offset;
  value.tensor = nullptr;
  value.requires_grad = requires_grad;
  value.kind = std::max(value.kind, kind);
  value.call = 0;
  value.next_view = std::exchange(tape_.values[value.base].next_view, id);
  tape_.values.push_back(value);
  return id;
}

void Graph::note_siblings(at::ArrayRef<ValueId> views) {
  last_call_ = std::max<uint16_t>(last_call_ + 1, 1);
  for (ValueId id : views) tape_.values[id].call = last_call_;
}

NodeId Graph::add_node(Signature* signature, at::ArrayRef<ValueId> operands) {
  Node node;
  node.signature = signature;
  node.first_operand = static_cast<uint32_t>(tape_.operands.size());
  node.num_operands = static_cast<uint32_t>(operands.size());
  node.first_value = static_cast<ValueId>(tape_.values.size());
  tape_.operands.insert(tape_.operands.end(), operands.begin(), operands.end());
  tape_.nodes.push_back(node);
  if (signature->op != nullptr && signature->op->reinterprets) {
    tape_.sharers[tape_.values[operands[0]].base].push_back(node.first_value);
  }
  return static_cast<NodeId>(tape_.nodes.size() - 1);
}

ValueId Graph::add_result(NodeId node, const Geometry* geometry, c10::ScalarType dtype,
                          c10::Device device, bool requires_grad) {
  const auto id = static_cast<ValueId>(tape_.values.size());
  Value value;
  value.node = node;
  value.index = tape_.nodes[node].num_values++;
  value.base = id;
  value.geometry = geometry;
  value.dtype = dtype;
  value.device = device;
  value.requires_grad = requires_grad;
  tape_.values.push_back(value);
  return id;
}

Memory* Graph::memory_of(ValueId base) {
  const auto found = memories_.find(base);
  return found == memories_.end() ? nullptr : &found->second;
}

Memory& Graph::make_memory(ValueId base) {
  const auto [entry, is_new] = memories_.try_emplace(base);
  Memory& memory = entry->second;
  if (is_new) {
    memory.content = base;
    memory.contents.push_back(base);
    const auto written = tape_.versions.find(base);
    if (written != tape_.versions.end()) memory.version = written->second;
    memory.requires_grad = tape_.values[base].requires_grad;
  }
  return memory;
}

bool Graph::is_fresh(ValueId id) const {
  const Value& value = tape_.values[id];
  if (value.is_graph_input() || memories_.count(value.base) != 0) return false;
  for (const ValueId operand : tape_.operands_of(tape_.nodes[value.node])) {
    if (operand == kNone || !tape_.values[operand].is_graph_input()) return false;
  }
  if (value.requires_grad || is_computed(value.node)) return false;
  for (ValueId on = value.base; on != kNone; on = tape_.values[on].next_view) {
    if (on != id && tape_.values[on].tensor != nullptr) return false;
  }
  return true;
}

bool Graph::requires_grad_now(ValueId id) const {
  const Value& value = tape_.values[id];
  if (memories_.empty() || raw_) return value.requires_grad;
  const auto found = memories_.find(value.base);
  const bool as_memory = found != memories_.end() && found->second.has_history(id, value);
  return as_memory ? found->second.requires_grad : value.requires_grad;
}

ValueId Graph::current(ValueId id) {
  if (memories_.empty() || raw_) return id;
  const Value value = tape_.values[id];
  Memory* memory = memory_of(value.base);
  if (memory == nullptr) return id;
  for (const Write& write : memory->writes) {
    if (write.geometry != value.geometry || write.offset != value.offset) continue;
    const Value source = tape_.values[write.source];
    const bool cut = source.requires_grad && !memory->has_history(id, value);
    return cut ? add_view(write.source, source.geometry, source.offset, false, value.kind)
               : write.source;
  }
  return view_of_content(*memory, id);
}

ValueId Graph::view_of_content(Memory& memory, ValueId id) {
  const Value value = tape_.values[id];
  if (id == value.base) return memory.content;
  const auto known = memory.views.find(id);
  if (known != memory.views.end()) return known->second;
  // As in eager's autograd, a write turns all existing views into views of the base. The gradient
  // of a view that is made after the write passes through its parent.
  const ValueId parent =
      id < memory.written ? memory.content : view_of_content(memory, value.parent);
  const bool requires_grad = memory.requires_grad && memory.has_history(id, value);
  const ValueId view = add_view(parent, value.geometry, value.offset, requires_grad, value.kind);
  memory.views.emplace(id, view);
  return view;
}

void Graph::move_tensor(ValueId from, ValueId to) {
  PendingTensor* tensor = tape_.values[from].tensor;
  detach(from);
  tape_.values[to].tensor = tensor;
  tensor->stand_for(to);
}

void Graph::note_written(const Memory& memory, NodeId when) {
  for (ValueId content : memory.contents) tape_.written_at[content] = when;
}

void Graph::attach(ValueId id, PendingTensor* tensor) {
  tape_.values[id].tensor = tensor;
  tensor->keep_memory();
}

void Graph::note_orphan(PendingTensor& tensor) {
  // Another thread may be destroying the graph.
  const std::lock_guard<std::mutex> lock(orphans_mutex());
  if (Graph* graph = tensor.leave()) graph->orphans_.emplace_back(&tensor, tensor.value());
}

void Graph::settle_orphans() {
  const std::lock_guard<std::mutex> lock(orphans_mutex());
  bury_orphans();
}

void Graph::bury_orphans() {
  for (const auto& [tensor, id] : orphans_) {
    if (id < tape_.values.size() && tape_.values[id].tensor == tensor) {
      detach(id);
    } else {
      for (ValueId now = 0; now < tape_.values.size(); ++now) {  // the value was renumbered
        if (tape_.values[now].tensor == tensor) detach(now);
      }
    }
    tensor->release_memory();
  }
  orphans_.clear();
}

namespace {

// Parameters are numbered separately from a program's data. So the parameters of a model have the
// same set of serials in each block. Signatures, schedules and cached calls that depend on these
// serials can be reused.
uint64_t serial_of(bool trained, uint64_t count) { return count << 1 | (trained ? 1 : 0); }

uint64_t identity_of_serial(uint64_t serial) { return serial << 1; }

}  // namespace

uint64_t Graph::new_serial(bool trained) {
  return serial_of(trained, trained ? next_trained_++ : next_serial_++);
}

uint64_t Graph::identity_of_new(uint32_t ahead) const {
  return identity_of_serial(serial_of(true, uint64_t{next_trained_} + ahead));
}

uint64_t Graph::identity(const Value& value) const {
  const Value& base = tape_.values[value.base];
  if (base.is_graph_input()) return identity_of_serial(tape_.graph_inputs[base.index].serial);
  return (renumbered_ + value.base) << 1 | 1;
}

// Whether the graph input reads the storage.
static bool is_over(const GraphInput& input, const c10::StorageImpl* storage) {
  return input.data.defined() && input.data.storage().unsafeGetStorageImpl() == storage;
}

bool Graph::reads_storage_of(const at::Tensor& tensor) const {
  // A graph input with this storage would hold a second reference to the storage.
  if (!tensor.defined() || !tensor.has_storage() || tensor.storage().use_count() == 1) return false;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  return std::any_of(
      tape_.graph_inputs.begin(), tape_.graph_inputs.end(),
      [&](const GraphInput& input) { return is_over(input, storage) && is_awaited(input.value); });
}

bool Graph::is_stale(const at::Tensor& tensor) const {
  return !stale_.empty() && tensor.has_storage() &&
         stale_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
}

void Graph::note_stale(const c10::Storage& stale) {
  const auto* storage = stale.unsafeGetStorageImpl();
  if (++stale_[storage] > 1) return;
  // Removes the graph inputs of the storage from both indices, so that a later use adds a new graph
  // input.
  const auto is_of = [&](ValueId id) {
    return is_over(tape_.graph_inputs[tape_.values[id].index], storage);
  };
  std::erase_if(weight_index_, [&](const auto& entry) { return is_of(entry.second); });
  for (auto it = graph_input_index_.begin(); it != graph_input_index_.end();) {
    it = is_of(it->second) ? graph_input_index_.erase(it) : std::next(it);
  }
}

void Graph::forget_stale(const c10::Storage& storage) {
  const auto found = stale_.find(storage.unsafeGetStorageImpl());
  if (--found->second == 0) stale_.erase(found);
}

// Whether a waiting node, a tensor or a write still reads the memory of the graph input.
bool Graph::is_awaited(ValueId input) const {
  if (num_finished_ == 0 || tape_.is_looked_at(input)) return true;
  for (const auto& [base, memory] : memories_) {
    const auto reads = [&](const Write& w) { return tape_.values[w.source].base == input; };
    if (std::ranges::any_of(memory.writes, reads)) return true;
  }
  for (NodeId node = 0; node < tape_.nodes.size(); ++node) {
    if (tape_.nodes[node].state != NodeState::kWaiting) continue;
    for (ValueId id : tape_.operands_of(tape_.nodes[node])) {
      if (id != kNone && tape_.values[id].base == input) return true;
    }
  }
  return false;
}

Tape Graph::take() {
  graph_input_index_.clear();
  weight_index_.clear();
  next_serial_ = next_trained_ = renumbered_ = 0;
  ++numbering_;
  memories_.clear();
  forget_progress();
  Tape taken = std::exchange(tape_, Tape{});
  last_sizes = {taken.nodes.size(), taken.values.size(), taken.operands.size(),
                taken.graph_inputs.size()};
  reserve(tape_, last_sizes);
  return taken;
}

}  // namespace autobatch
