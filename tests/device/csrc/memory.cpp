#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace simulated {
namespace {

constexpr size_t kSpan = size_t{1} << 36;  // addresses per device
constexpr size_t kAll = kSpan * kDevices;

struct Spans {
  char* device = reserve(PROT_NONE);             // no access
  char* host = reserve(PROT_READ | PROT_WRITE);  // contents of the device addresses

  static char* reserve(int protection) {
    void* at = mmap(nullptr, kAll, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no addresses for device memory");
    return static_cast<char*>(at);
  }
};

const Spans& spans() {
  static const Spans spans;
  return spans;
}

// Rounds up to one of eight sizes between two powers of two, at least 512 bytes apart.
size_t rounded(size_t bytes) {
  const size_t step = std::max<size_t>(512, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

// The next allocation of the same size on the same stream immediately reuses freed memory, even if
// another stream still uses the memory. Code that uses a tensor on another stream must call
// record_stream().
class Heap {
 public:
  Block* allocate(size_t bytes, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    collect();
    bytes = rounded(bytes);
    in_use_ += static_cast<int64_t>(bytes);
    std::vector<Block*>& free = free_[{bytes, number_of(stream)}];
    if (!free.empty()) {
      Block* block = free.back();
      free.pop_back();
      return block;
    }
    const auto device = static_cast<size_t>(stream.device_index());
    TORCH_CHECK(used_[device] + bytes <= kSpan, "sim: out of device memory");
    char* address = spans().device + device * kSpan + used_[device];
    used_[device] += bytes;
    auto& block = blocks_[address];
    block = std::make_unique<Block>(Block{address, bytes, stream, {}, {}});
    poison(*block);
    return block.get();
  }

  Block* at(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(static_cast<const char*>(address));
    return after == blocks_.begin() ? nullptr : std::prev(after)->second.get();
  }

  void free(Block* block) {
    const std::lock_guard lock(mutex_);
    poison(*block);
    in_use_ -= static_cast<int64_t>(block->bytes);
    if (block->recorded.empty()) return give_away(block);
    Clock until{};
    for (int stream : block->recorded) {
      const Clock clock = clock_of(stream);
      for (size_t i = 0; i < until.size(); ++i) until[i] = std::max(until[i], clock[i]);
    }
    block->recorded.clear();
    waiting_.emplace_back(block, until);
  }

  int64_t in_use() const { return in_use_; }

 private:
  // Fills the memory with NaN for each floating type, so that reads of unwritten memory are
  // detected.
  static void poison(const Block& block) { std::memset(on_host(block.address), 0xff, block.bytes); }

  void give_away(Block* block) { free_[{block->bytes, number_of(block->stream)}].push_back(block); }

  void collect() {
    std::erase_if(waiting_, [&](const auto& entry) {
      if (!is_done(entry.second)) return false;
      give_away(entry.first);
      return true;
    });
  }

  std::mutex mutex_;
  std::array<size_t, kDevices> used_{};
  std::atomic<int64_t> in_use_ = 0;
  std::map<const char*, std::unique_ptr<Block>> blocks_;        // by start address
  std::map<std::pair<size_t, int>, std::vector<Block*>> free_;  // by size and stream
  std::vector<std::pair<Block*, Clock>> waiting_;  // freed, but in use on other streams
};

Heap& heap() {
  static Heap* heap = new Heap;  // never destroyed: tensors may die at the end of the process
  return *heap;
}

void free_block(void* context) {
  if (context != nullptr) heap().free(static_cast<Block*>(context));
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::impl::VirtualGuardImpl guard(kType);
    const c10::Device device = guard.getDevice();
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    Block* block = heap().allocate(bytes, current_stream(device.index()));
    return {block->address, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(on_host(to), on_host(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

DeviceAllocator allocator;

// ---- pinned memory

// Never destroyed, for the same reason as the heap.
std::mutex& pinned_mutex = *new std::mutex;
auto& pinned = *new std::map<const char*, size_t>;

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  {
    const std::lock_guard lock(pinned_mutex);
    pinned.erase(static_cast<const char*>(pointer));
  }
  c10::free_cpu(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    const std::lock_guard lock(pinned_mutex);
    pinned[static_cast<const char*>(pointer)] = std::max<size_t>(bytes, 1);
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator pinned_memory;

// ---- faults

struct sigaction handler_before;
thread_local std::array<char, 128> current_op{};

void print(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

void on_fault(int signal, siginfo_t* info, void* context) {
  if (is_device_address(info->si_addr)) {
    print("sim: the host touched memory of the device; the last op here was ");
    print(current_op.data());
    print("\n");
    std::array<void*, 48> frames{};
    backtrace_symbols_fd(frames.data(), backtrace(frames.data(), static_cast<int>(frames.size())),
                         STDERR_FILENO);
  }
  sigaction(signal, &handler_before,
            nullptr);  // the fault repeats and reaches the previous handler
  (void)context;
}

}  // namespace

char* on_host(const void* address) {
  return spans().host + (static_cast<const char*>(address) - spans().device);
}

bool is_device_address(const void* address) {
  const auto* at = static_cast<const char*>(address);
  return at >= spans().device && at < spans().device + kAll;
}

c10::DeviceIndex device_of(const void* address) {
  TORCH_CHECK(is_device_address(address), "sim: not an address of the device");
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - spans().device);
  return static_cast<c10::DeviceIndex>(offset / kSpan);
}

Block* block_at(const void* address) {
  return is_device_address(address) ? heap().at(address) : nullptr;
}

c10::Allocator* device_allocator() { return &allocator; }

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block == nullptr || stream == block->stream) return;
  if (planted() != Fault::kForgetRecordStream) block->recorded.insert(number_of(stream));
}

void resize(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = allocator.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    count(kLaunches, "resize");
    std::memcpy(on_host(data.get()), on_host(storage.data()), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

int64_t allocated_bytes() { return heap().in_use(); }

c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* pointer) {
  const std::lock_guard lock(pinned_mutex);
  const auto* at = static_cast<const char*>(pointer);
  const auto next = pinned.upper_bound(at);
  if (next == pinned.begin()) return false;
  const auto& [start, bytes] = *std::prev(next);
  return at < start + bytes;
}

void watch_faults() {
  std::array<void*, 1> frame{};
  backtrace(frame.data(), 1);  // loads libraries now, which a signal handler must not do
  struct sigaction action{};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &handler_before);
}

void set_current_op(const std::string& op) {
  const size_t length = std::min(op.size(), current_op.size() - 1);
  std::memcpy(current_op.data(), op.data(), length);
  current_op[length] = '\0';
}

REGISTER_ALLOCATOR(kType, &allocator)

}  // namespace simulated
