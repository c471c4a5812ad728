// A simulated accelerator for the tests, on PyTorch's PrivateUse1 key.
//
// Its memory has addresses that the host cannot access. The contents are stored at another address,
// at a fixed distance, which only kernels use. Kernels run when they are launched. Clocks
// (clocks.h) find accesses that a real device could run in another order: two conflicting accesses
// without an order between them are an error. Copies to the host take effect late: the host's
// memory is filled at the synchronisation.
#pragma once

#include "clocks.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace simulated {

inline constexpr int kDevices = 2;
inline constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// ---- counters

enum Counter { kLaunches, kToDevice, kToHost, kSynchronisations, kCounters };

// Returns "launches" etc.
const char* name_of(Counter counter);
int64_t count_of(Counter counter);
void count(Counter counter, const std::string& what);
// Returns the counts since the last clear_counts(), with keys such as "launches aten::addmm".
std::unordered_map<std::string, int64_t> counts_by_op();
void clear_counts();

// Makes a synchronisation, or a copy from or to unpinned host memory, an error until the matching
// call with `false`. Calls nest.
void forbid_synchronisation(bool forbidden);

// Faults of a library, which the device imitates. They check that the tests detect such faults.
enum class Fault { kNone, kForgetRecordStream, kForgetEvents };
void plant(Fault fault);
Fault planted();

// ---- memory

// An allocation, in use or free.
struct Block {
  char* address = nullptr;  // device address
  size_t bytes = 0;
  c10::Stream stream;                // stream of the allocation
  std::unordered_set<int> recorded;  // numbers of the streams given to record_stream()
  Accesses accesses;                 // by all owners of this memory so far
};

// Returns the host address of the contents of a device address.
char* on_host(const void* address);
bool is_device_address(const void* address);
c10::DeviceIndex device_of(const void* address);

// Returns the allocation that contains the address; null if there is none.
Block* block_at(const void* address);

c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
void resize(const c10::Storage& storage, size_t bytes);
int64_t allocated_bytes();

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// Installs a SIGSEGV handler that prints where the host accessed device memory, then restores the
// previous handler.
void watch_faults();
// Sets this thread's op for the message of that handler.
void set_current_op(const std::string& op);

}  // namespace simulated
