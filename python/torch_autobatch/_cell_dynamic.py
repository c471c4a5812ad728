"""Cells that are called on tensors of different sizes (``ab.cell(function, dynamic=True)``)."""

from __future__ import annotations

import dataclasses
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_autobatch import _C
from torch_autobatch._cell_arguments import Arguments, TracedNumbers
from torch_autobatch._cell_attributes import Attributes
from torch_autobatch._cell_by_sizes import compiled
from torch_autobatch._cell_kept import replace_kept
from torch_autobatch._cell_objects import make_plain, plain_item, watched
from torch_autobatch._cell_program import MISMATCH, Program, Reason
from torch_autobatch._cell_trace import Trace
from torch_autobatch._random_state import random_states, restore

_TRACES = 2  # number of traces that must give the same program
_MOST_PROGRAMS = 8  # maximum number of programs for one kind of call
_MOST_KINDS = 256
_FEW_KINDS = 64  # up to this many kinds are traced even if no kind is called again

FindModules = Callable[[Any, list[nn.Module]], list[nn.Module]]
FindGuards = Callable[[Any, list[nn.Module], list[Tensor]], list[Any] | None]


class _Group:
    """Traces that differ only in the sizes of the inputs, and their program."""

    def __init__(self, program: Program, guards: _C.CellGuards) -> None:
        self.program = program
        self.guards = guards
        self._may_be_read = program.returns_data()
        # A program that draws random numbers runs such ops eagerly, because captured calls would
        # draw other numbers than eager calls.
        self._is_read = any(line.draws for line in program.lines)
        self._calls_since_flush = 0
        self._batches: tuple[int, int] | None = None  # batches_run() at the last call
        self.sizes: list[tuple[int, ...]] = []
        self.run: Callable[..., Any] | None = None

    def add(self, arguments: Arguments, file: str, line: int) -> None:
        """Adds a trace with these arguments. If all traces share a size, it becomes a condition.

        If all sizes are equal, the program is valid only for these sizes.
        """
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

    def captures_data(self) -> bool:
        """Returns whether this call also captures ops that read only data.

        (Examples: an op that computes the indices of a captured op; a graph layer without
        parameters on the features of a graph.) If the program returns results of such ops, the
        caller may read them. If a flush follows a single call, the caller has probably read a
        result, so later calls run these ops eagerly.
        """
        if not self._may_be_read:
            return True
        if not self._is_read:
            batches = _C.batches_run()
            if batches != self._batches:
                self._is_read = self._calls_since_flush == 1
                self._batches, self._calls_since_flush = batches, 0
            self._calls_since_flush += 1
        return not self._is_read


class _Calls:
    """The calls of one kind."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects  # kept alive, because their ids are in the key
        self.groups: list[_Group] = []
        self.hashes = True  # whether the function may use sizes as dict keys in a trace
        self.has_refused_hashes = False
        self.kept = 0  # number of traces in which the call stored a size
        self.why: Reason | None = None  # why these calls are not replayed

    def run(self, inputs: tuple[Any, ...]) -> Any:
        for group in self.groups:
            if group.run is not None and group.guards.hold():
                result = self._run(group, group.run, inputs)
                if result is not MISMATCH:
                    return result
        return MISMATCH

    def _run(self, group: _Group, run: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        drawn = random_states() if group.program.asks_after_draws else None
        before = _C.set_captures_data(group.captures_data())
        try:
            result = run(*inputs)
        except Exception:
            if group.program.has_effects:
                raise
            result = MISMATCH  # run the function, so that the error is raised in the user's code
        finally:
            _C.set_captures_data(before)
        if result is MISMATCH and drawn is not None:
            restore(drawn)  # the function then draws the same numbers again
        return result

    def group_of(self, program: Program) -> _Group | None:
        for group in self.groups:
            if group.guards.hold() and group.program.difference(program) is None:
                return group
        return None

    def is_known(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether the inputs of a trace of a compiled program had these sizes."""
        return any(
            group.run is not None and sizes in group.sizes
            for group in self.groups
            if group.guards.hold()
        )


@dataclasses.dataclass
class _Traced:
    """A traced call of the function."""

    result: Any
    program: Program | None
    why: Reason | None  # why there is no program
    attributes: Attributes
    has_stored: bool = False  # whether the call stored a size in an attribute of a module


class DynamicCell:
    """A function whose calls in an open block are replayed, on tensors of any sizes."""

    def __init__(
        self, function: Callable[..., Any], find_guards: FindGuards, find_modules: FindModules
    ) -> None:
        self.__wrapped__ = function
        self._find_guards = find_guards
        self._find_modules = find_modules
        self._calls: dict[Any, _Calls] = {}
        self._kinds = 0  # number of kinds of calls so far
        self._replays = 0
        self._why_no_key: Reason | None = None  # why some calls can't be compared with others
        self._of_modules: dict[int, tuple[weakref.ref[nn.Module], dict[Any, _Calls]]] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:  # a cell is pickled by name, like a function
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _C.uses_cells() or torch._C._len_torch_function_stack() > 0:
            return self.__wrapped__(*args, **kwargs)
        table = self._calls
        rest = args
        if args and isinstance(args[0], nn.Module):  # the table is deleted together with the module
            table, rest = self._of_module(args[0]), args[1:]
        found = _C.take_apart(rest, kwargs)
        if found is None:
            self._refuse_arguments(args)
            return self.__wrapped__(*args, **kwargs)
        key, inputs, objects = found[:3]
        calls = table.get(key)
        if calls is None:
            if self._kinds > max(_FEW_KINDS, self._replays):  # traces take longer than the calls
                text = "most calls have arguments that no earlier call had"
                _C.note_plain_cell(self._name(), text, self._line(args))
                return self.__wrapped__(*args, **kwargs)
            self._kinds += 1
            if len(table) >= _MOST_KINDS:
                table.clear()
            calls = table[key] = _Calls(objects)
        if _C.checks_cells():
            return self._check(calls, Arguments(*found[1:]), args, kwargs)
        result = calls.run(inputs)
        if result is not MISMATCH:
            self._replays += 1
            return result
        return self._learn(calls, Arguments(*found[1:]), args, kwargs)

    def _of_module(self, module: nn.Module) -> dict[Any, _Calls]:
        known = self._of_modules.get(id(module))
        if known is None or known[0]() is not module:
            tables, key = self._of_modules, id(module)
            known = (weakref.ref(module, lambda _: tables.pop(key, None)), {})
            self._of_modules[key] = known
        return known[1]

    def _learn(
        self, calls: _Calls, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the function. Traces the call if the trace can give a program."""
        if calls.why is not None:
            _C.note_plain_cell(self._name(), calls.why.text, calls.why.place)
        if calls.why is not None or calls.is_known(arguments.sizes()):
            return self.__wrapped__(*args, **kwargs)
        call = self._trace(calls, arguments, args, kwargs)
        if call.program is None:
            calls.why = call.why
            return call.result
        group = calls.group_of(call.program) or self._add_group(calls, arguments, args, call)
        if group is None:
            return call.result
        before, now = group.program.made, call.program.made
        if before is not now and any(ours is theirs for ours in before for theirs in now):
            calls.why = Reason("it returns an object that existed before the call", "")
            calls.groups.remove(group)
            return call.result
        group.add(arguments, *self._place(args))
        if before is not now:
            before.clear()
        return call.result

    def _add_group(
        self, calls: _Calls, arguments: Arguments, args: tuple[Any, ...], call: _Traced
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
            text = f"it behaves differently for other sizes ({other.text})"
            calls.why = Reason(text, other.place)
        found = [*guards, *call.attributes.guards()]
        group = _Group(program, _C.CellGuards(found, program.weights()))
        calls.groups = [*calls.groups[1 - _MOST_PROGRAMS :], group]
        return group

    def _trace(
        self, calls: _Calls, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Traced:
        """Runs and traces the function. If the function stores a size, returns no program."""
        _C.note_preparation()
        numbers: list[weakref.ref[Any]] = []
        try:
            call = self._record(calls, arguments, args, kwargs, numbers)
        finally:
            is_kept = replace_kept(numbers)
        is_kept = is_kept or call.has_stored
        if is_kept:
            calls.groups.clear()  # unlike the function, the programs do not store sizes
        if is_kept and call.program is not None:
            call.program = None
            calls.kept += 1
            if calls.kept == _MOST_PROGRAMS:  # a later call may read the stored sizes
                call.why = Reason(
                    "it stores a size in a dict or an object that outlives the call",
                    self._line(args),
                )
        return call

    def _record(
        self,
        calls: _Calls,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found_numbers: list[weakref.ref[Any]],
    ) -> _Traced:
        modules = self._find_modules(self.__wrapped__, arguments.modules(args))
        attributes = Attributes(self.__wrapped__, modules)
        trace = Trace(arguments.inputs, calls.hashes, found_numbers)
        numbers = TracedNumbers(arguments, trace)
        has_module = bool(args) and isinstance(args[0], nn.Module)
        positional = numbers.put(args[has_module:])
        named = {name: numbers.put(value) for name, value in kwargs.items()}
        trace.watch(arguments.containers.values())
        others = watched(arguments.objects)
        drawn = random_states()
        failure: type[BaseException] | None = None
        try:
            with trace:
                result = self.__wrapped__(*args[:has_module], *positional, **named)
        except BaseException as error:
            trace.make_plain()
            if trace.has_effects or not isinstance(error, Exception):
                raise
            failure = type(error)
        finally:
            trace.stop()
            has_stored = attributes.make_plain()
        if failure is not None:  # the function runs again
            trace.undo_changes()
            others.undo()
            attributes.undo()
            restore(drawn)
            if issubclass(failure, TypeError) and not calls.hashes and trace.has_hashed:
                calls.hashes = True
                return self._record(calls, arguments, args, kwargs, found_numbers)
            # The code may need ordinary numbers (``json.dumps(n)``). If the error has another
            # cause, the function raises it again.
            result = self.__wrapped__(*args, **kwargs)
            text = f"it raises {failure.__name__} if a size is a traced number instead of an int"
            return _Traced(result, None, Reason(text, self._line(args)), attributes)
        program = trace.finish(result)
        trace.make_plain()
        make_plain(result)
        why = trace.why
        if program is not None and not others.is_empty():
            why = Reason("it changes an argument that contained no tensors", "")
        elif program is not None and attributes.hold(arguments.tensors()):
            why = Reason(
                "an argument is a tensor that the function also accesses under another name", ""
            )
        may_refuse = not calls.has_refused_hashes and not arguments.containers
        if trace.has_hashed and not trace.has_effects and may_refuse:
            calls.hashes, calls.has_refused_hashes = False, True
        return _Traced(
            plain_item(result), program if why is None else None, why, attributes, has_stored
        )

    def _check(
        self, calls: _Calls, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the function, and raises an error if a replay behaves differently."""
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

    def _refuse_arguments(self, args: tuple[Any, ...]) -> None:
        if self._why_no_key is None:
            text = "an argument has a type that cannot be compared between calls"
            self._why_no_key = Reason(text, self._line(args))
        _C.note_plain_cell(self._name(), self._why_no_key.text, self._why_no_key.place)

    def _line(self, args: tuple[Any, ...]) -> str:
        return "{}:{}".format(*self._place(args))

    def _place(self, args: tuple[Any, ...]) -> tuple[str, int]:
        """Returns the file and the first line of the function."""
        code = getattr(inspect.unwrap(self.__wrapped__), "__code__", None)
        if args and isinstance(args[0], nn.Module) and code is nn.Module.__call__.__code__:
            code = getattr(inspect.unwrap(type(args[0]).forward), "__code__", code)
        return (code.co_filename, code.co_firstlineno) if code is not None else ("<cell>", 1)
