// A simulated accelerator for the tests, on PyTorch's PrivateUse1 key.
//
// Its memory has addresses that the host can't touch. What lies there is kept at another address,
// at a fixed distance, which kernels alone use. Kernels run when they are launched, and clocks tell
// what a real device could have run in another order (clocks.h): an access that nothing orders
// after another one is an error, whatever order the machine would have taken. What the host can see
// of time comes late: memory that is copied to the host is filled at the synchronisation.
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

// "launches", ...
const char* name_of(Counter counter);
int64_t count_of(Counter counter);
void count(Counter counter, const std::string& what);
// What was counted since the last `clear_counts`, by op: "launches aten::addmm".
std::unordered_map<std::string, int64_t> counts_by_op();
void clear_counts();

// While any is alive, a synchronisation or a copy from or to unpinned host memory is an error.
void forbid_synchronisation(bool forbidden);

// Faults of a library, made by the device on behalf of one that has them: the tests of the tests.
enum class Fault { kNone, kForgetRecordStream, kForgetEvents };
void plant(Fault fault);
Fault planted();

// ---- memory

// An allocation, or one that waits to be used again.
struct Block {
  char* address = nullptr;  // the device's
  size_t bytes = 0;
  c10::Stream stream;                // that it was made on
  std::unordered_set<int> recorded;  // other streams that use it: `record_stream`
  Accesses accesses;                 // of all that had this memory
};

// The host's address of what lies there.
char* on_host(const void* address);
bool is_device_address(const void* address);
c10::DeviceIndex device_of(const void* address);

// The allocation that it lies in; null if there is none.
Block* block_at(const void* address);

c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
void resize(const c10::Storage& storage, size_t bytes);
int64_t allocated_bytes();

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// Prints where the host touched the device's memory, and leaves the rest to who handled faults.
void watch_faults();
// Of this thread, for that message.
void set_current_op(const std::string& op);

}  // namespace simulated
