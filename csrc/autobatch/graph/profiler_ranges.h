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

// Records a profiler range for the lifetime of the object. Without a profiler the name is not
// built, and the only cost is a look-up in a thread-local list of observers.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) {
    if (record_.isActive()) record_.before(std::string_view(name));
  }
  // `make_name` returns a std::string.
  template <class MakeName, class = decltype(std::string(std::declval<MakeName>()()))>
  explicit ProfilerRange(const MakeName& make_name) {
    if (!record_.isActive()) return;
    name_ = make_name();
    record_.before(std::string_view(name_));
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  std::string name_;  // record_ points to the name, and is destroyed before the name
  at::RecordFunction record_{at::RecordScope::FUNCTION};
};

// The part of a thread's state that belongs to profilers. A flush runs in the thread state that was
// current before the scope was opened. However, a profiler that was started or stopped inside the
// scope must stay on or off.
class ProfilerState {
 public:
  // Must be called inside a ThreadLocalStateGuard, which restores the former state later.
  void restore() const;

 private:
  at::RecordFunctionTLS callbacks_ = at::get_record_function_tls_();
  std::shared_ptr<c10::ThreadLocalDebugInfo> info_ = c10::ThreadLocalDebugInfo::current();
};

// Whether a profiler records the arguments of ops (record_shapes). A profiler that records
// arguments queries the storage of each tensor, like a raw read of the data.
bool profiler_records_arguments();

// Returns the operands of the node as text: "(Float[1, 128], Float[384, 128], None)".
std::string describe_operands(const Tape& tape, const Node& node);

// Returns the name of a batch, with the operand shapes of its first member:
// "torch_autobatch::aten::linear(Float[1, 128], Float[384, 128]) x 220".
std::string name_of_batch(const Tape& tape, const Node& first, size_t instances);

}  // namespace autobatch
