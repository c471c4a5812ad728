"""The public context managers and decorators ``batch`` and ``eager``."""

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
    """The options of ``batch`` other than the policy."""

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
# The default of `enabled`, then the defaults of all other options in the order of `options`.
_STANDARD = (True, "auto", None, False, "auto", False, None, None, False)
ADAPTIVE = True  # the meaning of batch(adaptive=None)
# PyTorch 2.15 has a further parameter: the name of the context manager.
_NAME = ("batch",) * ("ctx_name" in inspect.signature(_wrap_generator).parameters)


def _check(enabled: object, options: dict[str, Any]) -> None:
    """Raises ``TypeError`` or ``ValueError`` for a wrong argument of ``batch``."""
    check_choice("batch", "policy", options["policy"], _POLICIES)
    check_choice("batch", "granularity", options["granularity"], _GRANULARITIES)
    check_count("batch", "max_pending", options["max_pending"])
    may_be_none = ("defer_checks", "adaptive")
    truths = {name: options[name] for name in ("verify", "check_cells", "profile", *may_be_none)}
    check_truths("batch", {"enabled": enabled, **truths}, or_none=may_be_none)


class _Called(type):
    """Metaclass that rejects ``with batch:`` without parentheses."""

    def __enter__(cls) -> NoReturn:
        raise TypeError("write `with batch():`, with parentheses")

    def __exit__(cls, *_: object) -> None: ...


class batch(metaclass=_Called):  # noqa: N801  (used as a function, as torch.no_grad is)
    """Captures the ops of a block and runs them batched across instances.

    Works as a context manager, and as a decorator with and without parentheses. A block inside
    another block of the same thread joins the outer block: all ops run when the outer block ends,
    with the options of the outer block. A ``RuntimeWarning`` names options of the inner block that
    have no effect. The exception is ``enabled=False``, which makes the ops of the inner block run
    eagerly. A block must not stay open across an ``await`` or a ``yield``. In a decorated
    generator, the block closes at each ``yield`` and opens again after it.

    Args:
        policy: how nodes are ordered into batches, one of ``policy_names()``: "agenda" (Neubig,
            Goldberg, Dyer 2017, section 3), "depth", "frontier" (after Chen et al. 2023, section
            2.3), or "auto": the policy with the fewest batches for similar graphs.
        enabled: False runs the block eagerly, even inside another block. ``eager()`` is short for
            ``batch(enabled=False)``.
        max_pending: flush whenever this many ops are pending, to bound memory.
        verify: also run every captured op eagerly, and raise an error at the first result that
            differs. This is slow, and meant for debugging.
        granularity: "cell" captures a call of a ``cell()`` as a whole, "op" captures its ops one by
            one, like the ops of an ordinary function. "auto" means "cell".
        check_cells: run the function of a cell at each call, and raise an error if it does not
            capture the same ops as the first call of its kind, as the contract of ``cell()``
            requires. This is slow, and meant for debugging.
        defer_checks: which checks of values are deferred (``if not valid.all(): raise ...``,
            ``assert (x > 0).all()``) instead of reading the value immediately. The next flush tests
            the value and raises the error. None: checks in PyTorch's own code
            (``torch.distributions``, ``torch._assert``). True: checks in all code. False: none. If
            code between the check and the block may catch the error, the value is read immediately.
        adaptive: run ops eagerly if deferring costs more than it saves: in a loop that reads values
            (use ``map`` to batch such a loop across instances), in blocks of one instance, and in
            blocks for which measurements showed that eager execution is faster. The report names
            the places. None: the same as True. False: always defer.
        profile: record the times of each batch, its results and its inputs, for the times in
            ``report()`` and for ``report().save("batches.html")``. A block then takes a few percent
            more time.

    Raises:
        ValueError: if ``policy`` or ``granularity`` is not known, or ``max_pending`` is less than
            1.
        TypeError: if an argument has a wrong type, or if an ``async def``, a class or a module is
            decorated.
        RuntimeError: if the body of the ``with`` awaits or yields.

    If a captured op fails when it runs, the error is raised at the end of the block, or at the read
    that causes the flush. The error names the op, its shapes and the line that captured the op.
    Values that were computed before the error can still be used.
    """

    _enabled: bool
    _options: dict[str, Any]  # all options except `enabled`, as the user gave them
    # For each nested entry: whether ops ran eagerly before the entry. None for an outermost block.
    _eager_before: list[bool | None]
    _open: list[_C.Scope | None]
    _last: _C.Scope | None
    _roots: list[torch.Tensor]
    _gradients: list[torch.Tensor | None]
    _stretches: "_blocks.Stretches | None"  # blocks of the same decorated generator's call

    # There is no `__init__`, because a decorator without parentheses returns a function and not a
    # block.
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
        # Default options are not checked, because the cost of a check matters in blocks of few ops.
        if (enabled, *options.values()) != _STANDARD:
            _check(enabled, options)
        self = cls._made(enabled, options)
        return self if function is None else self(function)

    @classmethod
    def _made(cls, enabled: bool, options: dict[str, Any]) -> Self:
        """Makes a block from options that are already checked."""
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
                try:
                    _blocks.warn_of_options(scope.options, options)
                except BaseException:  # the program turns warnings into errors
                    scope.exit(discard_errors=True)
                    raise
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
        if scope is not None:
            scope.check_thread()
        self._open.pop()
        eager_before = self._eager_before.pop()
        if eager_before is not None:
            _C.set_eager(eager_before)
        roots, gradients = self._roots, self._gradients
        if not self._open:
            self._roots, self._gradients = [], []
        if eager_before is None:  # the outermost block ended, with or without an error
            end_block()
        if scope is not None:
            if error is not None and not isinstance(error, Exception):
                # Exceptions such as KeyboardInterrupt take precedence over errors of deferred
                # checks.
                scope.drop_checks()
            try:
                scope.exit(discard_errors=error is not None)
            except Exception as failed:
                if failed is not error:  # Python raises `error` itself again
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
        """Whether the instances of a map run as a plain loop. Called in the open block."""
        scope = self._open[-1]
        return ADAPTIVE and scope is not None and scope.begin_map(function)

    def _of_generator(self, function: Callable[_P, Any]) -> Any:
        """Wraps a generator function: a block around its code between yields, and one report."""

        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            stretches = _blocks.Stretches()
            generator = _wrap_generator(lambda: self._fresh(stretches), function, *_NAME)  # type: ignore[no-untyped-call]
            return (yield from generator(*args, **kwargs))

        return wrapped

    def _fresh(self, stretches: "_blocks.Stretches | None" = None) -> "batch":
        """Returns a new block with the options of this block."""
        fresh = self._made(self._enabled, self._options)
        fresh._stretches = stretches
        return fresh

    def flush(self) -> None:
        """Runs all pending ops. Pending tensors become ordinary tensors."""
        if self._open and self._open[-1] is not None:
            self._open[-1].flush()

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        gradient: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Records tensors to differentiate (*roots*). The block's end runs one backward for all.

        Replaces ``loss.backward()`` in a loop over instances, which would flush at each call.
        Outside an open block, the backward runs immediately.

        Args:
            tensors: one tensor or several, called roots.
            gradient: the gradient of each root, of the root's shape. May be None for a root with
                one element. A single tensor is used for all roots.

        Raises:
            ValueError: if the numbers of tensors and gradients differ.
            RuntimeError: if a root with several elements has no gradient.
        """
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if gradient is None or isinstance(gradient, torch.Tensor):
            gradients: list[torch.Tensor | None] = [gradient] * len(roots)
        else:
            gradients = list(gradient)
        if len(gradients) != len(roots):
            raise ValueError(
                f"scope.backward(): got {len(roots)} tensors but {len(gradients)} gradients"
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
        """Returns a report on the ops that were captured so far, and on how they ran.

        The report can be printed. It is empty if ``enabled`` is False.
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
    """Returns ``batch(enabled=False)``, whose ops run eagerly even inside another block.

    Works as a context manager, and as a decorator with and without parentheses. If an op in
    the block reads a pending tensor, the tensor is computed first.
    """
    block = batch(enabled=False)
    return block if function is None else block(function)
