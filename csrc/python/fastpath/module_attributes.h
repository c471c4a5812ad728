// A fast path for reading a module's submodules and parameters. nn.Module keeps them in dicts of
// its own. So a lookup of `self.linear` first fails with an AttributeError, which formats a
// message. Then nn.Module.__getattr__ finds the attribute in Python code. Such a lookup takes 0.6
// microseconds, as much as capturing an op. While a block is open, module classes have a
// tp_getattro slot of this library, and nn.ModuleList an mp_subscript slot, which look into these
// dicts. All other cases take the ordinary path.
#pragma once

#include "autobatch/common/switches.h"

namespace autobatch {

// Both functions need the GIL, and raise Python's exceptions as py::error_already_set. They cover
// classes outside torch that use nn.Module's `__getattr__`. A class that is created while a block
// is open is covered from the next block on.
extern Switch module_attributes_switch;

void install_module_attributes();
void remove_module_attributes();

}  // namespace autobatch
