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

// Returns the line, such as "model.py:12", of the innermost frame outside torch, Python's standard
// library and this package. The line is empty if there is no such frame. The returned position is
// the position of the running instruction (PEP 657). A position has three fields of 16 bits: the
// number of additional lines that the instruction spans, its start column and its end column. The
// position is 0 if it is unknown. Acquires the GIL if the thread does not hold it.
Place python_place();

// The call stack around the line that python_place() returns. The C++ core stores the call stack as
// text and does not interpret this text (FlushReport::caller).
struct Caller {
  std::string site;       // if python_place() is in an installed package, the user's line that
                          // called the package; otherwise empty
  std::string via;        // functions of Python and PyTorch that the line called, outermost first:
                          // "torch._tensor.Tensor.__repr__ torch._tensor_str._str"
  uint64_t position = 0;  // position in the user's line, encoded as by python_place()
  Caller() = default;
  explicit Caller(std::string_view text);
  std::string text() const { return site + '\n' + via + '\n' + std::to_string(position); }
};
// Returns the running code's Caller as text. Acquires the GIL if the thread does not hold it.
std::string python_caller();

// Returns the history of all blocks that the user code has opened at the running instruction; null
// if no user code is running. Needs the GIL.
std::shared_ptr<BlockHistory> python_block_history();

// Returns a hash of the modules and functions that the running user code can call in a block
// (torch_autobatch/_identity.py). Returns 0 if no user code is running. Needs the GIL.
uint64_t python_block_identity();
// Like python_block_identity, but returns a hash of the modules and functions that the given
// function can call. Needs the GIL.
uint64_t python_identity_of(PyObject* function);

// Whether code belongs to torch, this package or Python's standard library. Needs the GIL.
bool is_library_code(PyCodeObject* code);

}  // namespace autobatch
