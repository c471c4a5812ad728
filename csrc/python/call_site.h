// Finds the line of the user's Python code that is running.
#pragma once

#include "autobatch/common/host_hooks.h"
#include "autobatch/scope/block_history.h"

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace autobatch {

// Returns the line of the innermost frame outside torch, Python's standard library and this
// package, such as "model.py:12"; empty if there is none. The position is that of the running
// instruction (PEP 657). It has three fields of 16 bits: the number of further lines that the
// instruction spans, its start column and its end column. 0: the position is unknown. Acquires the
// GIL if the thread does not hold it.
Place python_place();

// The call stack around the line that python_place() returns. For the core it is an opaque text,
// FlushReport::caller.
struct Caller {
  std::string site;       // if python_place() is in an installed package: the user's line that
                          // called into the package; else empty
  std::string via;        // functions of Python and PyTorch that the line called, outermost first:
                          // "torch._tensor.Tensor.__repr__ torch._tensor_str._str"
  uint64_t position = 0;  // position in the user's line, encoded as by python_place()
  Caller() = default;
  explicit Caller(std::string_view text);
  std::string text() const { return site + '\n' + via + '\n' + std::to_string(position); }
};
// Returns the running code's Caller as text. Acquires the GIL if the thread does not hold it.
std::string python_caller();

// Returns the history of the blocks that the running user code has opened at this instruction;
// null if no user code is running. Needs the GIL.
std::shared_ptr<BlockHistory> python_block_history();

// Returns a hash of the modules and functions that a block opened by the running user code can
// call (torch_autobatch/_identity.py); 0 if no user code is running. Needs the GIL.
uint64_t python_block_identity();
// Returns the hash of python_block_identity() for a function. Needs the GIL.
uint64_t python_identity_of(PyObject* function);

// Whether code belongs to torch, this package or Python's standard library. Needs the GIL.
bool is_library_code(PyCodeObject* code);

}  // namespace autobatch
