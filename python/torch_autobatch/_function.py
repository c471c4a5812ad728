"""Custom autograd.Functions: checks which calls functorch can batch, and runs them."""

import enum
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.autograd import Function

from torch_autobatch._function_capture import why_not_captured
from torch_autobatch._random_state import differ, random_states, restore

_CONSTANTS = (
    type(None),
    bool,
    int,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

# Maximum number of `_Way`s kept for one class. If each call has different constants (a float that
# changes), all `_Way`s are dropped when the maximum is reached.
_MOST_WAYS = 1024


class _Way:
    """Facts about all calls of one class with equal non-tensor arguments and closure variables."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reason = ""  # why the calls can't be batched; "" if they can
        self.raised = False  # whether the last trial raised an error
        self.single = True  # whether the calls return one tensor, and not a tuple
        self.tried: Any = None  # of the last trial: argument shapes and dtypes, attributes of ctx


class Call:
    """A call: its class and non-tensor arguments. Objects that may run the call later hold it."""

    def __init__(
        self,
        function: type[Function],
        arguments: tuple[Any, ...],
        variables: "_Variables",
        way: _Way,
    ) -> None:
        self.function = function
        self.variables = variables
        self.places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        self.constants = [None if isinstance(a, torch.Tensor) else a for a in arguments]
        self.way = way

    @property
    def number(self) -> int:
        return self.way.number

    @property
    def single(self) -> bool:
        return self.way.single

    def arguments(self, tensors: list[torch.Tensor]) -> list[Any]:
        arguments = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            arguments[place] = tensor
        return arguments


_ways: WeakKeyDictionary[type[Function], dict[Hashable, _Way]] = WeakKeyDictionary()
_calls: WeakValueDictionary[int, Call] = WeakValueDictionary()
_numbers = itertools.count(1)


class _DeclinedError(Exception):
    """The call can't be batched; the message is the reason."""


def leave_trace(arguments: Any) -> Any:
    """Ends the active trace of a dynamic cell, if any, because it can't contain a Function's call.

    Returns the arguments, a tuple or dict, in which ordinary numbers replace traced numbers.
    Otherwise the Function could keep a traced number for its backward, which runs after the trace.
    """
    from torch_autobatch._cell_objects import plain_item
    from torch_autobatch._cell_trace import Trace

    mode = torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
    if isinstance(mode, Trace):
        mode.refuse("an autograd.Function runs in it")
    if isinstance(arguments, dict):
        return {name: plain_item(argument) for name, argument in arguments.items()}
    return tuple(plain_item(argument) for argument in arguments)


def _has_rule(function: type[Function]) -> bool:
    """Whether functorch can batch the class."""
    has_own = function.vmap is not Function.vmap
    return (
        function.generate_vmap_rule != has_own
        and function.setup_context is not Function.setup_context
    )


def _key(argument: Any) -> Hashable:
    """Returns a key that is equal only for equal arguments. All tensors have the same key.

    Raises:
        _DeclinedError: if the argument may change before the call runs.
    """
    kind = type(argument)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return torch.Tensor
    if kind in _CONSTANTS or isinstance(argument, enum.Enum):
        return kind, argument
    if kind in (float, complex):
        return kind, repr(argument)
    if kind in (tuple, torch.Size) and not any(isinstance(a, torch.Tensor) for a in argument):
        return kind, tuple(_key(a) for a in argument)
    raise _DeclinedError("an argument may change before the call runs")


class _Variables:
    """The closure variables that a class reads, with their values when it was called."""

    def __init__(self, function: type[Function]) -> None:
        self._cells: list[tuple[CellType, Any]] = []
        keys: list[Hashable] = []
        methods: list[Any] = [function.forward, function.setup_context, function.vmap]
        for method in methods:  # the loop appends functions that it finds in closures
            for cell in getattr(method, "__closure__", None) or ():
                if any(cell is known for known, _ in self._cells):
                    continue
                try:
                    contents = cell.cell_contents
                except ValueError:
                    raise _DeclinedError("a variable has no value") from None
                keys.append(_key_of_variable(contents))
                self._cells.append((cell, contents))
                if isinstance(contents, FunctionType):
                    methods.append(contents)
        self.key = tuple(keys)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Sets the variables to the stored values inside the ``with``."""
        changed = []
        for cell, contents in self._cells:
            try:
                now = cell.cell_contents
            except ValueError:
                now = cell  # the cell itself represents a deleted variable
            if now is not contents:
                changed.append((cell, now))
                cell.cell_contents = contents
        try:
            yield
        finally:
            for cell, now in changed:
                if now is cell:
                    del cell.cell_contents
                else:
                    cell.cell_contents = now


def _key_of_variable(contents: Any) -> Hashable:
    if isinstance(contents, torch.nn.Module) or _holds_tensor(contents):
        raise _DeclinedError("a variable is a tensor or a module")
    if isinstance(contents, FunctionType | BuiltinFunctionType | ModuleType | type):
        return weakref.ref(contents)  # the class may refer to itself through `super()`
    return _key(contents)


def call_of(function: type[Function], arguments: tuple[Any, ...], named: bool) -> Call | str | None:
    """Returns the call if functorch can batch it.

    Returns None if forward can be captured op by op (`_function_capture.py`). Otherwise returns the
    reason why the call must run eagerly.

    ``named``: whether the call also has keyword arguments.
    """
    if not issubclass(function, Function):
        return "custom autograd function of a class that does not derive from autograd.Function"
    if named:
        return "custom autograd.Function called with keyword arguments"
    why = why_not_captured(function)
    return why or (_batched_call(function, arguments) if _has_rule(function) else None)


def _batched_call(function: type[Function], arguments: tuple[Any, ...]) -> Call | None:
    try:
        variables = _Variables(function)
        key = variables.key, tuple(_key(a) for a in arguments)
    except _DeclinedError:
        return None
    ways = _ways.setdefault(function, {})
    way = ways.get(key)
    if way is None:
        if len(ways) >= _MOST_WAYS:
            ways.clear()
        way = ways[key] = _Way(next(_numbers))
    if way.reason:
        return None
    call = _calls.get(way.number)
    if call is None:
        call = _calls[way.number] = Call(function, arguments, variables, way)
    return call


def run(number: int, tensors: list[torch.Tensor], trying: bool) -> Any:
    """Calls the class. If ``trying``, also checks whether the call could run later, in a batch.

    Raises:
        RuntimeError: if ``trying`` is true and the call can't be batched.
    """
    call = _calls[number]
    # PyTorch's `apply` is used, because a class may override the method.
    apply = Function.__dict__["apply"].__get__(None, call.function)
    outputs: Any
    if trying:
        outputs = _try(call, apply, tensors)
    else:
        with call.variables.bound():
            outputs = apply(*call.arguments(tensors))
        if call.way.raised and not call.way.reason:
            call.way.reason = (
                "custom autograd.Function that raises an error when it is called with tensors of "
                "zeros or ones"
            )
        _keep_with_graph(call, outputs)
    return outputs


def _try(call: Call, apply: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    way = call.way
    before = [t._version for t in tensors]
    drawn = random_states()
    way.raised = True
    try:
        outputs = apply(*call.arguments(tensors))
        way.raised = False
    finally:
        if differ(drawn, random_states()):
            way.reason = "custom autograd.Function that draws random numbers"
            restore(drawn)
        if before != [t._version for t in tensors]:
            way.reason = "custom autograd.Function that writes to its arguments"
    way.single = isinstance(outputs, torch.Tensor)
    try:
        _check_outputs(outputs)
        _check_attributes(outputs, way, [(t.shape, t.dtype) for t in tensors])
    except _DeclinedError as declined:
        way.reason = str(declined)
    if way.reason:
        raise RuntimeError(way.reason)
    return outputs


def _keep_with_graph(call: Call, outputs: Any) -> None:
    """Keeps ``call`` alive with the autograd nodes of its outputs.

    Backward may run the call again: with ``create_graph``, or for some members of a batch.
    """
    functorch = torch._C._functorch
    for result in _results(outputs):
        while isinstance(result, torch.Tensor) and functorch.is_functorch_wrapped_tensor(result):
            result = functorch.get_unwrapped(result)
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            metadata: Any = result.grad_fn.metadata
            metadata["torch_autobatch"] = call


def _results(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _check_outputs(outputs: Any) -> None:
    results = _results(outputs)
    if not results or any(type(r) is not torch.Tensor for r in results):
        raise _DeclinedError("custom autograd.Function that returns something other than tensors")


def _check_attributes(outputs: Any, way: _Way, shapes: list[Any]) -> None:
    nodes = [r.grad_fn for r in _results(outputs) if r.grad_fn is not None]
    if not nodes:
        return
    attributes = dict(vars(nodes[0]))
    if any(_holds_tensor(value) for value in attributes.values()):
        raise _DeclinedError(
            "custom autograd.Function that stores a tensor in ctx without save_for_backward"
        )
    before, way.tried = way.tried, (shapes, attributes)
    if before is not None and before[0] == shapes and not _are_equal(before[1], attributes):
        raise _DeclinedError(
            "custom autograd.Function that stores data in ctx that depends on tensor values"
        )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, torch.Tensor)


def _are_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    try:
        return bool(a == b)
    except Exception:  # an attribute's own `__eq__` raised an error
        return False
