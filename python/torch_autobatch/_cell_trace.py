"""Traces one call of a dynamic cell's function as a program of PyTorch calls, in Python source.

A :class:`Trace` observes a call as a torch-function mode, and records lines: ``r3 = k1(r2, x0)``
calls PyTorch, ``s4 = x0.size(0)`` is a size. A condition on sizes in the function's Python code
becomes a line too. Traces of the same function with different sizes are compared by their lines and
constants.
"""

from __future__ import annotations

import math
import operator
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_autobatch import _C
from torch_autobatch._cell_conditions import ask_count, ask_ones, context
from torch_autobatch._cell_indexing import Indexing
from torch_autobatch._cell_objects import Changes, holds_tensors, make_closure_plain
from torch_autobatch._cell_ops import (
    changes_shape,
    draws,
    draws_elsewhere,
    gives_its_argument,
    has_tensors,
    is_in_place,
    keeps_statistics,
    keeps_type,
    makes_memory,
    may_write,
    name_of,
    reads_values,
    selects_by_values,
    tensors_among,
)
from torch_autobatch._cell_passes import asks_after_draws, names_of_inputs, optimized
from torch_autobatch._cell_program import (
    Line,
    Program,
    Reason,
    UntraceableError,
    are_the_same,
    quoted,
    structure_of,
)
from torch_autobatch._cell_returned import ReturnedValue
from torch_autobatch._cell_shapes import Origins, Size
from torch_autobatch._cell_sizes import TracedShape, converted, is_traced, plain, source_of, traced

_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
_LITERALS = (int, bool)

# Calls that return no tensor, and whose results depend on the inputs' kinds.
_OF_KINDS = re.compile(
    "dim|ndim|ndimension|dtype|device|requires_grad|names|get_device|element_size|itemsize|"
    "type|result_type|can_cast|promote_types|is_(floating_point|complex|signed|cuda|cpu|meta|mps|xpu)"
)
# Calls that return a number that depends on sizes.
_INTS = frozenset(("numel", "nelement", "__len__"))
_CHECKED = re.compile(
    "is_(contiguous|same_size|leaf|sparse|sparse_csr|quantized|nested|mkldnn|inference|conj|neg)|layout"
)
# Calls whose results depend on values of tensors. The program makes the same calls as the function.
_VERDICTS = frozenset(("__bool__", "__contains__", "is_nonzero", "equal", "allclose"))
# Calls that return ordinary numbers. (`item` returns a traced number.)
_NUMBERS = frozenset(("__int__", "__float__", "__index__", "tolist"))
_READS = _VERDICTS | _NUMBERS | {"item"}


def _place() -> str:
    """Returns the running line of the user's code, outside PyTorch and this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Trace(Indexing, TorchFunctionMode):
    """Records one call. `inputs`: its tensors and ints, and containers of these.

    `hashes`: whether sizes may be keys of a cache. If true, the program is valid only for the
    hashed sizes. If false, hashing a size raises TypeError, as for ``torch.SymInt``, and einops
    uses no cache. `numbers`: the list to which the trace adds its numbers.
    """

    def __init__(
        self, inputs: Sequence[Any], hashes: bool, numbers: list[weakref.ref[Any]]
    ) -> None:
        super().__init__()
        self._hashes = hashes
        self._numbers = numbers
        self.has_hashed = False
        self.lines: list[Line] = []
        self.constants: dict[str, Any] = {}
        self.why: Reason | None = None  # why there is no program
        self._recording = True
        self._names: dict[int, str] = {}  # maps a tensor's id to the tensor's variable
        self._held: list[Any] = []  # values that are kept alive, so that ids stay unique
        self._origins = Origins(self._expression)
        self._own: set[str] = set()  # variables whose memory the call has allocated
        self._counts = {"r": 0, "s": 0}
        self._grad = torch.is_grad_enabled()
        self._context = context()
        self.has_effects = False
        self.reads_floats = False
        self._may_be_copies = False  # whether sizes determine which tensors share memory
        self.inputs = [f"x{i}" for i in range(len(inputs))]
        self._int_inputs = [f"x{i}" for i, value in enumerate(inputs) if isinstance(value, int)]
        self._values = inputs
        self._changes = Changes((), ())
        for name, value in zip(self.inputs, inputs, strict=True):
            if isinstance(value, Tensor):
                self._bind(value, name, is_own=False)

    def watch(self, containers: Iterable[int]) -> None:
        """Starts to record changes of the inputs with the indices `containers`."""
        found = [(self._values[i], self.inputs[i]) for i in containers]
        self._changes = Changes([value for value, _ in found], [name for _, name in found])

    def make_plain(self) -> None:
        self._changes.make_plain()

    def undo_changes(self) -> None:
        self._changes.undo()
        self.make_plain()

    def refuse(self, why: str) -> None:
        """Ends the trace without a program."""
        self.why = self.why or Reason(why, _place())
        _C.trace_conversions(None)
        self.make_plain()

    # --- Recorder ---

    def is_recording(self) -> bool:
        return self._recording

    def refuses_hashes(self) -> bool:
        self.has_hashed = self.has_hashed or self._recording
        return self._recording and not self._hashes

    def add_number(self, value: float, source: str) -> Any:
        name = self._new("s")
        self.lines.append(Line(name, source, is_number=True))
        return traced(value, self, name)

    def note(self, number: Any) -> None:
        self._numbers.append(weakref.ref(number))

    def note_error(self, error: Exception) -> None:
        """Refuses the program: the function may catch an error that other calls don't raise."""
        self.why = self.why or Reason(f"it catches {type(error).__name__}", _place())

    def add_guard(self, condition: str) -> None:
        self.lines.append(Line("", condition, place=_place()))

    # --- Calls ---

    def __enter__(self) -> Trace:
        super().__enter__()  # type: ignore[no-untyped-call]
        _C.trace_conversions(self._convert)
        return self

    def _convert(self, kind: type, value: Any) -> Any:
        """Called instead of ``int(value)`` and ``float(value)``."""
        if not self._recording or self.why:
            return NotImplemented
        if isinstance(value, Tensor) and value.dtype is not torch.bool and _C.is_known(value):
            value = value.item()
        return converted(kind, value) if is_traced(value) else NotImplemented

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if torch._C._functorch.peek_interpreter_stack() is not None and not self.why:
            self.why = Reason("a transform (vmap, grad) runs in it", _place())
        if not self._recording or self.why:
            return func(*plain(tuple(args)), **plain(kwargs))
        if name in ("size", "__get__shape"):
            return self._size(args[0], *args[1:], **kwargs)
        # Checked before the read, because the read may switch to another fiber. A program with this
        # read would split batches.
        if name in _READS and not all(map(_C.is_known, tensors_among(args))):
            self.refuse(reads_values(name))
        try:
            result = func(*plain(tuple(args)), **plain(kwargs))
        except Exception as error:
            self.note_error(error)
            raise
        try:
            if name == "__getitem__":
                func, name, args = self._index(func, *args)
            return self._record(func, name, tuple(args), kwargs, result)
        except UntraceableError as reason:
            self.why = Reason(str(reason), _place())
        except Exception:  # for example, for keyword arguments
            self.why = Reason(f"it calls {name} in a way that is not traced", _place())
        return result

    def _record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        if name == "_set_grad_enabled":
            self._grad = bool(args[0])
            self._add_call(func, name, args, kwargs)
            return result
        if torch.is_grad_enabled() != self._grad:
            raise UntraceableError("an autograd.Function runs in it")
        if context() != self._context:
            raise UntraceableError(f"it enters autocast or another mode (at {name})")
        if name == "register_hook":
            make_closure_plain(args[1])
            raise UntraceableError("it registers a hook")
        if name.startswith("__set__") or name == "requires_grad_":
            raise UntraceableError(f"it sets {name.removeprefix('__set__')} of a tensor")
        if changes_shape(name):
            raise UntraceableError(f"it changes the shape of a tensor in place ({name})")
        if may_write(func):
            raise UntraceableError(f"it calls an op that writes to a tensor ({name})")
        if name == "__get__grad":
            raise UntraceableError("it reads .grad")
        if name == "contiguous" or "memory_format" in kwargs:
            self._ask_layout(args, kwargs)
        if not has_tensors(result):
            return self._fact(func, name, args, kwargs, result)
        if args and result is args[0] and gives_its_argument(name, args, kwargs):
            return result
        target = self._add_call(func, name, args, kwargs)
        self._origins.add(target, name, args, kwargs, result)
        if name == "squeeze":
            ask_ones(self._size, args, kwargs)
        elif type(result) in (tuple, list) and not ask_count(
            self._size, name, args, kwargs, len(result)
        ):
            self.add_guard(f"len({target}) == {len(result)}")
        is_fresh = makes_memory(name, args)
        if isinstance(result, Tensor):
            self._bind(result, target, is_fresh or self._owns_all(args))
        else:
            self._bind_items(result, target, is_fresh, self._owns_all(args))
        return result

    def _ask_layout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds a condition on the strides: they decide whether the call makes a copy."""
        if kwargs.get("memory_format", torch.contiguous_format) is not torch.contiguous_format:
            raise UntraceableError("it requests a memory format that is not contiguous_format")
        if self.has_effects and self._owns_all(args[:1]):
            # After side effects, a condition is not possible, because the function can't run again.
            # Without writes, it does not matter whether the result is a copy.
            self._may_be_copies = True
            return
        is_dense = args[0].is_contiguous()
        self.add_guard(f"{self._expression(args[0])}.is_contiguous() is {is_dense}")

    def _fact(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Records a call that returns no tensor. Returns the result that the function receives."""
        if name == "__setitem__":
            return self._put(*args)
        if name == "_assert" and type(args[0]) is bool:  # a test of sizes is already a condition
            return result
        if name == "item" and type(result) in (int, float):
            target = self._add_call(func, name, args, kwargs)
            self.reads_floats = self.reads_floats or isinstance(result, float)
            return traced(result, self, target)
        if name in _INTS or (name == "stride" and isinstance(result, int)):
            return self.add_number(result, self._call(func, name, args, kwargs))
        if name == "stride":
            source = self._call(func, name, args, kwargs)
            return tuple(self.add_number(n, f"{source}[{d}]") for d, n in enumerate(result))
        if _CHECKED.fullmatch(name.removeprefix("__get__")):
            self.add_guard(f"{self._call(func, name, args, kwargs)} is {self._expression(result)}")
            return result
        if name in _VERDICTS or name in _NUMBERS:
            call = self._call(func, name, args, kwargs)
            condition = f"{call} is {result!r}"
            if name in _NUMBERS:  # results are compared as text, because -0.0 == 0.0
                condition = f"repr({call}) == {repr(result)!r}"
            self.lines.append(Line("", condition, place=_place(), reads=True))
            return result
        if _OF_KINDS.fullmatch(name.removeprefix("__get__")):
            return result
        raise UntraceableError(reads_values(name))

    def _add_call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        writes = ""
        self.has_effects = self.has_effects or keeps_statistics(name, args, kwargs)
        if is_in_place(name, kwargs):
            written = args[0] if kwargs.get("out") is None else kwargs["out"]
            if self._may_be_copies:
                raise UntraceableError(f"it writes to a tensor ({name}) after contiguous()")
            if not isinstance(written, Tensor):
                raise UntraceableError(f"{name} writes to several tensors")
            self.has_effects = self.has_effects or not self._owns_all([written])
            writes = self._expression(written)
        target = self._new("r")
        source = self._call(func, name, args, kwargs)
        keeps = bool(writes) and keeps_type(name, args, kwargs)
        fresh, selects = makes_memory(name, args), selects_by_values(name, args)
        random = draws(name, args, kwargs)
        self.lines.append(Line(target, source, False, name, writes, keeps, fresh, random, selects))
        return target

    def _size(self, tensor: Tensor, dim: int | None = None) -> Any:
        if dim is None:
            return TracedShape(self._size(tensor, d) for d in range(tensor.dim()))
        dim = int(dim)
        size = tensor.shape[dim]  # for a wrong `dim`, raises the same error as the call
        variable = self._expression(tensor)
        if variable[0] == "k":  # the tensor is a constant, whose sizes are guarded
            return size
        found = self._origins.find(Size(variable, dim % tensor.dim(), size))
        if isinstance(found, Size):
            number = self.add_number(size, f"{found.variable}.size({found.dim})")
            self._origins.set(found, number)
            return number
        return found

    # --- Names ---

    def _new(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind]}"

    def _bind(self, value: Tensor, name: str, is_own: bool) -> None:
        if id(value) in self._names:  # an op was in-place or returned its argument
            return
        self._names[id(value)] = name
        self._held.append(value)
        if is_own:
            self._own.add(name)

    def _bind_items(self, values: Sequence[Any], name: str, is_fresh: bool, is_own: bool) -> None:
        """Makes a variable for each item of a call's result."""
        for i, value in enumerate(values):
            if not isinstance(value, (Tensor, tuple, list)):
                continue
            target = self._new("r")
            source = f"{self._constant(operator.getitem)}({name}, {i})"
            self.lines.append(Line(target, source, name="__getitem__", fresh=is_fresh))
            if isinstance(value, Tensor):
                self._bind(value, target, is_fresh or is_own)
            else:
                self._bind_items(value, target, is_fresh, is_own)

    def _owns_all(self, values: Iterable[Any]) -> bool:
        return all(variable in self._own for variable in self._tensors_in(values))

    def _tensors_in(self, values: Iterable[Any]) -> Iterator[str]:
        for value in values:
            if isinstance(value, Tensor):
                yield self._names.get(id(value), "")
            elif isinstance(value, (tuple, list)):
                yield from self._tensors_in(value)
            elif isinstance(value, dict):
                yield from self._tensors_in(value.values())

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if name.startswith("__get__"):
            return f"{self._expression(args[0])}.{name.removeprefix('__get__')}"
        named = (f"{key}={self._expression(value)}" for key, value in kwargs.items())
        return f"{self._constant(func)}({', '.join((*map(self._expression, args), *named))})"

    def _expression(self, value: Any) -> str:
        """Returns Python source for an argument."""
        if is_traced(value):
            return source_of(value)
        if isinstance(value, Tensor):
            return self._names.get(id(value)) or self._constant(value)
        kind = type(value)
        if kind in (tuple, list, dict, torch.Size, TracedShape):
            return structure_of(value, self._expression)
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._expression(part) for part in parts)})"
        if kind is str:
            return quoted(value)
        if value is None or value is Ellipsis or kind in _LITERALS:
            return repr(value)
        if kind is float and math.isfinite(value):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        for name, known in self.constants.items():
            if are_the_same(known, value):
                return name
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    # --- The program ---

    def stop(self) -> None:
        """Ends the recording. After this, traced numbers behave like ordinary numbers."""
        self._recording = False
        self._origins.clear()  # its numbers refer to this trace
        _C.trace_conversions(None)

    def finish(self, result: Any) -> Program | None:
        """Returns the program. If there is none, returns None, and `why` gives the reason."""
        self.stop()
        try:
            return None if self.why else self._program(result)
        except UntraceableError as reason:
            self.why = Reason(str(reason), "")
            return None
        finally:
            self._held.clear()
            self._names.clear()

    def _program(self, result: Any) -> Program:
        made = ReturnedValue(self._changes, self._expression, self._constant)
        returned = made.source(result)
        lines, returned = optimized(self.lines, returned, self._own, self._constant)
        of_inputs = names_of_inputs(lines)
        may_go_first = [
            line.variables() <= of_inputs and not line.is_call and not line.reads for line in lines
        ]
        first = [line for line, may_go in zip(lines, may_go_first, strict=True) if may_go]
        rest = [line for line, may_go in zip(lines, may_go_first, strict=True) if not may_go]
        if self.has_effects and any(line.is_condition for line in rest):
            raise UntraceableError("it writes to a tensor before it reads the size of a result")
        may_draw_again = asks_after_draws(rest)
        if may_draw_again and any(map(draws_elsewhere, self.constants.values())):
            raise UntraceableError("it draws random numbers before it reads the size of a result")
        return Program(
            inputs=tuple(self.inputs),
            int_inputs=tuple(self._int_inputs),
            containers=tuple(self._changes.names),
            lines=(*first, *rest),
            returned=returned,
            constants=self.constants,
            has_effects=self.has_effects,
            asks_after_draws=may_draw_again,
            reads_floats=self.reads_floats,
            made=[value for value in made.objects if not holds_tensors(value)],
        )
