#pragma once

// What libautobatch.so offers. Everything else is hidden (-fvisibility=hidden).
#define AUTOBATCH_API __attribute__((visibility("default")))

// What the Python module calls. It is a library of its own, so that both it and C++ programs in the
// same process share one libautobatch.so; a build without it hides these as well.
#if AUTOBATCH_FOR_PYTHON
#define AUTOBATCH_INTERNAL AUTOBATCH_API
#else
#define AUTOBATCH_INTERNAL
#endif
