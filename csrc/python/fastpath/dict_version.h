// How to tell that a dict has not changed since it was looked at.
#pragma once

#include <Python.h>

#include <cstdint>

namespace autobatch {

// A dict has another version after each write to it, and no two have the same one; 0 where Python
// does not tell it.
inline uint64_t version_of([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

}  // namespace autobatch
