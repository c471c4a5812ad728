#pragma once

// Marks what libautobatch.so offers to other libraries. Every symbol is visible today; with the
// mark in place, compiling with -fvisibility=hidden is a change of one line in CMakeLists.txt.
#define AUTOBATCH_API __attribute__((visibility("default")))
