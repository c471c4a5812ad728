#include "clocks.h"

#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

namespace simulated {
namespace {

// Never destroyed, because tensors and events may die at the end of the process.
std::mutex& mutex = *new std::mutex;  // guards all state of this file
std::array<Clock, kMostStreams> clocks{};
Clock host{};
std::array<int, kDevices> streams_made{};
thread_local std::array<int, kDevices> current{};

struct Delivery {
  int stream;
  uint64_t tick;
  std::function<void()> deliver;
};
auto& deliveries = *new std::vector<Delivery>;

void join(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

std::string describe(const Access& access) {
  return access.op + (access.writes ? " (writes it, on stream " : " (reads it, on stream ") +
         std::to_string(access.stream) + ")";
}

bool overlap(const Access& a, const Access& b) { return a.first < b.last && b.first < a.last; }
bool covers(const Access& a, const Access& b) { return a.first <= b.first && b.last <= a.last; }
bool touch(const Access& a, const Access& b) { return a.first <= b.last && b.first <= a.last; }

// Whether `earlier` can be dropped: an access that is ordered after `access` is ordered after
// `earlier` too.
bool replaces(const Access& access, const Access& earlier) {
  return covers(access, earlier) && (access.writes || !earlier.writes);
}

}  // namespace

int number_of(const c10::Stream& stream) {
  return stream.device_index() * kStreamsOfDevice + static_cast<int>(stream.id());
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const int number = current[static_cast<size_t>(device)];
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), number);
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const c10::Stream before = current_stream(stream.device_index());
  current[static_cast<size_t>(stream.device_index())] = static_cast<int>(stream.id());
  return before;
}

// Returns the streams of a pool in turn. 0 is the default stream.
c10::Stream new_stream(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex);
  const int number = streams_made[static_cast<size_t>(device)]++ % (kStreamsOfDevice - 1) + 1;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), number);
}

uint64_t tick(int stream) {
  const std::lock_guard lock(mutex);
  Clock& clock = clocks[static_cast<size_t>(stream)];
  join(clock, host);
  return ++clock[static_cast<size_t>(stream)];
}

void check_access(Accesses& known, const Access& access) {
  if (access.first == access.last) return;
  const std::lock_guard lock(mutex);
  const Clock& clock = clocks[static_cast<size_t>(access.stream)];
  for (const Access& earlier : known) {
    if (earlier.stream == access.stream || !overlap(earlier, access)) continue;
    if (!earlier.writes && !access.writes) continue;
    TORCH_CHECK(earlier.tick <= clock[static_cast<size_t>(earlier.stream)],
                "sim: a race on device memory: nothing orders ", describe(access), " after ",
                describe(earlier),
                ". Wait for an event of that stream, or, if the memory was freed and given away in "
                "between, call record_stream on the tensor that was freed.");
  }
  std::erase_if(known, [&](const Access& earlier) {
    const bool ordered = earlier.stream == access.stream ||
                         earlier.tick <= clock[static_cast<size_t>(earlier.stream)];
    return ordered && replaces(access, earlier);
  });
  constexpr size_t kMost = 64;
  for (Access& earlier : known) {
    const bool alike = earlier.stream == access.stream && earlier.writes == access.writes;
    if (!alike || !(touch(earlier, access) || known.size() >= kMost)) continue;
    earlier.first = std::min(earlier.first, access.first);
    earlier.last = std::max(earlier.last, access.last);
    earlier.tick = access.tick;
    earlier.op = access.op;
    return;
  }
  known.push_back(access);
}

void record(Event& event, const c10::Stream& stream) {
  const std::lock_guard lock(mutex);
  event.clock = clocks[static_cast<size_t>(number_of(stream))];
  event.unanswered = 0;
}

void wait(const Event& event, const c10::Stream& stream) {
  if (planted() == Fault::kForgetEvents) return;
  const std::lock_guard lock(mutex);
  join(clocks[static_cast<size_t>(number_of(stream))], event.clock);
}

Clock clock_of(int stream) {
  const std::lock_guard lock(mutex);
  return clocks[static_cast<size_t>(stream)];
}

bool is_done(const Clock& clock) {
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < clock.size(); ++i) {
    if (clock[i] > host[i]) return false;
  }
  return true;
}

bool query(Event& event) {
  if (is_done(event.clock)) return true;
  constexpr int kPatience = 8;  // a polling loop must end
  if (++event.unanswered < kPatience) return false;
  host_waits(event.clock);
  return true;
}

bool query_stream(const c10::Stream& stream) { return is_done(clock_of(number_of(stream))); }

void host_waits(const Clock& clock) {
  std::vector<Delivery> due;
  {
    const std::lock_guard lock(mutex);
    join(host, clock);
    const auto is_due = [](const Delivery& delivery) {
      return delivery.tick <= host[static_cast<size_t>(delivery.stream)];
    };
    const auto first = std::stable_partition(deliveries.begin(), deliveries.end(),
                                             [&](const Delivery& d) { return !is_due(d); });
    due.assign(std::make_move_iterator(first), std::make_move_iterator(deliveries.end()));
    deliveries.erase(first, deliveries.end());
  }
  for (const Delivery& delivery : due) delivery.deliver();
}

void host_waits_for_stream(const c10::Stream& stream) { host_waits(clock_of(number_of(stream))); }

void host_waits_for_device(c10::DeviceIndex device) {
  for (int k = 0; k < kStreamsOfDevice; ++k) host_waits(clock_of(device * kStreamsOfDevice + k));
}

// Deliveries are late on purpose. If too many deliveries wait, the oldest delivery runs.
void deliver_later(int stream, std::function<void()> deliver) {
  constexpr size_t kMost = 64;
  std::optional<Delivery> oldest;
  {
    const std::lock_guard lock(mutex);
    const auto at = static_cast<size_t>(stream);
    deliveries.push_back({stream, clocks[at][at], std::move(deliver)});
    if (deliveries.size() <= kMost) return;
    oldest = std::move(deliveries.front());
    deliveries.erase(deliveries.begin());
  }
  oldest->deliver();
}

}  // namespace simulated
