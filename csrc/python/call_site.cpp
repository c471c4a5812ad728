#include "python/call_site.h"

#include "python/fastpath/code_cache.h"

#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace autobatch {
namespace py = pybind11;
namespace {

// Returns the directory of Python's standard library ("/usr/lib/python3.11/").
const std::string& standard_library() {
  static const auto* path = [] {
    auto* found = new std::string("<unknown>");
    PyObject* os = PyImport_ImportModule("os");
    PyObject* file = os == nullptr ? nullptr : PyObject_GetAttrString(os, "__file__");
    const char* text = file == nullptr ? nullptr : PyUnicode_AsUTF8(file);
    if (text != nullptr) *found = std::string(text, std::string_view(text).rfind('/') + 1);
    PyErr_Clear();
    Py_XDECREF(file);
    Py_XDECREF(os);
    return found;
  }();
  return *path;
}

bool is_library_path(std::string_view path) {
  if (path.starts_with(standard_library()) && path.find("-packages/") == std::string_view::npos) {
    return true;
  }
  return path.find("/torch/") != std::string_view::npos ||
         path.find("/torch_autobatch/") != std::string_view::npos || path.starts_with("<frozen") ||
         path.starts_with("<eval_with_key>");  // torch.fx's
}

// Answers are cached by the string object `file`, which all functions of a file share. Needs the
// GIL.
bool is_library(PyObject* file, const char* path) {
  constexpr size_t kMost = 1 << 12;
  static auto* known = new std::unordered_map<PyObject*, bool>();
  const auto found = known->find(file);
  if (found != known->end()) return found->second;
  const bool is = is_library_path(path);
  // The names are never released, so that no other object can get the address of a cached name.
  if (known->size() < kMost) known->emplace(Py_NewRef(file), is);
  return is;
}

// Returns the position of an instruction. The encoding is described at python_place().
uint64_t position_of(PyCodeObject* code, int instruction) {
  constexpr int kMost = 0xFFFF;
  int line = 0, column = -1, last_line = 0, last_column = -1;
  PyCode_Addr2Location(code, instruction, &line, &column, &last_line, &last_column);
  const int lines = last_line - line;
  if (std::min({line, column, lines}) < 0 || std::max({column, last_column, lines}) > kMost) {
    return 0;
  }
  return static_cast<uint64_t>(lines) << 32 | static_cast<uint64_t>(column) << 16 |
         static_cast<uint64_t>(last_column);
}

Place place_of(PyCodeObject* code, PyFrameObject* frame) {
  const char* path = PyUnicode_AsUTF8(code->co_filename);
  if (path == nullptr) {
    PyErr_Clear();
    return {};
  }
  if (is_library(code->co_filename, path)) return {};
  return {std::string(path) + ":" + std::to_string(PyFrame_GetLineNumber(frame)),
          position_of(code, PyFrame_GetLasti(frame))};
}

// The place is cached by instruction. Finding the line is the slowest step, and a loop executes the
// same instructions repeatedly. Needs the GIL.
Place place_of(PyFrameObject* frame) {
  static auto* known = new CodeCache<int, Place>();
  PyCodeObject* code = PyFrame_GetCode(frame);
  Place place = known->find(code, PyFrame_GetLasti(frame), [&] { return place_of(code, frame); });
  Py_DECREF(code);
  return place;
}

// Returns the name of the module and the qualified name of the function, such as
// "torch._tensor.Tensor.__repr__". The module's name is derived from its file's name. Returns an
// empty text for functions of this package.
std::string function_of(PyCodeObject* code) {
  const char* path = PyUnicode_AsUTF8(code->co_filename);
  const char* name = PyUnicode_AsUTF8(code->co_qualname);
  if (path == nullptr || name == nullptr) {
    PyErr_Clear();
    return {};
  }
  std::string module = path;
  if (module.find("/torch_autobatch/") != std::string::npos) return {};
  if (module.starts_with(standard_library())) module.erase(0, standard_library().size());
  const size_t packages = module.rfind("-packages/");
  if (packages != std::string::npos) module.erase(0, packages + std::strlen("-packages/"));
  if (module.ends_with(".py")) module.resize(module.size() - 3);
  std::ranges::replace(module, '/', '.');
  return module + "." + name;
}

std::string function_of(PyFrameObject* frame) {
  static auto* known = new CodeCache<int, std::string>();
  PyCodeObject* code = PyFrame_GetCode(frame);
  std::string function = known->find(code, 0, [&] { return function_of(code); });
  Py_DECREF(code);
  return function;
}

// Calls `visit` for each frame, starting with the innermost frame, until `visit` returns false.
template <class Visit>
void for_each_frame(const Visit& visit) {
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && visit(frame)) {
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
}

}  // namespace

bool is_library_code(PyCodeObject* code) {
  const char* path = PyUnicode_AsUTF8(code->co_filename);
  if (path == nullptr) PyErr_Clear();
  return path == nullptr || is_library(code->co_filename, path);
}

// Returns the innermost frame of the user's code, as a new reference; null if there is none.
static PyFrameObject* program_frame() {
  PyFrameObject* found = nullptr;
  for_each_frame([&](PyFrameObject* frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_library_code(code)) found = reinterpret_cast<PyFrameObject*>(Py_NewRef(frame));
    Py_DECREF(code);
    return found == nullptr;
  });
  return found;
}

std::shared_ptr<BlockHistory> python_block_history() {
  static auto* known = new CodeCache<int, std::shared_ptr<BlockHistory>>();
  PyFrameObject* frame = program_frame();
  if (frame == nullptr) return nullptr;
  PyCodeObject* code = PyFrame_GetCode(frame);
  std::shared_ptr<BlockHistory> history =
      known->find(code, PyFrame_GetLasti(frame), std::make_shared<BlockHistory>);
  Py_DECREF(code);
  Py_DECREF(frame);
  return history;
}

static uint64_t identity_by(const char* function, py::handle of) {
  const py::module_ identity = py::module_::import("torch_autobatch._identity");
  return identity.attr(function)(of).cast<uint64_t>();
}

uint64_t python_block_identity() {
  PyFrameObject* frame = program_frame();
  if (frame == nullptr) return 0;
  return identity_by("of_frame",
                     py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(frame)));
}

uint64_t python_identity_of(PyObject* function) { return identity_by("of_function", function); }

Place python_place() {
  if (!Py_IsInitialized()) return {};
  // The thread may not hold the GIL, because torch's bindings release it before they dispatch an
  // op.
  const PyGILState_STATE gil = PyGILState_Ensure();
  Place place;
  for_each_frame([&](PyFrameObject* frame) {
    place = place_of(frame);
    return place.site.empty();
  });
  PyGILState_Release(gil);
  return place;
}

Caller::Caller(std::string_view text) {
  const size_t first = text.find('\n'), last = text.rfind('\n');
  if (first == last) return;  // the text is empty, or from another host
  site = text.substr(0, first);
  via = text.substr(first + 1, last - first - 1);
  std::from_chars(text.data() + last + 1, text.data() + text.size(), position);
}

std::string python_caller() {
  if (!Py_IsInitialized()) return {};
  const PyGILState_STATE gil = PyGILState_Ensure();
  Caller caller;
  std::vector<std::string> functions;  // innermost first
  bool is_found = false, is_in_package = false;
  for_each_frame([&](PyFrameObject* frame) {
    const auto [site, position] = place_of(frame);
    if (site.empty()) {
      if (is_found) return true;
      std::string function = function_of(frame);
      if (!function.empty()) functions.push_back(std::move(function));
      return true;
    }
    const bool is_of_package = site.find("-packages/") != std::string::npos;
    if (!is_found || !is_of_package) caller.position = position;
    is_found = true;
    if (is_of_package) return is_in_package = true;
    if (is_in_package) caller.site = site;
    return false;
  });
  PyGILState_Release(gil);
  constexpr size_t kMost = 8;
  for (size_t i = 0; i < std::min(functions.size(), kMost); ++i) {
    caller.via += (i == 0 ? "" : " ") + functions[functions.size() - 1 - i];
  }
  return caller.text();
}

}  // namespace autobatch
