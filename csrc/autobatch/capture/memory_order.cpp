#include "autobatch/capture/memory_order.h"

#include "autobatch/capture/arguments.h"
#include "autobatch/common/host_hooks.h"
#include "autobatch/fibers/fibers.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/scope/scope.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace autobatch {
namespace {

using at::Tensor;

// Maximum number of parts of one storage whose uses are recorded.
constexpr size_t kMostParts = 1024;

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

// The ordered memory of all maps that this thread has run.
std::vector<Weak>& known_ordered() {
  static thread_local std::vector<Weak> known;
  return known;
}

bool is_ordinary(const Tensor& tensor) {
  return as_pending(tensor) == nullptr && tensor.layout() == c10::kStrided && !tensor.is_meta() &&
         tensor.numel() > 0 && tensor.has_storage();
}

// Whether the call only adds a number to integers, like a counter (`num_batches_tracked.add_(1)`).
// The order of such calls does not matter.
bool counts(const OpInfo& op, at::ArrayRef<c10::IValue> arguments) {
  return op.name.starts_with("aten::add_.") && arguments[0].isTensor() &&
         c10::isIntegralType(arguments[0].toTensor().scalar_type(), /*includeBool=*/false) &&
         (!arguments[1].isTensor() || as_pending(arguments[1].toTensor()) == nullptr);
}

// Whether the call reads or writes elements. A view op only makes a tensor object.
bool uses_elements(const OpInfo& op) {
  return op.action != Action::kView && op.action != Action::kMetadata;
}

MemoryOrder::Part part_of(const Tensor& tensor) {
  MemoryOrder::Part part{tensor.storage_offset(), tensor.storage_offset() + 1, 0};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    part.end += (tensor.size(d) - 1) * tensor.stride(d);
    if (tensor.size(d) > 1) part.step = std::gcd(part.step, tensor.stride(d));
  }
  return part;
}

// Returns false only if no element is in both parts, as in two columns of a matrix.
bool may_share(const MemoryOrder::Part& a, const MemoryOrder::Part& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  const int64_t step = std::gcd(a.step, b.step);
  return step == 0 || (a.begin - b.begin) % step == 0;
}

}  // namespace

MemoryOrder::MemoryOrder(Scope& scope, const FiberPool& pool, bool watches)
    : scope_(scope), pool_(pool), watches_(watches) {
  scope.updates().orders.push_back(this);
  std::erase_if(known_ordered(), [](const Weak& storage) { return storage.expired(); });
  for (const Weak& storage : known_ordered()) {
    if (auto alive = storage.lock()) add_ordered(c10::Storage(std::move(alive)));
  }
  // The arguments of calls are checked only if the graph has stale memory. So a map that is watched
  // marks an empty storage as stale.
  if (watches) {
    add_ordered(c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(), nullptr, false));
  }
}

MemoryOrder::~MemoryOrder() {
  for (const c10::Storage& storage : stale_) scope_.graph().forget_stale(storage);
  std::erase(scope_.updates().orders, this);
}

void MemoryOrder::add_ordered(c10::Storage storage) {
  scope_.graph().note_stale(storage);
  stale_.push_back(std::move(storage));
}

bool MemoryOrder::is_ordered(const c10::Storage& storage) const {
  return std::ranges::any_of(stale_, [&](const c10::Storage& ordered) {
    return ordered.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
}

void MemoryOrder::note(const OpInfo& op, at::ArrayRef<c10::IValue> arguments) {
  const Fiber* fiber = Fiber::current();
  if (!watches_ || fiber == nullptr || !fiber->is_of(pool_) || !uses_elements(op)) return;
  if (counts(op, arguments)) return;
  const bool mutates = op.action_on(arguments) == Action::kMutate;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool writes = mutates && i < 64 && (op.written_arguments >> i & 1) != 0;
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (is_ordinary(tensor)) note(op.name, tensor, writes, static_cast<int64_t>(fiber->index()));
    });
  }
}

void MemoryOrder::note(const std::string& op, const Tensor& tensor, bool writes, int64_t instance) {
  forget_released();
  const c10::Storage& storage = tensor.storage();
  const auto [found, is_new] = uses_.try_emplace(storage.unsafeGetStorageImpl(),
                                                 Uses{storage.getWeakStorageImpl(), false, {}});
  Uses& uses = found->second;
  if (uses.parts.size() >= kMostParts) return;
  uses.is_written = uses.is_written || writes;

  const Part part = part_of(tensor);
  Use* same = nullptr;
  for (Use& use : uses.parts) {
    if (use.part == part) same = &use;
    const int64_t other = writes ? std::max(use.reader, use.writer) : use.writer;
    if (other <= instance || !broken_.empty() || !may_share(use.part, part)) continue;
    std::ostringstream text;
    text << op << (writes ? " of instance " : ": instance ") << instance
         << (writes ? " writes to a tensor of shape " : " reads a tensor of shape ")
         << tensor.sizes() << " after instance " << other
         << (other == use.writer ? " has written to it" : " has read it");
    const std::string site = current_site();
    broken_ = text.str() + (site.empty() ? "" : " at " + site);
  }
  if (same == nullptr) same = &uses.parts.emplace_back(Use{part});
  int64_t& last = writes ? same->writer : same->reader;
  last = std::max(last, instance);
  if (!broken_.empty()) order_written();
}

// Drops the entries of freed memory when the size of the table has doubled.
void MemoryOrder::forget_released() {
  if (uses_.size() < forget_at_) return;
  std::erase_if(uses_, [](const auto& entry) { return entry.second.storage.expired(); });
  forget_at_ = 2 * uses_.size() + 4096;
}

// From now on, all memory that the instances have written is ordered.
void MemoryOrder::order_written() {
  watches_ = false;
  for (auto& [impl, uses] : uses_) {
    auto alive = uses.is_written ? uses.storage.lock() : nullptr;
    if (alive == nullptr) continue;
    known_ordered().push_back(uses.storage);
    add_ordered(c10::Storage(std::move(alive)));
  }
  uses_.clear();
}

bool is_ordered(Scope& scope, const c10::Storage& storage) {
  return std::ranges::any_of(scope.updates().orders,
                             [&](const MemoryOrder* order) { return order->is_ordered(storage); });
}

}  // namespace autobatch
