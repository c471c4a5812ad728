// The tests' main.
#define CATCH_CONFIG_RUNNER  // Catch2 2: its implementation belongs to this file
#include "catch.h"

#ifdef __SANITIZE_ADDRESS__
// What AddressSanitizer asks the program (`make sanitize`); ASAN_OPTIONS and LSAN_OPTIONS add to
// it. Visible, or the sanitizer's library does not see them.
#pragma GCC visibility push(default)
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  // A failed check of the standard library's ends in abort(): then too a stack is wanted.
  return "handle_abort=1:detect_stack_use_after_return=1:check_initialization_order=1";
}
// Registrations with PyTorch's dispatcher stay for the life of the process.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:autobatch::register_\n"
         "leak:c10::Dispatcher::register\n";
}
#pragma GCC visibility pop
#endif

int main(int argc, char* argv[]) { return Catch::Session().run(argc, argv); }
