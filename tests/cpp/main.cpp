// The tests' main, for Catch2 version 2 and 3 alike (version 3 reaches it through a header of the
// same name that CMake writes).
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

int main(int argc, char* argv[]) { return Catch::Session().run(argc, argv); }
