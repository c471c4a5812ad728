"""The context manager: what a user types."""

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from torch_autobatch import _C
from torch_autobatch._gradients import end_block

_P = ParamSpec("_P")
_R = TypeVar("_R")


_POLICIES = frozenset(_C.policy_names())
ADAPTIVE = True  # where batch() is not told


class batch:  # noqa: N801  (used as a function, as torch.no_grad is)
    """Captures the ops of a block and runs them batched across instances.

    Works as a context manager and as a decorator. A block opened inside another one, on the same
    thread, joins it: everything runs when the outer one ends.

    Args:
        policy: how nodes are ordered into batches, one of ``policy_names()``: "agenda" (Neubig,
            Goldberg, Dyer 2017, section 3), "depth", "frontier" (after Chen et al. 2023, section
            2.3), or "auto": the one with the fewest batches for graphs like this one.
        enabled: False makes the block plain eager code.
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
            (``map`` batches across instances), in blocks of one instance. The report says where.
            None: True. False: defer always.

    Raises:
        ValueError: if ``policy`` or ``granularity`` is not known.

    If a captured op fails when it runs, the error is raised at the end of the block (or where a
    value is first read), names the op, its shapes and the line that captured it, and what was
    computed before it stays usable.
    """

    def __init__(
        self,
        policy: str = "auto",
        *,
        enabled: bool = True,
        max_pending: int | None = None,
        verify: bool = False,
        granularity: str = "auto",
        check_cells: bool = False,
        defer_checks: bool | None = None,
        adaptive: bool | None = None,
    ) -> None:
        if policy not in _POLICIES:
            names = ", ".join(repr(name) for name in _C.policy_names())
            raise ValueError(f"batch(policy={policy!r}): expected one of {names}")
        if max_pending is not None and max_pending < 1:
            raise ValueError(f"batch(max_pending={max_pending}): expected at least 1, or None")
        self._policy = policy
        self._enabled = enabled
        self._max_pending = max_pending or 0
        if granularity not in ("auto", "cell", "op"):
            raise ValueError(
                f"batch(granularity={granularity!r}): expected one of 'auto', 'cell', 'op'"
            )
        self._verify = verify
        self._granularity = granularity
        self._check_cells = check_cells
        self._defer_checks = defer_checks
        self._adaptive = adaptive
        self._open: list[_C.Scope | None] = []
        self._last: _C.Scope | None = None
        self._roots: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []

    def __enter__(self) -> "batch":
        scope = None
        if self._enabled:
            scope = _C.open_block(
                self._policy,
                self._max_pending,
                self._verify,
                self._granularity != "op",
                self._check_cells,
                self._defer_checks,
                ADAPTIVE if self._adaptive is None else self._adaptive,
            )
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
        if not self._open and roots and error is None:
            torch.autograd.backward(roots, gradients)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            fresh = batch(
                self._policy,
                enabled=self._enabled,
                max_pending=self._max_pending or None,
                verify=self._verify,
                granularity=self._granularity,
                check_cells=self._check_cells,
                defer_checks=self._defer_checks,
                adaptive=self._adaptive,
            )
            with fresh:
                return function(*args, **kwargs)

        return wrapper

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

    def report(self) -> _C.Report:
        """What was captured and how it ran, so far; print it."""
        return self._last.report() if self._last is not None else _C.Report()
