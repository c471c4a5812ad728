// The report's facts for Python, whose torch_autobatch._report advises and renders.
#pragma once

#include <pybind11/pybind11.h>

namespace autobatch {

class Report;

// Keyword arguments of _report.Report, of plain Python objects.
pybind11::dict report_facts(const Report& report);

}  // namespace autobatch
