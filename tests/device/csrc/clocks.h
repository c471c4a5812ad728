// What is ordered after what, on streams that all run at once.
//
// Each launch is a tick of its stream. A clock says up to which tick of each stream everything is
// done: for a stream, when its next launch runs; for an event, when it is recorded; for the host,
// since it last waited.
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

// The number of the stream's next launch, which this begins.
uint64_t tick(int stream);
// Throws where a conflicting access is not ordered before this one, and notes it.
void check_access(Accesses& known, const Access& access);

struct Event {
  Clock clock{};
  int unanswered = 0;  // how often it was asked and not done
};
void record(Event& event, const c10::Stream& stream);
void wait(const Event& event, const c10::Stream& stream);
bool is_done(const Clock& clock);
Clock clock_of(int stream);
bool query(Event& event);
bool query_stream(const c10::Stream& stream);

// The host waits: all of these are done. What came late is delivered.
void host_waits(const Clock& clock);
void host_waits_for_stream(const c10::Stream& stream);
void host_waits_for_device(c10::DeviceIndex device);

// Called when the host has waited for what this stream has launched.
void deliver_later(int stream, std::function<void()> deliver);

}  // namespace simulated
