#include "python/fibers/pybind_frames.h"

#include "autobatch/scope/scope.h"

#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <Python.h>
#include <dlfcn.h>
#include <unwind.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace autobatch {
namespace {

#if defined(__GLIBCXX__) && defined(__LP64__)

// During a call, pybind11 has a record of the call on the stack. The record contains a
// std::unordered_set that is nearly always empty. The words of an empty set are the address of its
// word 6 (counted from 0), 1, 0, 0, 1.0f, ... No other object is likely to have the same words.
constexpr uint32_t kLoadFactor = 0x3f800000;

__attribute__((no_sanitize("address"), optimize("O3"))) bool has_load_factor(
    const uintptr_t* low, const uintptr_t* high) {
  uint32_t ones = 0;  // the loop has no branch, so it needs few instructions
  for (; low < high; ++low) ones |= static_cast<uint32_t>(*low) == kLoadFactor ? 1 : 0;
  return ones != 0;
}

// Returns the address of the first words that look like an empty set, or null if there are no such
// words.
__attribute__((no_sanitize("address"))) const uintptr_t* find_set(const uintptr_t* low,
                                                                  const uintptr_t* high) {
  for (; low + 7 <= high; ++low) {
    if (low[0] != reinterpret_cast<uintptr_t>(low + 6) || low[1] != 1 || low[2] != 0) continue;
    if (low[3] == 0 && static_cast<uint32_t>(low[4]) == kLoadFactor && low[6] == 0) return low;
  }
  return nullptr;
}

// Returns the base address of the library that contains the function, or null if the library is
// unknown. The address is cached, because dladdr() searches the library's symbol table, and the
// same few functions are looked up repeatedly. Needs the GIL. Libraries must not be unloaded.
const void* library_of(const void* function) {
  constexpr size_t kMost = 1 << 12;
  static auto* known = new std::unordered_map<const void*, const void*>();
  const auto found = known->find(function);
  if (found != known->end()) return found->second;
  Dl_info info;
  const void* library = dladdr(function, &info) != 0 ? info.dli_fbase : nullptr;
  if (known->size() < kMost) known->emplace(function, library);
  return library;
}

// Returns the address of the C function that implements a function of a Python module. Returns null
// if the function is not implemented in C.
const void* function_of(const char* module_name, const char* name) {
  PyObject* module = PyImport_ImportModule(module_name);
  PyObject* f = module == nullptr ? nullptr : PyObject_GetAttrString(module, name);
  const void* start = nullptr;
  if (f != nullptr && PyCFunction_Check(f)) {
    start = reinterpret_cast<const void*>(PyCFunction_GetFunction(f));
  }
  Py_XDECREF(f);
  Py_XDECREF(module);
  PyErr_Clear();
  return start;
}

// Finds the function whose frame contains an address of the stack.
struct Owner {
  uintptr_t address;
  void* function = nullptr;  // function of the last visited frame

  static _Unwind_Reason_Code visit(_Unwind_Context* context, void* data) {
    auto& owner = *static_cast<Owner*>(data);
    // The previously visited frame ends at the start of this frame, so the previously visited frame
    // contains the address.
    if (_Unwind_GetCFA(context) > owner.address) return _URC_END_OF_STACK;
    owner.function = reinterpret_cast<void*>(_Unwind_GetRegionStart(context));
    return _URC_NO_REASON;
  }
};

// Returns pybind11's dispatcher in torch. This C function implements all of torch's pybind11
// functions.
const void* torch_dispatcher() {
  static const void* found = function_of("torch._C", "_jit_get_operation");
  return found;
}

// Whether a frame of the function may contain a record of pybind11. If the frame cannot contain a
// record, the words that look like a record were written by an earlier call, and the frame has not
// overwritten them.
bool may_hold_record(const void* function) {
  static const void* const python = library_of(reinterpret_cast<const void*>(&PyList_New));
  static const void* const core = library_of(reinterpret_cast<const void*>(&current_site));
  static const void* const aten = library_of(reinterpret_cast<const void*>(&at::globalContext));
  static const void* const c10 =
      library_of(reinterpret_cast<const void*>(&c10::impl::tls_local_dispatch_key_set));
  static const void* const torch_python = library_of(torch_dispatcher());
  const void* library = library_of(function);
  if (library == nullptr) return true;
  if (library == torch_python) return function == torch_dispatcher();
  return library != python && library != core && library != aten && library != c10;
}

#endif

}  // namespace

void prepare_is_in_pybind11() {
#if defined(__GLIBCXX__) && defined(__LP64__)
  torch_dispatcher();
#endif
}

bool is_in_pybind11(const void* low, const void* high) {
#if defined(__GLIBCXX__) && defined(__LP64__)
  const auto* from = static_cast<const uintptr_t*>(low);
  const auto* to = static_cast<const uintptr_t*>(high);
  if (!has_load_factor(from, to)) return false;
  while ((from = find_set(from, to)) != nullptr) {
    Owner owner{reinterpret_cast<uintptr_t>(from)};
    _Unwind_Backtrace(&Owner::visit, &owner);
    if (may_hold_record(owner.function)) return true;
    ++from;
  }
#else
  (void)low, (void)high;
#endif
  return false;
}

}  // namespace autobatch
