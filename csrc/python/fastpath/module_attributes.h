// A fast way to a module's submodules and parameters. nn.Module keeps them in dicts of its own, so
// that `self.linear` is looked for in all other places first, fails with an AttributeError, which
// formats a message, and is found by nn.Module.__getattr__, in Python: 0.6 microseconds, as much
// as capturing an op. While a block is open, modules' classes have a tp_getattro slot of our own,
// and nn.ModuleList an mp_subscript slot, which look into these dicts; whatever is out of the
// ordinary goes the ordinary way.
#pragma once

namespace autobatch {

// Both need the interpreter's lock, and raise Python's exceptions as py::error_already_set. Classes
// outside torch whose `__getattr__` is nn.Module's are covered; those made while a block is open
// are so from the next one on.
void install_module_attributes();
void remove_module_attributes();

}  // namespace autobatch
