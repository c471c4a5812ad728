#include "autobatch/graph/profiler_ranges.h"

#include "autobatch/common/compat.h"
#include "autobatch/graph/graph.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"

#include <torch/csrc/profiler/orchestration/observer.h>

namespace autobatch {
namespace {

// Appends text without streams. For a small batch, streams would cost more than all other work.
void append_shape(std::string& out, const Value& value) {
  out += c10::toString(value.dtype);
  out += '[';
  const char* separator = "";
  for (int64_t size : value.geometry->sizes) {
    out += separator;
    out += std::to_string(size);
    separator = ", ";
  }
  out += ']';
}

}  // namespace

void ProfilerState::restore() const {
  at::set_record_function_tls_(callbacks_);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(info_);
}

std::string describe_operands(const Tape& tape, const Node& node) {
  std::string out = "(";
  const char* separator = "";
  constexpr size_t kMost = 8;  // maximum number of operands in the text
  size_t shown = 0;
  for (ValueId id : tape.operands_of(node)) {
    out += separator;
    if (++shown > kMost) {
      out += "... " + std::to_string(node.num_operands) + " in all";
      break;
    }
    separator = ", ";
    id == kNone ? void(out += "None") : append_shape(out, tape.values[id]);
  }
  return out += ")";
}

std::string name_of_batch(const Tape& tape, const Node& first, size_t instances) {
  return "torch_autobatch::" + first.signature->op->name + describe_operands(tape, first) + " x " +
         std::to_string(instances);
}

bool profiler_records_arguments() {
  return compat::records_arguments<torch::profiler::impl::ProfilerStateBase>();
}

}  // namespace autobatch
