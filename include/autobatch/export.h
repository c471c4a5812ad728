#pragma once

#if __cplusplus < 202002L
#error "autobatch's headers are C++20: compile with -std=c++20 or later"
#endif

// Marks the public symbols of libautobatch.so. All other symbols are hidden (-fvisibility=hidden).
#define AUTOBATCH_API __attribute__((visibility("default")))

// Marks symbols that the Python module calls. The module is a separate library, so that it and C++
// programs in the same process share one libautobatch.so. A build without the module hides these
// symbols too.
#if AUTOBATCH_FOR_PYTHON
#define AUTOBATCH_INTERNAL AUTOBATCH_API
#else
#define AUTOBATCH_INTERNAL
#endif
