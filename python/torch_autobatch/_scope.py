"""The context manager: what a user types."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

import torch
from torch.utils._contextlib import _wrap_generator

from torch_autobatch import _C, _blocks, _suspension
from torch_autobatch._gradients import end_block
from torch_autobatch._leave_to_python import leave_to_python
from torch_autobatch._options import (
    check_choice,
    check_count,
    check_decorated,
    check_results,
    check_truths,
    is_descriptor,
)
from torch_autobatch._report import Report

_P = ParamSpec("_P")
_R = TypeVar("_R")


Policy = Literal["auto", "agenda", "depth", "frontier"]
Granularity = Literal["auto", "cell", "op"]


class Options(TypedDict, total=False):
    """Those of ``batch`` beside the policy."""

    enabled: bool
    max_pending: int | None
    verify: bool
    granularity: Granularity
    check_cells: bool
    defer_checks: bool | None
    adaptive: bool | None
    profile: bool


_POLICIES = tuple(_C.policy_names())
_GRANULARITIES = ("auto", "cell", "op")
_STANDARD = (True, "auto", None, False, "auto", False, None, None, False)  # enabled, then options
ADAPTIVE = True  # where batch() is not told
# PyTorch 2.15 wants the name of what wraps as well.
_NAME = ("batch",) * ("ctx_name" in inspect.signature(_wrap_generator).parameters)


def _check(enabled: object, options: dict[str, Any]) -> None:
    """Raises ``TypeError`` or ``ValueError`` for what ``batch`` does not take."""
    check_choice("batch", "policy", options["policy"], _POLICIES)
    check_choice("batch", "granularity", options["granularity"], _GRANULARITIES)
    check_count("batch", "max_pending", options["max_pending"])
    may_be_none = ("defer_checks", "adaptive")
    truths = {name: options[name] for name in ("verify", "check_cells", "profile", *may_be_none)}
    check_truths("batch", {"enabled": enabled, **truths}, or_none=may_be_none)


class _Called(type):
    """What a class can't say itself: that ``with batch:`` lacks its parentheses."""

    def __enter__(cls) -> NoReturn:
        raise TypeError("write `with batch():`, with parentheses")

    def __exit__(cls, *_: object) -> None: ...


class batch(metaclass=_Called):  # noqa: N801  (used as a function, as torch.no_grad is)
    """Captures the ops of a block and runs them batched across instances.

    Works as a context manager and as a decorator, with and without parentheses. A block opened
    inside another one, on the same thread, joins it: everything runs when the outer one ends, as
    the outer one's options say (a ``RuntimeWarning`` names those of the inner one that have no
    effect); but with ``enabled=False`` its ops run at once. A block may not be open across an
    ``await`` or a ``yield``; of a generator that it decorates it is open between yields.

    Args:
        policy: how nodes are ordered into batches, one of ``policy_names()``: "agenda" (Neubig,
            Goldberg, Dyer 2017, section 3), "depth", "frontier" (after Chen et al. 2023, section
            2.3), or "auto": the one with the fewest batches for graphs like this one.
        enabled: False makes the block plain eager code, inside another block too; ``eager()`` is
            short for it.
        max_pending: run what is captured whenever this many ops are pending, to bound memory.
        verify: run every captured op eagerly too, and raise on the first result that differs.
            Slow; for finding mistakes.
        granularity: "cell" captures a call of a ``cell()`` as a whole, "op" op by op, as if it were
            an ordinary function. "auto" is "cell".
        check_cells: run every cell's function at each call and raise if it captures other ops than
            at the first call of the kind: its promise is broken. Slow; for finding mistakes.
        defer_checks: which checks of values may wait, ``if not valid.all(): raise ...``, ``assert
            (x > 0).all()``, rather than be a read: the next flush looks, and raises the error.
            None: those of PyTorch's own code (``torch.distributions``, ``torch._assert``). True:
            those of all code. False: none. Where something between the check and the block may
            catch the error, the value is read at once.
        adaptive: run ops at once where deferring them does not pay: in a loop that reads values
            (``map`` batches across instances), in blocks of one instance; and whole blocks where
            eager is measured to be faster. The report says where. None: True. False: defer always.
        profile: record when each batch ran, what it made, and what read what, for the times in
            ``report()`` and for ``report().save("batches.html")``. Costs a few percent.

    Raises:
        ValueError: if ``policy`` or ``granularity`` is not known.
        TypeError: if an argument is of another type, or it decorates an ``async def``, a class or
            a module.
        RuntimeError: if the body of the ``with`` awaits or yields.

    If a captured op fails when it runs, the error is raised at the end of the block (or where a
    value is first read), names the op, its shapes and the line that captured it, and what was
    computed before it stays usable.
    """

    _enabled: bool
    _options: dict[str, Any]  # all others, as they were given
    _eager_before: list[bool | None]  # of blocks inside others
    _open: list[_C.Scope | None]
    _last: _C.Scope | None
    _roots: list[torch.Tensor]
    _gradients: list[torch.Tensor | None]
    _stretches: "_blocks.Stretches | None"  # of the generator that it is a part of

    # No `__init__`: as a decorator without parentheses it makes a function and no block.
    @overload
    def __new__(cls, function: Callable[_P, _R], /) -> Callable[_P, _R]: ...  # type: ignore[misc]
    @overload
    def __new__(cls, policy: Policy = "auto", **options: Unpack[Options]) -> Self: ...
    def __new__(
        cls,
        policy: Policy | Callable[..., Any] = "auto",
        *,
        enabled: bool = True,
        max_pending: int | None = None,
        verify: bool = False,
        granularity: Granularity = "auto",
        check_cells: bool = False,
        defer_checks: bool | None = None,
        adaptive: bool | None = None,
        profile: bool = False,
    ) -> Any:
        function: Any = policy if callable(policy) or is_descriptor(policy) else None
        if function is not None:
            policy = "auto"
        options = {
            "policy": policy,
            "max_pending": max_pending,
            "verify": verify,
            "granularity": granularity,
            "check_cells": check_cells,
            "defer_checks": defer_checks,
            "adaptive": adaptive,
            "profile": profile,
        }
        if (enabled, *options.values()) != _STANDARD:  # for a block may be of few ops
            _check(enabled, options)
        self = cls._made(enabled, options)
        return self if function is None else self(function)

    @classmethod
    def _made(cls, enabled: bool, options: dict[str, Any]) -> Self:
        """One of options that have been checked."""
        self = super().__new__(cls)
        self._enabled = enabled
        self._options = options
        self._eager_before = []
        self._open = []
        self._last = None
        self._roots = []
        self._gradients = []
        self._stretches = None
        return self

    def __enter__(self) -> "batch":
        is_inner = _C.is_open()
        if self._enabled or is_inner:
            _suspension.check(sys._getframe(1), "batch()")
        scope = None
        if self._enabled:
            options = self._options
            scope = _C.open_block(
                options["policy"],
                options["max_pending"] or 0,
                options["verify"],
                options["granularity"] != "op",
                options["check_cells"],
                options["defer_checks"],
                ADAPTIVE if options["adaptive"] is None else options["adaptive"],
                options["profile"] or _blocks.profile_all,
            )
            if is_inner:
                _blocks.warn_of_options(scope.options, options)
        self._eager_before.append(_C.set_eager(not self._enabled) if is_inner else None)
        self._open.append(scope)
        self._last = scope
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope = self._open[-1]
        eager_before = self._eager_before.pop()
        if eager_before is not None:
            _C.set_eager(eager_before)
        if scope is not None:
            scope.close_block()
        self._open.pop()
        roots, gradients = self._roots, self._gradients
        if not self._open:  # gone even if the block fails
            self._roots, self._gradients = [], []
            end_block()
        if scope is not None:
            if error is not None and not isinstance(error, Exception):
                scope.drop_checks()  # Ctrl-C and the like go before what a check may say
            try:
                scope.exit(discard_errors=error is not None)
            except Exception as failed:
                if failed is not error:  # else it is on its way already
                    raise
            finally:
                if eager_before is None:
                    _blocks.has_ended(scope.report(), self._stretches)
        if not self._open and roots and error is None:
            torch.autograd.backward(roots, gradients)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        opener = "batch" if self._enabled else "eager"
        check_decorated(opener, function)
        if inspect.isgeneratorfunction(function):
            wrapped: Callable[_P, _R] = self._of_generator(function)
            return wrapped

        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._fresh():
                result = function(*args, **kwargs)
            check_results(opener, function, result)
            return result

        leave_to_python(wrapper)
        return wrapper

    def _runs_eagerly(self, function: Callable[..., Any]) -> bool:
        """Of the block of a map, once it is open: whether a loop over instances is faster."""
        scope = self._open[-1]
        return ADAPTIVE and scope is not None and scope.begin_map(function)

    def _of_generator(self, function: Callable[_P, Any]) -> Any:
        """The same function, with a block around its code between yields; one report of all."""

        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            stretches = _blocks.Stretches()
            generator = _wrap_generator(lambda: self._fresh(stretches), function, *_NAME)  # type: ignore[no-untyped-call]
            return (yield from generator(*args, **kwargs))

        return wrapped

    def _fresh(self, stretches: "_blocks.Stretches | None" = None) -> "batch":
        """Another one with the same options."""
        fresh = self._made(self._enabled, self._options)
        fresh._stretches = stretches
        return fresh

    def flush(self) -> None:
        """Runs everything captured so far; pending tensors become ordinary ones."""
        if self._open and self._open[-1] is not None:
            self._open[-1].flush()

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        gradient: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Records roots; all of them run as one batched backward when the block ends.

        What ``loss.backward()`` in a loop over instances would do, without giving up batching.

        Args:
            tensors: one root, or several.
            gradient: of each root; may be None for a scalar.
        """
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if gradient is None or isinstance(gradient, torch.Tensor):
            gradients: list[torch.Tensor | None] = [gradient] * len(roots)
        else:
            gradients = list(gradient)
        if len(gradients) != len(roots):
            raise ValueError(
                f"scope.backward(): {len(roots)} tensors but {len(gradients)} gradients"
            )
        for root, grad in zip(roots, gradients, strict=True):
            if grad is None and root.numel() != 1:
                raise RuntimeError(
                    "grad can be implicitly created only for scalar outputs, but scope.backward() "
                    f"got a root of shape {list(root.shape)} without a gradient"
                )
        if not self._open:
            torch.autograd.backward(roots, gradients)
            return
        self._roots += roots
        self._gradients += gradients

    def report(self) -> Report:
        """What was captured and how it ran, so far; print it.

        Empty if ``enabled`` is False.
        """
        if self._last is None:
            return Report(is_enabled=self._enabled)
        return _blocks.report_of(self._last.report())

    def __repr__(self) -> str:
        options = {**self._options, "enabled": self._enabled}
        standard = inspect.signature(batch).parameters
        given = [f"{k}={v!r}" for k, v in options.items() if v != standard[k].default]
        return f"batch({', '.join(given)})"


@overload
def eager() -> batch: ...
@overload
def eager(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...
def eager(function: Callable[_P, _R] | None = None, /) -> Any:
    """``batch(enabled=False)``: inside a block, the ops of this one run at once.

    Works as a context manager and as a decorator, that with and without parentheses. Tensors that
    the block has captured and that its ops read are computed first.
    """
    block = batch(enabled=False)
    return block if function is None else block(function)
