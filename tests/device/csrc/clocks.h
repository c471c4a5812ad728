// Vector clocks for the order of launches on streams that run concurrently.
//
// Each launch is a tick of its stream. A clock holds, for each stream, the last tick that is known
// to be done. The clock of a stream applies to its next launch, the clock of an event to the time
// of its recording, and the clock of the host to its last synchronisation.
#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace simulated {

inline constexpr int kStreamsOfDevice = 16;
inline constexpr int kMostStreams = 2 * kStreamsOfDevice;

using Clock = std::array<uint64_t, kMostStreams>;

struct Access {
  int stream = 0;
  uint64_t tick = 0;
  const char* first = nullptr;  // bytes [first, last)
  const char* last = nullptr;
  bool writes = false;
  std::string op;
};
using Accesses = std::vector<Access>;

int number_of(const c10::Stream& stream);

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::DeviceIndex device);

// Begins the stream's next launch. Returns its number.
uint64_t tick(int stream);
// Throws if a conflicting access in `known` is not ordered before this one. Adds the access to
// `known`.
void check_access(Accesses& known, const Access& access);

struct Event {
  Clock clock{};
  int unanswered = 0;  // number of queries before the event was done
};
void record(Event& event, const c10::Stream& stream);
void wait(const Event& event, const c10::Stream& stream);
bool is_done(const Clock& clock);
Clock clock_of(int stream);
bool query(Event& event);
bool query_stream(const c10::Stream& stream);

// The host waits until the ticks of `clock` are done. Runs the deliveries that are due.
void host_waits(const Clock& clock);
void host_waits_for_stream(const c10::Stream& stream);
void host_waits_for_device(c10::DeviceIndex device);

// Calls `deliver` when the host has waited for the launches that are on the stream now.
void deliver_later(int stream, std::function<void()> deliver);

}  // namespace simulated
