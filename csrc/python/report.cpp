#include "python/report.h"

#include "autobatch/debug/trace.h"
#include "autobatch/graph/op_registry.h"
#include "autobatch/graph/signature.h"
#include "autobatch/report.h"
#include "python/call_site.h"

#include <pybind11/stl.h>

#include <sstream>
#include <string>

namespace py = pybind11;

namespace autobatch {
namespace {

// Formats a number like Python's repr(): as the shortest text that is read back as the same number.
std::string text_of(double value) {
  const py::gil_scoped_acquire gil;
  return py::repr(py::float_(value)).cast<std::string>();
}

std::string text_of(const c10::IValue& value) {
  if (value.isDouble()) return text_of(value.toDouble());
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isTensor()) {  // a Python number, as in `x * 0.5`
    const at::Scalar number = value.toTensor().item();
    return number.isFloatingPoint() ? text_of(number.toDouble()) : text_of(c10::IValue(number));
  }
  if (value.isList()) {
    std::string out = "[";
    for (const c10::IValue& item : value.toListRef()) {
      out += (out.size() == 1 ? "" : ", ") + text_of(item);
    }
    return out + "]";
  }
  std::ostringstream out;
  out << value;
  return out.str();
}

// Formats an argument. Dtypes need a special case, because a schema stores them as ints.
std::string text_of(const c10::IValue& value, const c10::Argument& argument) {
  const bool is_dtype = argument.name() == "dtype" && value.isInt();
  return is_dtype ? c10::toString(value.toScalarType()) : text_of(value);
}

bool is_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

bool holds_tensors(const c10::IValue& value, const c10::Argument& argument) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList() ||
         (value.isList() && argument.type()->str().find("Tensor") != std::string::npos);
}

// Formats the arguments that are not tensors and differ from their defaults. An example is "dim=1,
// keepdim=True".
std::string constants_of(const Signature& signature) {
  std::string out;
  const auto& arguments = signature.op->handle.schema().arguments();
  for (size_t i = 0; i < signature.arguments.size() && i < arguments.size(); ++i) {
    const c10::IValue& value = signature.arguments[i];
    if (value.isNone() || (holds_tensors(value, arguments[i]) && !is_number(value))) continue;
    const auto& standard = arguments[i].default_value();
    if (standard.has_value() && !standard->isNone() && *standard == value) continue;
    out += (out.empty() ? "" : ", ") + arguments[i].name() + '=' + text_of(value, arguments[i]);
  }
  return out;
}

py::dict facts_of(const SignatureReport& row) {
  using namespace py::literals;
  return py::dict("op"_a = row.op, "shapes"_a = row.shapes, "rule"_a = row.rule,
                  "note"_a = row.note, "site"_a = row.site, "instances"_a = row.instances,
                  "batches"_a = row.batches, "largest"_a = row.largest, "launches"_a = row.launches,
                  "alone"_a = row.alone, "position"_a = row.position,
                  "constants"_a = row.kind == nullptr ? "" : constants_of(*row.kind),
                  "serial"_a = row.serial, "weights"_a = row.weights, "context"_a = row.context);
}

py::dict facts_of(const FlushReport& row) {
  using namespace py::literals;
  const Caller caller(row.caller);
  return py::dict("reason"_a = row.reason, "site"_a = row.site, "caller"_a = caller.site,
                  "via"_a = caller.via, "position"_a = caller.position, "nodes"_a = row.nodes,
                  "count"_a = row.count, "batches"_a = row.batches);
}

py::dict facts_of(const AtOnceReport& row) {
  using namespace py::literals;
  const Caller caller(row.caller);
  return py::dict("op"_a = row.op, "reason"_a = row.reason, "site"_a = row.site,
                  "caller"_a = caller.site, "via"_a = caller.via, "position"_a = caller.position,
                  "count"_a = row.count);
}

py::dict facts_of(const PauseReport& row) {
  using namespace py::literals;
  return py::dict("site"_a = row.site, "count"_a = row.count, "calls"_a = row.calls,
                  "measured"_a = row.measured);
}

template <class Row>
py::list list_of(const std::vector<Row>& rows) {
  py::list list;
  for (const Row& row : rows) list.append(facts_of(row));
  return list;
}

// Returns the trace as a dict of lists of rows. The rows are tuples, because tuples need little
// memory, and a trace may have very many rows.
py::object facts_of(Trace* trace) {
  using namespace py::literals;
  if (trace == nullptr) return py::none();
  const std::lock_guard<std::mutex> lock(trace->mutex);
  py::list flushes, stages, batches;
  for (const TraceFlush& f : trace->flushes) {
    flushes.append(py::make_tuple(f.reason, f.site, f.start, f.end));
  }
  for (const TraceStage& s : trace->stages) {
    stages.append(py::make_tuple(s.name, s.start, s.end));
  }
  for (const TraceBatch& b : trace->batches) {
    batches.append(
        py::make_tuple(b.signature, b.batch, b.members, b.bytes, b.start, b.end, b.backward));
  }
  return py::dict("flushes"_a = flushes, "stages"_a = stages, "batches"_a = batches,
                  "batch_of_node"_a = trace->batch_of_node,
                  "inputs_of_node"_a = trace->inputs_of_node, "is_cut"_a = trace->is_cut);
}

}  // namespace

py::dict report_facts(const Report& report) {
  using namespace py::literals;
  return py::dict(
      "ops"_a = report.ops, "views"_a = report.views, "gradients"_a = report.gradients,
      "nodes"_a = report.nodes, "batches"_a = report.batches, "checks"_a = report.checks,
      "passes"_a = report.passes, "inferred"_a = report.inferred, "launches"_a = report.launches,
      "backward_calls"_a = report.backward_calls, "lower_bound"_a = report.lower_bound(),
      "depth"_a = report.depth, "is_open"_a = report.is_open,
      "defers_checks"_a = report.defers_checks, "signatures"_a = list_of(report.signatures),
      "flushes"_a = list_of(report.flushes), "at_once"_a = list_of(report.at_once),
      "pauses"_a = list_of(report.pauses), "trace"_a = facts_of(report.trace.get()));
}

}  // namespace autobatch
