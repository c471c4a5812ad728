"""Cells whose tensors have other sizes at each call (``ab.cell(function, dynamic=True)``)."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_autobatch import _C
from torch_autobatch._cell_attributes import Attributes
from torch_autobatch._cell_by_sizes import compiled
from torch_autobatch._cell_objects import (
    BY_VALUE,
    contents,
    exactly,
    has_slots,
    has_state,
    is_fixed,
    make_plain,
    plain_item,
    put,
    watched,
)
from torch_autobatch._cell_program import MISMATCH, Program, Reason
from torch_autobatch._cell_sizes import is_traced, traced
from torch_autobatch._cell_trace import Trace, context

_TRACES = 2  # of other sizes each, which must give one program
_MOST_PROGRAMS = 8  # of one kind of call
_MOST_KINDS = 256
_DEEPEST = 32  # of containers within each other

FindModules = Callable[[Any, list[nn.Module]], list[nn.Module]]
FindGuards = Callable[[Any, list[nn.Module], list[Tensor]], list[Any] | None]


class _UnknownError(Exception):
    """An argument that can't be told apart from others."""


@dataclasses.dataclass
class _Arguments:
    """A call's arguments, taken apart."""

    kind: list[Any] = dataclasses.field(default_factory=list)
    inputs: list[Any] = dataclasses.field(default_factory=list)  # tensors, ints, containers
    objects: list[Any] = dataclasses.field(default_factory=list)  # whose ids are in `kind`
    # Objects with tensors in them, and their lists and dicts: by ids, the numbers of these inputs.
    containers: dict[int, int] = dataclasses.field(default_factory=dict)
    ints: list[tuple[Any, Any, int]] = dataclasses.field(default_factory=list)  # in containers
    counts: dict[int, int] = dataclasses.field(default_factory=dict)  # of inputs in an object

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind is Tensor:
            self._add_tensor(value)
        elif kind is nn.Parameter:  # the function may know it by another way too
            self.kind += (kind, id(value))
            self.inputs.append(value)
            self.objects.append(value)
        elif kind is int:
            self.kind.append(int)
            self.inputs.append(value)
        elif is_fixed(value) and kind is not tuple:
            self.kind.append(exactly(value))
        elif kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self.kind += (kind, len(value))
            for item in value:
                self.add(item)
        elif kind is list or kind is dict or has_state(value):
            before = len(self.inputs)
            self._add_container(value)
            self.counts.setdefault(id(value), len(self.inputs) - before)
        elif kind is torch.Size or kind is range:
            self.kind += (kind, *value)
        else:
            self._add_other(value)

    def _add_other(self, value: Any) -> None:
        """What is told by its identity: it is not to change."""
        is_collection = isinstance(value, Collection) and not isinstance(value, (nn.Module, type))
        if is_collection or isinstance(value, Tensor) or is_traced(value):
            raise _UnknownError
        if has_slots(value) and type(value).__module__ not in sys.stdlib_module_names:
            raise _UnknownError
        self.kind += (type(value), id(value))
        self.objects.append(value)

    def _add_tensor(self, value: Tensor) -> None:
        self.kind += (Tensor, value.dtype, value.dim(), value.requires_grad, value.device)
        self.inputs.append(value)

    def _add_container(self, value: Any, depth: int = 0) -> None:
        known = self.containers.setdefault(id(value), len(self.inputs))
        if known < len(self.inputs):
            self.kind += ("known", known)
            return
        if depth > _DEEPEST or has_slots(value):
            raise _UnknownError
        items = contents(value)
        self.kind += (type(value), *map(exactly, items))
        self.inputs.append(value)
        for name, item in items.items():
            kind = type(item)
            if kind is Tensor:
                self._add_tensor(item)
            elif kind in BY_VALUE or (kind is tuple and is_fixed(item)):
                self.kind.append(exactly(item))
            elif kind is list or kind is dict or has_state(item):
                self._add_container(item, depth + 1)
            elif kind is int:
                self.ints.append((value, name, len(self.inputs)))
                self.add(item)
            elif isinstance(item, weakref.ref) and id(item()) in self.containers:
                self.kind += (weakref.ref, self.containers[id(item())])
            elif isinstance(item, tuple) and not all(isinstance(i, Tensor) for i in item):
                raise _UnknownError
            else:
                self.add(item)

    def key(self) -> tuple[Any, ...]:
        ids = [id(value) for value in self.inputs if isinstance(value, Tensor)]
        same = tuple(ids.index(i) for i in ids) if len(set(ids)) < len(ids) else ()
        return (*self.kind, same, torch.is_grad_enabled(), *context())

    def sizes(self) -> tuple[int, ...]:
        found: list[int] = []
        for value in self.inputs:
            if isinstance(value, Tensor):
                found.extend(value.shape)
            elif isinstance(value, int):
                found.append(value)
        return tuple(found)

    def names_of_sizes(self) -> list[str]:
        """In a program, in the same order."""
        found: list[str] = []
        for i, value in enumerate(self.inputs):
            if isinstance(value, Tensor):
                found.extend(f"x{i}.size({d})" for d in range(value.dim()))
            elif isinstance(value, int):
                found.append(f"x{i}")
        return found

    def modules(self, args: tuple[Any, ...]) -> list[nn.Module]:
        return [value for value in (*args[:1], *self.objects) if isinstance(value, nn.Module)]


def _is_held(
    inputs: Sequence[Any], modules: Sequence[nn.Module], function: Callable[..., Any]
) -> bool:
    """Whether an argument is also a buffer, a global of the function or in its closure."""
    function = inspect.unwrap(function)
    table = getattr(function, "__globals__", {})
    names = function.__code__.co_names if hasattr(function, "__code__") else ()
    held = [table.get(name) for name in names]
    held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held += [value for m in modules for value in (*m._buffers.values(), *vars(m).values())]
    ids = {id(value) for value in held if isinstance(value, Tensor)}
    return any(type(value) is Tensor and id(value) in ids for value in inputs)


class _TracedNumbers:
    """Puts traced numbers in the place of ints among arguments, in the order of `_Arguments`."""

    def __init__(self, arguments: _Arguments, trace: Trace) -> None:
        self._trace = trace
        self._next = 0
        self._counts = dict(arguments.counts)
        for container, name, i in arguments.ints:
            put(container, name, traced(contents(container)[name], trace, f"x{i}"))

    def _skip(self, count: int) -> int:
        self._next += count
        return self._next - count

    def put(self, value: Any) -> Any:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            self._skip(1)
        elif kind is int:
            return traced(value, self._trace, f"x{self._skip(1)}")
        elif kind is tuple:
            return tuple(self.put(item) for item in value)
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*(self.put(item) for item in value))
        else:
            self._skip(self._counts.pop(id(value), 0))
        return value


class _Group:
    """Traces that differ in the sizes of the inputs alone."""

    def __init__(self, program: Program, guards: _C.CellGuards) -> None:
        self.program = program
        self.guards = guards
        # What is done to indices leads to captured ops. What the caller gets may be read there.
        self.captures_data = not program.returns_data()
        self.sizes: list[tuple[int, ...]] = []
        self.run: Callable[..., Any] | None = None

    def add(self, arguments: _Arguments, file: str, line: int) -> None:
        """Another trace, of these arguments. A size that has never differed stays a condition."""
        self.sizes.append(arguments.sizes())
        if len(self.sizes) < _TRACES:
            return
        alike = [len(set(of_one)) == 1 for of_one in zip(*self.sizes, strict=True)]
        names = arguments.names_of_sizes()
        fixed = [
            f"{name} == {size}"
            for name, size, is_alike in zip(names, self.sizes[0], alike, strict=True)
            if is_alike
        ]
        self.run = compiled(self.program, fixed, file, line)


class _Calls:
    """The calls of one kind."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects  # held, for their ids are in the key
        self.groups: list[_Group] = []
        self.hashes = True  # sizes may be keys in traces
        self.has_refused_hashes = False
        self.why: Reason | None = None  # they run as they are

    def run(self, inputs: list[Any]) -> Any:
        for group in self.groups:
            if group.run is not None and group.guards.hold():
                result = self._run(group, group.run, inputs)
                if result is not MISMATCH:
                    return result
        return MISMATCH

    def _run(self, group: _Group, run: Callable[..., Any], inputs: list[Any]) -> Any:
        before = _C.set_captures_data(group.captures_data)
        try:
            return run(*inputs)
        except Exception:
            if group.program.has_effects:
                raise
            return MISMATCH  # the function raises it again, at its own line
        finally:
            _C.set_captures_data(before)

    def group_of(self, program: Program) -> _Group | None:
        for group in self.groups:
            if group.guards.hold() and group.program.difference(program) is None:
                return group
        return None

    def is_known(self, sizes: tuple[int, ...]) -> bool:
        return any(sizes in group.sizes for group in self.groups if group.guards.hold())


@dataclasses.dataclass
class _Traced:
    """A call of the function that was watched: its result, and what it was."""

    result: Any
    program: Program | None
    why: Reason | None  # there is none
    attributes: Attributes


class DynamicCell:
    """A function whose calls are replayed on tensors of any sizes, while a block is open."""

    def __init__(
        self, function: Callable[..., Any], find_guards: FindGuards, find_modules: FindModules
    ) -> None:
        self.__wrapped__ = function
        self._find_guards = find_guards
        self._find_modules = find_modules
        self._calls: dict[Any, _Calls] = {}
        self._of_modules: dict[int, tuple[weakref.ref[nn.Module], dict[Any, _Calls]]] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:  # by name, as functions are
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _C.uses_cells() or torch._C._len_torch_function_stack() > 0:
            return self.__wrapped__(*args, **kwargs)
        arguments = _Arguments()
        table = self._calls
        rest = args
        if args and isinstance(args[0], nn.Module):  # lives no longer than the module
            table, rest = self._of_module(args[0]), args[1:]
        try:
            arguments.add(rest)
            for name, value in kwargs.items():
                arguments.kind.append(name)
                arguments.add(value)
        except _UnknownError:
            return self.__wrapped__(*args, **kwargs)
        key = arguments.key()
        calls = table.get(key)
        if calls is None:
            if len(table) >= _MOST_KINDS:
                table.clear()
            calls = table[key] = _Calls(arguments.objects)
        if _C.checks_cells():
            return self._check(calls, arguments, args, kwargs)
        result = calls.run(arguments.inputs)
        return result if result is not MISMATCH else self._learn(calls, arguments, args, kwargs)

    def _of_module(self, module: nn.Module) -> dict[Any, _Calls]:
        known = self._of_modules.get(id(module))
        if known is None or known[0]() is not module:
            tables, key = self._of_modules, id(module)
            known = (weakref.ref(module, lambda _: tables.pop(key, None)), {})
            self._of_modules[key] = known
        return known[1]

    def _learn(
        self, calls: _Calls, arguments: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the function, and watches it if that may give a program."""
        if calls.why is not None:
            _C.note_plain_cell(self._name(), calls.why.text, calls.why.place)
        if calls.why is not None or calls.is_known(arguments.sizes()):
            return self.__wrapped__(*args, **kwargs)
        call = self._trace(calls, arguments, args, kwargs)
        if call.program is None:
            calls.why = call.why
            return call.result
        group = calls.group_of(call.program) or self._add_group(calls, arguments, args, call)
        if group is not None:
            group.add(arguments, *self._place(args))
        return call.result

    def _add_group(
        self, calls: _Calls, arguments: _Arguments, args: tuple[Any, ...], call: _Traced
    ) -> _Group | None:
        program = call.program
        assert program is not None
        guards = self._find_guards(self.__wrapped__, arguments.modules(args), program.weights())
        if guards is None:
            calls.why = Reason("a module in it has hooks", "")
            return None
        live = [known for known in calls.groups if known.guards.hold()]
        if len(live) >= _MOST_PROGRAMS:
            other = live[-1].program.difference(program)
            assert other is not None
            text = f"it does something else for other sizes ({other.text})"
            calls.why = Reason(text, other.place)
        group = _Group(program, _C.CellGuards([*guards, *call.attributes.guards()]))
        calls.groups = [*calls.groups[1 - _MOST_PROGRAMS :], group]
        return group

    def _trace(
        self, calls: _Calls, arguments: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Traced:
        modules = self._find_modules(self.__wrapped__, arguments.modules(args))
        attributes = Attributes(self.__wrapped__, modules)
        trace = Trace(arguments.inputs, calls.hashes)
        numbers = _TracedNumbers(arguments, trace)
        has_module = bool(args) and isinstance(args[0], nn.Module)
        positional = numbers.put(args[has_module:])
        named = {name: numbers.put(value) for name, value in kwargs.items()}
        trace.watch(arguments.containers.values())
        others = watched(arguments.objects)
        try:
            with trace:
                result = self.__wrapped__(*args[:has_module], *positional, **named)
        except TypeError:
            if calls.hashes or not trace.has_hashed or trace.has_effects:
                raise
            calls.hashes = True  # it can't do without
            return self._trace(calls, arguments, args, kwargs)
        finally:
            trace.stop()
            attributes.make_plain()
            if sys.exc_info()[0] is not None:
                trace.make_plain()
        program = trace.finish(result)
        trace.make_plain()
        make_plain(result)
        if program is not None and not others.is_empty():
            program, trace.why = None, Reason("it changes an object that held no tensors", "")
        if program is not None and _is_held(arguments.inputs, modules, self.__wrapped__):
            program, trace.why = None, Reason("an argument is a tensor that it knows otherwise", "")
        may_refuse = not calls.has_refused_hashes and not arguments.containers
        if trace.has_hashed and not trace.has_effects and may_refuse:
            calls.hashes, calls.has_refused_hashes = False, True
        return _Traced(plain_item(result), program, trace.why, attributes)

    def _check(
        self, calls: _Calls, arguments: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the function all the same, and compares it with what would be replayed."""
        groups = [group for group in calls.groups if group.run is not None and group.guards.hold()]
        if not groups:
            return self._learn(calls, arguments, args, kwargs)
        call = self._trace(calls, arguments, args, kwargs)
        for group in groups:
            other = call.why if call.program is None else group.program.difference(call.program)
            if other is not None and not group.program.has_effects:
                assert group.run is not None
                if calls._run(group, group.run, arguments.inputs) is not MISMATCH:
                    _C.raise_different_cell(self._name(), other.text)
        return call.result

    def _name(self) -> str:
        return str(getattr(self, "__qualname__", type(self.__wrapped__).__name__))

    def _place(self, args: tuple[Any, ...]) -> tuple[str, int]:
        """Where the function stands."""
        code = getattr(inspect.unwrap(self.__wrapped__), "__code__", None)
        if args and isinstance(args[0], nn.Module) and code is nn.Module.__call__.__code__:
            code = getattr(inspect.unwrap(type(args[0]).forward), "__code__", code)
        return (code.co_filename, code.co_firstlineno) if code is not None else ("<cell>", 1)
