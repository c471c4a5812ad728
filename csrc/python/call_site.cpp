#include "python/call_site.h"

#include "python/fastpath/code_cache.h"

#include <Python.h>
#include <frameobject.h>

#include <string_view>
#include <unordered_map>

namespace autobatch {
namespace {

// Where Python's own modules lie ("/usr/lib/python3.11/").
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
         path.find("/torch_autobatch/") != std::string_view::npos || path.starts_with("<frozen");
}

// Of a file's name, an object that all functions of the file share. Under the interpreter's lock.
bool is_library(PyObject* file, const char* path) {
  constexpr size_t kMost = 1 << 12;
  static auto* known = new std::unordered_map<PyObject*, bool>();
  const auto found = known->find(file);
  if (found != known->end()) return found->second;
  const bool is = is_library_path(path);
  // Each is kept for good: another must not come to its address.
  if (known->size() < kMost) known->emplace(Py_NewRef(file), is);
  return is;
}

std::string site_of(PyCodeObject* code, PyFrameObject* frame) {
  const char* path = PyUnicode_AsUTF8(code->co_filename);
  if (path == nullptr) {
    PyErr_Clear();
    return {};
  }
  if (is_library(code->co_filename, path)) return {};
  return std::string(path) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

// To find the line of an instruction takes longer than all else, and a loop comes by the same ones
// again and again. Under the interpreter's lock.
std::string site_of(PyFrameObject* frame) {
  static auto* known = new CodeCache<int, std::string>();
  PyCodeObject* code = PyFrame_GetCode(frame);
  std::string site =
      known->find(code, PyFrame_GetLasti(frame), [&] { return site_of(code, frame); });
  Py_DECREF(code);
  return site;
}

// From the innermost one on, as long as `visit` says so.
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

std::shared_ptr<BlockHistory> python_block_history() {
  static auto* known = new CodeCache<int, std::shared_ptr<BlockHistory>>();
  std::shared_ptr<BlockHistory> history;
  for_each_frame([&](PyFrameObject* frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_library_code(code)) {
      history = known->find(code, PyFrame_GetLasti(frame), std::make_shared<BlockHistory>);
    }
    Py_DECREF(code);
    return history == nullptr;
  });
  return history;
}

std::string python_call_site() {
  if (!Py_IsInitialized()) return {};
  // torch's bindings release the GIL before they dispatch an op.
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string site;
  for_each_frame([&](PyFrameObject* frame) {
    site = site_of(frame);
    return site.empty();
  });
  PyGILState_Release(gil);
  return site;
}

std::string python_caller() {
  if (!Py_IsInitialized()) return {};
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string site;
  bool is_in_package = false;
  for_each_frame([&](PyFrameObject* frame) {
    site = site_of(frame);
    if (site.empty()) return true;
    const bool is_own = site.find("-packages/") == std::string::npos;
    is_in_package |= !is_own;
    return !is_own;
  });
  PyGILState_Release(gil);
  return is_in_package && site.find("-packages/") == std::string::npos ? site : std::string();
}

}  // namespace autobatch
