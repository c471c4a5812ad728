// Detects whether a dict has changed since it was last read.
#pragma once

#include <Python.h>

#include <cstdint>

namespace autobatch {

// Returns the version of a dict. Each write to the dict changes the version, and no two dicts have
// the same version. Returns 0 from Python 3.12 on, because these versions of Python do not count
// writes.
inline uint64_t version_of([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

}  // namespace autobatch
