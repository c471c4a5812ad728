"""Makes torch.compile run the functions of this package without compiling them.

If a compiled program calls one of these functions, the graph breaks without a warning.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

try:  # importing torch._dynamo instead would take seconds
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
except ImportError:  # this Python or this PyTorch build has no compiler
    set_code_exec_strategy = None  # type: ignore[assignment]

_BY_THE_CORE = (
    "_catching",
    "_compiled",
    "_deferred_checks",
    "_function",
    "_identity",
)  # the C++ core imports these modules when it needs them


def leave_to_python(function: Any) -> None:
    """Excludes a function and its nested functions. Functions that it calls may be compiled."""
    function._torchdynamo_disable = True  # torch.compiler.disable sets this attribute too
    if set_code_exec_strategy is None:
        return
    for code in _codes(function.__code__):
        set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def leave_package_to_python() -> None:
    """Excludes all functions of this package."""
    package = __name__.rpartition(".")[0]
    for name in _BY_THE_CORE:
        importlib.import_module(f"{package}.{name}")
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for function in _functions(vars(module), module.__name__):
                leave_to_python(function)


def _functions(names: Any, module: str) -> Iterator[types.FunctionType]:
    for value in list(names.values()):
        value = getattr(value, "__wrapped__", value)  # the function in an lru_cache
        value = getattr(value, "__func__", value)  # the function in a classmethod
        value = getattr(value, "fget", value)  # the function in a property
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, type):
            yield from _functions(vars(value), module)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
