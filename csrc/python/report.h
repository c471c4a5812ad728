// Converts a report to Python objects. torch_autobatch._report adds advice and formats the report.
#pragma once

#include <pybind11/pybind11.h>

namespace autobatch {

class Report;

// Returns the keyword arguments of _report.Report, as plain Python objects.
pybind11::dict report_facts(const Report& report);

}  // namespace autobatch
