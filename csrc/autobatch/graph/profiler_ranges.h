// Ranges for profilers: torch.profiler, NVTX, Perfetto.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace autobatch {

struct Tape;
struct Node;

// A range while it lives. Where nobody profiles, its name isn't made: all it costs is a look at a
// thread-local list of observers.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) {
    if (record_.isActive()) record_.before(std::string_view(name));
  }
  // `make_name` gives a std::string.
  template <class MakeName, class = decltype(std::string(std::declval<MakeName>()()))>
  explicit ProfilerRange(const MakeName& make_name) {
    if (!record_.isActive()) return;
    name_ = make_name();
    record_.before(std::string_view(name_));
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  std::string name_;  // the record points to it, and ends first
  at::RecordFunction record_{at::RecordScope::FUNCTION};
};

// What of a thread's state is a profiler's. A flush runs in the state of before the scope, but a
// profiler that was started or stopped since is on or off.
class ProfilerState {
 public:
  // To be called inside the guard that will undo it.
  void restore() const;

 private:
  at::RecordFunctionTLS callbacks_ = at::get_record_function_tls_();
  std::shared_ptr<c10::ThreadLocalDebugInfo> info_ = c10::ThreadLocalDebugInfo::current();
};

// Whether a profiler records ops' arguments (record_shapes): it asks each tensor for its storage,
// as whoever reads it does.
bool profiler_records_arguments();

// "(Float[1, 128], Float[384, 128], None)", of the node's operands.
std::string describe_operands(const Tape& tape, const Node& node);

// "torch_autobatch::aten::linear(Float[1, 128], Float[384, 128]) x 220", of a batch; the shapes are
// those of its first instance.
std::string name_of_batch(const Tape& tape, const Node& first, size_t instances);

}  // namespace autobatch
