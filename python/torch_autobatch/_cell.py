"""Cells: functions that are captured as a whole."""

import copyreg
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from torch_autobatch import _C
from torch_autobatch._cell_dynamic import DynamicCell

_F = TypeVar("_F", bound=Callable[..., Any])

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: list[dict[Any, Any]] = [
    getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS
]
_LIBRARIES = ("torch", "torch_autobatch", "numpy")  # whose functions use no modules of the user
_MOST_ITEMS = 1024  # longer lists and dicts are not searched for modules


@overload
def cell(function: _F, *, compile: bool = ..., dynamic: bool = ...) -> _F: ...


@overload
def cell(*, compile: bool = ..., dynamic: bool = ...) -> Callable[[_F], _F]: ...


def cell(function: Any = None, *, compile: bool = False, dynamic: bool = False) -> Any:
    """Turns a function, a method, a module or a class of modules into a cell.

    The user promises that the result of a call depends only on its tensor arguments, on parameters
    and buffers of modules, and on its other arguments. Inside ``batch()`` the first call of each
    kind runs the function. A later call of the same kind adds the same ops to the graph without
    running the function. Two calls are of the same kind if their tensors agree in shape, strides,
    dtype and ``requires_grad``, and if they have the same parameters and the same other arguments.
    Outside a block, each call runs the function as usual. Examples::

        expert = ab.cell(nn.Sequential(...))


        @ab.cell
        class Expert(nn.Module): ...

    Args:
        function: the function, method, module or class. Arguments and results may be tensors, or
            tuples, lists, dicts, named tuples and dataclasses of tensors. Other arguments must be
            hashable. Numbers, strings and None are compared by value, other objects by identity.
            Without ``function``, a decorator is returned.
        compile: compile each kind of call with PyTorch's Inductor, forward and backward, when the
            first batch of this kind runs. Values and gradients equal those of eager mode up to
            rounding. If a batch can't be compiled, a ``RuntimeWarning`` gives the reason.
        dynamic: replay calls on tensors of any sizes, and not only of the same sizes. For each kind
            of call, the function runs and is traced for the first two combinations of sizes. A
            function that can't be replayed runs as usual, and ``report()`` gives the reason.

    Returns:
        A callable that replaces ``function``. If ``function`` is a class or a module, ``function``
        itself.

    Raises:
        TypeError: if ``function`` is not callable; in a call, if an argument is not hashable.
        ValueError: if both ``compile`` and ``dynamic`` are true.
        RuntimeError: in a call, if the function reads a tensor's value, because its ops could
            depend on this value. With ``dynamic``, reads are allowed. A function that can't be
            captured as a whole for another reason runs op by op, and ``report()`` gives the reason.
    """
    if function is None:
        return functools.partial(cell, compile=compile, dynamic=dynamic)
    if compile and dynamic:
        raise ValueError("cell() takes compile=True or dynamic=True, not both")
    options = _Options(compile, dynamic)
    if isinstance(function, type):
        function.__call__ = _call_of(function, options)  # type: ignore[method-assign]
        return function
    if isinstance(function, nn.Module) and not isinstance(function, torch.jit.ScriptModule):
        return _as_cell(function, options)
    if not callable(function):
        raise TypeError(
            f"cell() expects a function or another callable, not {type(function).__name__}"
        )
    return _wrap(function, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    compile: bool
    dynamic: bool

    def make(self, function: Any) -> Any:
        if self.dynamic:
            return DynamicCell(function, guards, _all_modules)
        return _C.Cell(function, self.compile)


def _wrap(function: Any, options: _Options) -> Any:
    wrapped = options.make(function)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__isabstractmethod__"):
        if hasattr(function, name):
            setattr(wrapped, name, getattr(function, name))
    return wrapped


def _call_of(cls: type, options: _Options) -> Any:
    call = _wrap(cls.__call__, options)
    call.__qualname__ = cls.__qualname__  # error messages contain this name
    return call


def _as_cell(module: nn.Module, options: _Options) -> nn.Module:
    """Changes the module's class to a subclass with a cell as ``__call__``. Returns the module.

    The module object stays the same, so registering, saving and moving the module work as before.
    """
    cls = type(module)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        made, args, *rest = super(own, self).__reduce_ex__(protocol)
        if made is copyreg.__newobj__ and args[0] is own:  # type: ignore[attr-defined]
            made, args = _new_cell, (cls, options, *args[1:])
        return (made, args, *rest)

    names = ("__module__", "__qualname__", "__doc__")
    metaclass: Any = type(cls)
    own: Any = metaclass(
        cls.__name__,
        (cls,),
        {"__call__": _call_of(cls, options), "__reduce_ex__": reduce}
        | {name: getattr(cls, name) for name in names},
    )
    module.__class__ = own
    return module


def _new_cell(cls: type, options: _Options, *args: Any) -> nn.Module:
    """Makes a cell module without its state, for copies and pickles."""
    return _as_cell(cls.__new__(cls, *args), options)


def guards(
    function: Any, modules: Iterable[nn.Module], weights: Iterable[torch.Tensor]
) -> list[tuple[dict[Any, Any], str | None, Any]] | None:
    """Returns the state that must be unchanged at a later call, as tuples (dict, name, value).

    The state belongs to the modules among the arguments, and to the modules that the function
    reaches without its arguments. If the name is None, the value is the number of items in the
    dict. Returns None if there are hooks, because hooks must run in each call.
    """
    used = {id(weight) for weight in weights}
    if any(_GLOBAL_HOOKS):
        return None
    found: list[tuple[dict[Any, Any], str | None, Any]] = [(d, None, 0) for d in _GLOBAL_HOOKS]
    for module in _all_modules(function, modules):
        hooks = [d for name in _HOOKS if (d := module.__dict__.get(name)) is not None]
        if any(hooks):
            return None
        found.extend((d, None, 0) for d in hooks)
        found.append((module.__dict__, "training", module.training))
        found.extend((module._modules, *item) for item in module._modules.items())
        tables = (module._parameters, module._buffers)
        found.extend((table, None, len(table)) for table in (module._modules, *tables))
        for table in tables:
            found.extend((table, *item) for item in table.items() if id(item[1]) in used)
    return found


def _all_modules(function: Any, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns ``modules`` and the modules that the function reaches, with their submodules."""
    roots = (*modules, *_modules_behind(function))
    return list({id(m): m for root in roots for m in root.modules()}.values())


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in the code and in its inner functions."""
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple({*code.co_names, *(name for names in inner for name in names)})


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the cell has no value yet
        return ()


def _next_behind(value: Any) -> Iterable[Any]:
    """Returns the objects that ``value`` refers to and in which modules may be found."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, (_C.Cell, DynamicCell)):
        return (value.__wrapped__,)
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").partition(".")[0] in _LIBRARIES:
            return ()
        table = value.__globals__
        names = (table[name] for name in _names_in(value.__code__) if name in table)
        inner = (c for cell in value.__closure__ or () for c in _contents(cell))
        return (*names, *inner, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, dict):
        return tuple(value.values()) if len(value) <= _MOST_ITEMS else ()
    return ()


def _modules_behind(function: Any) -> list[nn.Module]:
    """Returns the modules that the function reaches through closures, globals and defaults.

    These modules are not arguments of a call.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    queue = [function]
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.append(value)
        else:
            queue.extend(_next_behind(value))
    return found
