"""``map``: a batched loop over instances, whose code may read values."""

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch

from torch_autobatch import _C
from torch_autobatch._cell import _next_behind
from torch_autobatch._engine_request import tensors_in
from torch_autobatch._fiber_state import note_shared_state, register_known
from torch_autobatch._module_attributes import watch_modules
from torch_autobatch._options import check_count, check_results, check_truths, is_async, name_of
from torch_autobatch._scope import Granularity, Policy, batch

_T = TypeVar("_T")
_R = TypeVar("_R")


class Options(TypedDict, total=False):
    """The options of ``map`` that do not change the type of its result."""

    max_live: int | None
    policy: Policy
    enabled: bool
    max_pending: int | None
    verify: bool
    granularity: Granularity
    check_cells: bool
    defer_checks: bool | None
    profile: bool


@overload
def map(
    fn: Callable[[_T], _R],
    instances: Iterable[_T],
    *,
    return_exceptions: Literal[False] = False,
    **options: Unpack[Options],
) -> list[_R]: ...
@overload
def map(
    fn: Callable[[_T], _R],
    instances: Iterable[_T],
    *,
    return_exceptions: bool,
    **options: Unpack[Options],
) -> list[_R | Exception]: ...
@overload
def map(
    fn: Callable[..., _R],
    instances: Iterable[Any],
    *more: Iterable[Any],
    unpack: bool = False,
    return_exceptions: Literal[False] = False,
    **options: Unpack[Options],
) -> list[_R]: ...
@overload
def map(
    fn: Callable[..., _R],
    instances: Iterable[Any],
    *more: Iterable[Any],
    unpack: bool = False,
    return_exceptions: bool,
    **options: Unpack[Options],
) -> list[_R | Exception]: ...
def map(
    fn: Callable[..., Any],
    instances: Iterable[Any],
    *more: Iterable[Any],
    unpack: bool = False,
    return_exceptions: bool = False,
    max_live: int | None = None,
    policy: Policy = "auto",
    enabled: bool = True,
    max_pending: int | None = None,
    verify: bool = False,
    granularity: Granularity = "auto",
    check_cells: bool = False,
    defer_checks: bool | None = None,
    profile: bool = False,
) -> Any:
    """Computes ``[fn(x) for x in instances]``, batched even if instances read values.

    Each call of ``fn`` runs in a fiber on this thread. A call that reads a value (``item()``,
    ``if x > 0``, ...) is suspended, and the next call runs. When all calls are suspended, one flush
    computes the values that they wait for. ``backward()`` waits in the same way. A map opens a
    block, or joins the open block. If measurements show that a plain loop is faster, the map runs
    as a plain loop, except inside ``batch(adaptive=False)``.

    Args:
        fn: the code for one instance. The calls are interleaved, so they must not depend on each
            other's side effects. They share parameters and other existing tensors.
        instances: the arguments of ``fn``. The next item is taken only when an instance starts.
        more: iterables of further arguments of ``fn``, as in Python's ``map``. The shortest
            iterable ends the map.
        unpack: each instance is a tuple of arguments: ``fn(*instance)``.
        return_exceptions: if an instance raises an ``Exception``, the exception is its result, and
            the other instances continue.
        max_live: maximum number of instances that are active at a time. None: no limit.
        policy, enabled, max_pending, verify, granularity, check_cells, defer_checks, profile: as
            for ``batch``.

    Returns:
        The results, in the order of the instances. Results may be any objects. Tensors have the
        shapes, values and autograd history that they would have in a loop.

    Raises:
        TypeError: if ``fn`` is an ``async def``, or an argument has a wrong type.
        Exception: the error of the first failing instance (in the order of ``instances``), with a
            note that names the instance. Instances before it run to their end. In instances after
            it, ``GreenletExit`` is raised at their current position. KeyboardInterrupt and
            SystemExit end all instances.

    Warns:
        RuntimeWarning: in the first map of ``fn``, instances used a shared buffer in a different
            order than a loop would. Later maps keep the order of a loop.
    """
    _check(fn, max_live, unpack, return_exceptions, enabled)
    call, instances = _with_one_argument(fn, instances, more, unpack)
    if not enabled:
        with batch(enabled=False):
            return _loop(call, instances, return_exceptions)
    register_known()
    scope = _block(policy, max_pending, verify, granularity, check_cells, defer_checks, profile)
    return _run(scope, fn, call, instances, return_exceptions, max_live or 0)


def _check(
    fn: Callable[..., Any], max_live: object, unpack: bool, return_exceptions: bool, enabled: bool
) -> None:
    """Raises ``TypeError`` or ``ValueError`` for a wrong argument of ``map``.

    ``batch`` checks the options that ``batch`` and ``map`` share.
    """
    if not callable(fn):
        raise TypeError(f"map(): expected a function as the first argument, got {fn!r}")
    if is_async(fn):
        raise TypeError(
            f"map() can't run the async function {name_of(fn)!r}: its calls return coroutines, "
            "which map() does not await. Pass a function that does not await."
        )
    check_count("map", "max_live", max_live)
    truths = {"unpack": unpack, "return_exceptions": return_exceptions, "enabled": enabled}
    check_truths("map", truths)


def _with_one_argument(
    fn: Callable[..., Any], instances: Iterable[Any], more: tuple[Iterable[Any], ...], unpack: bool
) -> tuple[Callable[[Any], Any], Iterable[Any]]:
    """Returns a function of one argument, and the iterable of its arguments.

    The function is ``fn`` itself if instances are not unpacked.
    """
    if more and unpack:
        raise TypeError(
            f"map(unpack=True) takes one iterable of tuples, but got {1 + len(more)} iterables. "
            "Remove unpack=True, or zip the iterables"
        )
    if more:
        instances = zip(instances, *more, strict=False)
    elif not unpack:
        return fn, instances
    return (lambda arguments: fn(*arguments)), instances


def _block(
    policy: Policy,
    max_pending: int | None,
    verify: bool,
    granularity: Granularity,
    check_cells: bool,
    defer_checks: bool | None,
    profile: bool,
) -> batch:
    """Makes the block in which a map runs."""
    return batch(
        policy,
        max_pending=max_pending,
        verify=verify,
        granularity=granularity,
        check_cells=check_cells,
        defer_checks=defer_checks,
        # Reads in a map do not pause capture, because instances wait for each other.
        adaptive=None if _C.is_open() else False,
        profile=profile,
    )


def _run(
    scope: batch,
    fn: Callable[..., Any],
    call: Callable[[Any], Any],
    instances: Iterable[Any],
    return_exceptions: bool,
    max_live: int,
) -> list[Any]:
    """Runs the instances in a block, in fibers or as a plain loop. ``call`` calls ``fn``."""
    try:
        with scope, _Backward():
            if scope._runs_eagerly(fn):
                return _loop(call, instances, return_exceptions)
            with watch_modules:
                results: list[Any] = _C.run_fibers(
                    call,
                    iter(instances),
                    return_exceptions,
                    max_live,
                    _serve,
                    tensors_in,
                    note_shared_state,
                    _is_new(fn),
                    _warn_of_order,
                )
    except TypeError as error:
        if call is fn and "required positional argument" in str(error):
            error.add_note(
                "if the instances are tuples of arguments, call ab.map(..., unpack=True)"
            )
        raise
    check_results("map", fn, *results)
    return results


def _loop(
    function: Callable[[Any], Any], instances: Iterable[Any], return_exceptions: bool
) -> list[Any]:
    """Runs the instances one after the other, as a plain loop."""
    results: list[Any] = []
    for index, instance in enumerate(instances):
        try:
            results.append(function(instance))
        except Exception as error:
            error.add_note(f"in instance {index} of ab.map")
            if not return_exceptions:
                raise
            results.append(error)
    return results


# --- the order of uses of shared memory ---

# For each module: the modes in which maps have run it. A function without modules has an entry for
# its code object.
_known: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def _is_new(function: Any) -> bool:
    """Returns whether no map has run this function with these modules in these modes yet.

    A module may write to its buffers in training only.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or type(function)
    values = (getattr(function, "__self__", function), *_next_behind(function))
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    mode = (id(code), torch.is_grad_enabled(), *(module.training for module in modules))
    is_new = False
    owners: list[Any] = [*modules] or [code]
    for owner in owners:
        modes = _known.setdefault(owner, set())
        is_new = is_new or mode not in modes
        modes.add(mode)
    return is_new


def _warn_of_order(what: str) -> None:
    """Warns that instances used a shared tensor in a different order than a loop would."""
    text = (
        f"ab.map: {what}. A loop ends each instance before it begins the next one, so the results "
        "of this call may differ from a loop's. From now on, an instance waits for the earlier "
        "instances before it uses a tensor that this call has written to. If the results of the "
        "first call matter, use a loop in ab.batch() instead of ab.map"
    )
    warnings.warn(text, RuntimeWarning, stacklevel=4)


# --- backward() in a fiber ---

_eager_backward = torch.autograd.backward


class _Request:
    """A call of ``torch.autograd.backward`` that waits for the calls of the other instances."""

    def __init__(
        self,
        roots: list[torch.Tensor],
        gradients: list[torch.Tensor | None],
        options: tuple[Any, ...],
        inputs: Any,
    ) -> None:
        self.roots = roots
        self.gradients = gradients
        self.inputs = inputs
        self.key = (*options, None if inputs is None else tuple(id(x) for x in _as_list(inputs)))
        self.options = options


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Replaces ``torch.autograd.backward`` while a map runs."""
    request = None
    if grad_variables is None:
        request = _request(tensors, grad_tensors, retain_graph, create_graph, inputs)
    outcome = NotImplemented if request is None else _C.wait_in_fiber(request)
    if outcome is NotImplemented:
        _eager_backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    elif outcome is not None:
        raise outcome


def _request(
    tensors: Any, grad_tensors: Any, retain_graph: bool | None, create_graph: bool, inputs: Any
) -> _Request | None:
    """Returns the request of a call, or None if PyTorch may reject the call.

    A call without a request runs alone. If PyTorch rejects the call, only this instance gets the
    error.
    """
    roots = _as_list(tensors)
    gradients = [None] * len(roots) if grad_tensors is None else _as_list(grad_tensors)
    if len(roots) != len(gradients) or not all(type(root) is torch.Tensor for root in roots):
        return None
    if inputs is not None and len(_as_list(inputs)) == 0:
        return None
    for root, gradient in zip(roots, gradients, strict=True):
        if not root.requires_grad:
            return None
        if gradient is None and root.numel() == 1 and root.is_floating_point():
            continue
        if type(gradient) is not torch.Tensor or gradient.shape != root.shape:
            return None
    return _Request(roots, gradients, (retain_graph, create_graph), inputs)


def _serve(requests: Sequence[_Request]) -> list[BaseException | None]:
    """Runs the requests. Requests with equal options run as one call.

    Returns:
        For each request, the error that its call raised, or None.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(request.key, []).append(i)
    _C.compute([root for request in requests for root in request.roots])
    outcomes: list[BaseException | None] = [None] * len(requests)
    for members in groups.values():
        error = _run_together([requests[i] for i in members])
        for i in members:
            outcomes[i] = error
    return outcomes


def _run_together(requests: list[_Request]) -> Exception | None:
    roots = [root for request in requests for root in request.roots]
    gradients = [gradient for request in requests for gradient in request.gradients]
    retain_graph, create_graph = requests[0].options
    try:
        torch.autograd.backward(
            roots, gradients, retain_graph, create_graph, inputs=requests[0].inputs
        )
    except Exception as error:
        return error
    return None


class _Backward:
    """Replaces ``torch.autograd.backward`` with ``_backward`` while a map runs on any thread."""

    _running = 0
    _lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            _Backward._running += 1
            if _Backward._running == 1 and torch.autograd.backward is _eager_backward:
                torch.autograd.backward = _backward

    def __exit__(self, *_: object) -> None:
        with self._lock:
            _Backward._running -= 1
            if _Backward._running == 0 and torch.autograd.backward is _backward:
                torch.autograd.backward = _eager_backward
