"""Sizes in the trace of a dynamic cell: numbers that record how they were computed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

_ARITHMETIC = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "truediv": "/",
    "mod": "%",
    "pow": "**",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
# A program can call these functions.
ROUNDING: dict[str, Callable[..., Any]] = {
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Recorder(Protocol):
    """The part of a trace that traced numbers use."""

    def is_recording(self) -> bool: ...
    def refuses_hashes(self) -> bool: ...
    def add_number(self, value: float, source: str) -> Any: ...
    def add_guard(self, condition: str) -> None: ...
    def note(self, number: Any) -> None: ...
    def note_error(self, error: Exception) -> None: ...


class _Node:
    """The node of a traced number, with the methods that C++ calls on a ``torch.SymInt``'s node."""

    def __init__(self, value: float) -> None:
        self._value = value

    def is_int(self) -> bool:
        return isinstance(self._value, int)

    def is_float(self) -> bool:
        return isinstance(self._value, float)

    def is_bool(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def nested_int(self) -> None:
        return None

    def is_nested_int(self) -> bool:
        return False

    def _get(self, *_: Any) -> Any:
        return self._value

    int_ = maybe_as_int = constant_int = guard_int = guard_float = guard_size_oblivious = _get
    maybe_as_float = _get


class _Traced:
    """A number in a traced call. `name` is its variable in the program.

    Arithmetic gives another traced number. A use that needs the value (a comparison, ``range``, a
    dict key) adds a condition: the program is valid only for sizes that satisfy the condition.
    For ``isinstance``, a traced number is an int or float. C code does not recognize it as an int
    or float, and therefore calls its methods.
    """

    def __init__(self, value: float, recorder: Recorder, name: str) -> None:
        self.value = value
        self.recorder = recorder
        self.name = name

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def _is_fixed(self) -> Any:
        """Returns the value for a use that is not traced. The program then requires this value."""
        if self.recorder.is_recording():
            self.recorder.add_guard(f"{self.name} == {self.value!r}")
        return self.value

    def _compare(self, value: bool, source: str) -> bool:
        if self.recorder.is_recording():
            self.recorder.add_guard(source if value else f"not ({source})")
        return value

    def _evaluate(self, compute: Callable[..., Any], *values: Any) -> Any:
        """Computes a number. If this raises an error, refuses the program.

        The reason is that the error depends on values.
        """
        try:
            return compute(*values)
        except Exception as error:
            if self.recorder.is_recording():
                self.recorder.note_error(error)
            raise

    def _compute(self, value: float, source: str) -> Any:
        return self.recorder.add_number(value, source) if self.recorder.is_recording() else value

    def __neg__(self) -> Any:
        return self._compute(-self.value, f"-{self.name}")

    def __invert__(self) -> Any:
        return self._compute(~self.value, f"~{self.name}")  # type: ignore[operator]

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self  # type: ignore[operator]

    def __divmod__(self, other: Any) -> Any:
        return (self // other, self % other)

    def __rdivmod__(self, other: Any) -> Any:
        return (other // self, other % self)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np  # numpy is installed, because only numpy calls this method

        return np.asarray(self._is_fixed(), *args, **kwargs)

    def is_integer(self) -> bool:
        return self._compare(float(self.value).is_integer(), f"float({self.name}).is_integer()")

    def __bool__(self) -> bool:
        return self._compare(bool(self.value), f"{self.name} != 0")

    def __index__(self) -> int:
        return operator.index(self._is_fixed())

    def __int__(self) -> int:
        return int(self._is_fixed())

    def __float__(self) -> float:
        return float(self._is_fixed())

    def __hash__(self) -> int:
        if self.recorder.refuses_hashes():
            raise TypeError("unhashable type: a size of a dynamic cell")
        return hash(self._is_fixed())

    def __repr__(self) -> str:
        return repr(self._is_fixed())

    def __format__(self, spec: str) -> str:
        return format(self._is_fixed(), spec)

    @property
    def node(self) -> _Node:
        return _Node(self._is_fixed())

    def __getattr__(self, name: str) -> Any:  # for methods such as `bit_length`
        if name.startswith("_") or not hasattr(self.value, name):
            raise AttributeError(name)
        return getattr(self._is_fixed(), name)

    def __reduce__(self) -> Any:
        return (type(self.value), (self._is_fixed(),))


# PyTorch's bindings accept subclasses of SymInt and SymFloat as numbers.
class TracedInt(_Traced, torch.SymInt):
    pass


class TracedFloat(_Traced, torch.SymFloat):
    pass


def traced(value: float, recorder: Recorder, name: str) -> Any:
    kind = TracedFloat if isinstance(value, float) else TracedInt
    number = kind(value, recorder, name)
    recorder.note(number)
    return number


def is_traced(value: Any) -> bool:
    return type(value) is TracedInt or type(value) is TracedFloat


def converted(kind: type, number: Any) -> Any:
    """Returns ``int(number)`` or ``float(number)`` as a traced number."""
    if isinstance(number, kind):
        return number
    return number._compute(number._evaluate(kind, number.value), f"{kind.__name__}({number.name})")


def source_of(value: Any) -> str:
    if is_traced(value):
        return str(value.name)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return f"({value!r})"  # a power has a higher precedence than a sign


def _plain_number(value: Any) -> Any:
    return value.value if is_traced(value) else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool, TracedInt, TracedFloat)


def _arithmetic(name: str, symbol: str, reflected: bool) -> Callable[[_Traced, Any], Any]:
    compute: Callable[[Any, Any], Any] = getattr(operator, name)

    def method(self: _Traced, other: Any, *modulus: Any) -> Any:
        if modulus:  # for `pow(n, 2, 5)`
            return pow(self._is_fixed(), *map(_plain_number, (other, *modulus)))
        if not _is_number(other):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        value = self._evaluate(compute, _plain_number(left), _plain_number(right))
        return self._compute(value, f"{source_of(left)} {symbol} {source_of(right)}")

    return method


def _comparison(name: str, symbol: str) -> Callable[[_Traced, Any], Any]:
    compute: Callable[[Any, Any], bool] = getattr(operator, name)

    def method(self: _Traced, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        value = compute(self.value, _plain_number(other))
        if is_traced(other) and other.name == self.name:
            return value
        return self._compare(value, f"{self.name} {symbol} {source_of(other)}")

    return method


for _name, _symbol in _ARITHMETIC.items():
    _method = _name.rstrip("_")
    setattr(_Traced, f"__{_method}__", _arithmetic(_name, _symbol, reflected=False))
    setattr(_Traced, f"__r{_method}__", _arithmetic(_name, _symbol, reflected=True))


def _rounding(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Traced, *digits: Any) -> Any:
        if digits:  # for `round(x, 2)`
            return compute(self._is_fixed(), *map(_plain_number, digits))
        return self._compute(self._evaluate(compute, self.value), f"{name}({self.name})")

    return method


for _name, _compute in ROUNDING.items():
    setattr(_Traced, f"__{_name}__", _rounding(_name, _compute))
for _name, _symbol in _COMPARISONS.items():
    setattr(_Traced, f"__{_name}__", _comparison(_name, _symbol))


class TracedShape(tuple[Any, ...]):
    """A shape that consists of traced numbers. For ``isinstance``, it is a ``torch.Size``."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Size

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return TracedShape(item) if isinstance(index, slice) else item

    def __add__(self, other: Iterable[Any]) -> Any:
        return TracedShape((*self, *other))

    def __radd__(self, other: Iterable[Any]) -> Any:
        return TracedShape((*other, *self))

    def __reduce__(self) -> Any:
        return (torch.Size, (plain(list(self)),))

    def numel(self) -> Any:
        product: Any = 1
        for size in self:
            product = size * product
        return product


def plain(value: Any) -> Any:
    """Returns the value with traced numbers converted to ordinary numbers, for calls of PyTorch."""
    kind = type(value)
    if is_traced(value):
        return value.value
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    if kind is dict:
        return {key: plain(item) for key, item in value.items()}
    if kind is tuple or kind is list:
        return kind(plain(item) for item in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(plain(item) for item in value))
    return torch.Size(plain(item) for item in value) if kind is TracedShape else value
