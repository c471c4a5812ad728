// The interfaces that PyTorch requires of a device: devices, streams, events, generators.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <mutex>

namespace simulated {
namespace {

thread_local c10::DeviceIndex current_device = 0;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType && device.index() < kDevices, "sim: no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return current_stream(indexed(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, indexed(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(indexed(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(indexed(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    simulated::record(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(*static_cast<Event*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    count(kSynchronisations, "of an event");
    if (event != nullptr) host_waits(static_cast<Event*>(event)->clock);
  }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count(kSynchronisations, "of a stream");
    host_waits_for_stream(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count(kSynchronisations, "of a device");
    host_waits_for_device(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

 private:
  static c10::DeviceIndex indexed(c10::Device device) {
    return device.has_index() ? device.index() : current_device;
  }
};

// Draws the same numbers as a CPU generator.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device,
                     at::Generator numbers = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kType, device),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers_(std::move(numbers)) {}

  at::Generator numbers() const { return numbers_; }
  void set_current_seed(uint64_t seed) override { numbers_.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim: generators have no offset"); }
  uint64_t current_seed() const override { return numbers_.current_seed(); }
  uint64_t seed() override { return numbers_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    numbers_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), numbers_.clone());
  }

  at::Generator numbers_;
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto& generators =
      *new std::array<at::Generator, kDevices>{at::make_generator<Generator>(c10::DeviceIndex{0}),
                                               at::make_generator<Generator>(c10::DeviceIndex{1})};
  return generators.at(static_cast<size_t>(device < 0 ? current_device : device));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* data) const override { return {kType, device_of(data)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize(storage, bytes);
  }
};

Hooks hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- counters

std::mutex& counters_mutex = *new std::mutex;
std::array<std::atomic<int64_t>, kCounters> counters{};
auto& by_op = *new std::unordered_map<std::string, int64_t>;
std::atomic<int> forbidden = 0;
std::atomic<Fault> fault = Fault::kNone;

}  // namespace

at::Generator generator_of(c10::DeviceIndex device) { return default_generator(device); }

at::Generator numbers_of(const at::Generator& generator) {
  if (generator.device().type() != kType) return generator;
  return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->numbers();
}

at::Generator numbers_of(c10::DeviceIndex device) { return numbers_of(default_generator(device)); }

const char* name_of(Counter counter) {
  constexpr std::array<const char*, kCounters> kNames{"launches", "to_device", "to_host",
                                                      "synchronisations"};
  return kNames.at(counter);
}

int64_t count_of(Counter counter) { return counters.at(counter); }

void count(Counter counter, const std::string& what) {
  TORCH_CHECK(counter != kSynchronisations || forbidden == 0,
              "sim: a synchronisation where none is allowed: ", what);
  ++counters.at(counter);
  const std::lock_guard lock(counters_mutex);
  ++by_op[std::string(name_of(counter)) + ' ' + what];
}

std::unordered_map<std::string, int64_t> counts_by_op() {
  const std::lock_guard lock(counters_mutex);
  return by_op;
}

void clear_counts() {
  for (auto& counter : counters) counter = 0;
  const std::lock_guard lock(counters_mutex);
  by_op.clear();
}

void forbid_synchronisation(bool forbid) { forbidden += forbid ? 1 : -1; }
void plant(Fault what) { fault = what; }
Fault planted() { return fault; }

}  // namespace simulated
