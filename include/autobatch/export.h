#pragma once

#if __cplusplus < 202002L
#error "autobatch's headers are C++20: compile with -std=c++20 or later"
#endif

// Marks the public symbols of libautobatch.so. All other symbols are hidden (-fvisibility=hidden).
#define AUTOBATCH_API __attribute__((visibility("default")))

// Marks symbols that the Python module calls. The module is a separate library, and calls these
// symbols in libautobatch.so. So the module and C++ code in the same process can share one
// libautobatch.so. If the library is built without the module, symbols that are marked
// AUTOBATCH_INTERNAL are hidden too.
#if AUTOBATCH_FOR_PYTHON
#define AUTOBATCH_INTERNAL AUTOBATCH_API
#else
#define AUTOBATCH_INTERNAL
#endif
