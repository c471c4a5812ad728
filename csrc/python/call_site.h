// Which line of the user's Python code is running.
#pragma once

#include "autobatch/common/host_hooks.h"
#include "autobatch/scope/block_history.h"

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace autobatch {

// "model.py:12": the innermost frame outside torch and this package; empty if there is none. The
// position is that of the instruction that runs (PEP 657): the number of further lines that it
// reaches into, the column that it begins at and the one that it ends at, 16 bits each.
// Takes the GIL if the thread does not hold it.
Place python_place();

// What stands around that line on the stack. The core takes it for a text, FlushReport::caller.
struct Caller {
  std::string site;       // the user's own line that led there, if that is an installed package's
  std::string via;        // functions of Python and PyTorch that the line called, outermost first:
                          // "torch._tensor.Tensor.__repr__ torch._tensor_str._str"
  uint64_t position = 0;  // what of the user's own line, as python_place counts
  Caller() = default;
  explicit Caller(std::string_view text);
  std::string text() const { return site + '\n' + via + '\n' + std::to_string(position); }
};
// The text of one. Likewise.
std::string python_caller();

// What blocks were like that were opened at that place; null if there is none. Under the
// interpreter's lock.
std::shared_ptr<BlockHistory> python_block_history();

// What a block can call that this code opens (torch_autobatch/_identity.py), as a number. Likewise.
uint64_t python_block_identity();
// What a function can call.
uint64_t python_identity_of(PyObject* function);

// Whether code is torch's, this package's or Python's own. Under the interpreter's lock.
bool is_library_code(PyCodeObject* code);

}  // namespace autobatch
