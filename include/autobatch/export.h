#pragma once

#if __cplusplus < 202002L
#error "autobatch's headers are C++20: compile with -std=c++20 or later"
#endif

// What libautobatch.so offers. Everything else is hidden (-fvisibility=hidden).
#define AUTOBATCH_API __attribute__((visibility("default")))

// What the Python module calls. It is a library of its own, so that both it and C++ programs in the
// same process share one libautobatch.so; a build without it hides these as well.
#if AUTOBATCH_FOR_PYTHON
#define AUTOBATCH_INTERNAL AUTOBATCH_API
#else
#define AUTOBATCH_INTERNAL
#endif
