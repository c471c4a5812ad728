// The main function of the tests.
#define CATCH_CONFIG_RUNNER  // Catch2 2: this file compiles its implementation
#include "catch.h"

#ifdef __SANITIZE_ADDRESS__
// Default options of AddressSanitizer (`make sanitize`), which ASAN_OPTIONS and LSAN_OPTIONS can
// override. The functions need default visibility so that the sanitizer's library finds them.
#pragma GCC visibility push(default)
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  // A failed assertion of the standard library calls abort(), which must print a stack trace too.
  return "handle_abort=1:detect_stack_use_after_return=1:check_initialization_order=1";
}
// Registrations with PyTorch's dispatcher last as long as the process.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:autobatch::register_\n"
         "leak:c10::Dispatcher::register\n";
}
#pragma GCC visibility pop
#endif

int main(int argc, char* argv[]) { return Catch::Session().run(argc, argv); }
