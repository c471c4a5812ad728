"""Custom autograd.Functions without a vmap rule: forward is captured op by op."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from torch_autobatch import _C


class Context(FunctionCtx):
    """The ``ctx`` of a call. PyTorch's ctx is an autograd node, which can't have pending inputs."""

    _forward_cls: type[Function]
    needs_input_grad: tuple[bool, ...]
    to_save: Any = ()
    non_differentiable: Any = ()
    dirty_tensors: Any = ()
    materialize_grads = True
    saved_tensors: "tuple[Tensor | None, ...]" = ()


_OWN = frozenset(
    ("_forward_cls", "needs_input_grad", "to_save", "non_differentiable", "saved_tensors")
)


class Call:
    """One call of a Function in a block."""

    def __init__(self, function: type[Function], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.inputs: list[Tensor] = []  # the tensors among the arguments, until forward has run
        self._is_tensor = []
        needs = []
        for argument in arguments:
            is_tensor = isinstance(argument, Tensor)
            self._is_tensor.append(is_tensor)
            needs.append(is_tensor and argument.requires_grad)
            if is_tensor:
                self.inputs.append(argument)
        self._shapes = [(t.shape, t.dtype) for t in self.inputs]
        self.context = Context()
        self.context._forward_cls = function
        self.context.needs_input_grad = tuple(needs)
        self._outputs: list[tuple[Any, ...] | None] = []  # (shape, dtype, device), or None
        self.differentiable: list[int] = []  # the outputs that have a gradient
        self._saved: list[tuple[str, Any]] = []
        # Maps the index of a tensor argument to the tensor, if it was saved and is not pending.
        self._real: dict[int, Tensor] = {}
        self.shares_memory = False

    def note_outputs(self, outputs: list[Any]) -> list[Tensor]:
        """Records what forward returned and saved. Returns the outputs that have a gradient."""
        context = self.context
        plain = [id(t) for t in context.non_differentiable or ()]
        results: list[Tensor] = []
        for place, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                self._outputs.append(None)
                continue
            self._outputs.append((output.shape, output.dtype, output.device))
            if id(output) not in plain and (output.is_floating_point() or output.is_complex()):
                self.differentiable.append(place)
                results.append(output)
        for i, tensor in enumerate(context.to_save or ()):
            self._note_saved(i, tensor, results)
        context.to_save = context.non_differentiable = ()
        self.shares_memory = any(
            result is given or _C.share_memory(result, given)
            for result in results
            for given in self.inputs
        )
        return results

    def _note_saved(self, place: int, tensor: Any, results: list[Tensor]) -> None:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                "save_for_backward can only save variables, but argument "
                f"{place} is of type {type(tensor).__name__}"
            )
        for number, given in enumerate(self.inputs):
            if given is tensor:
                self._saved.append(("input", number))
                if not _C.is_pending(given):
                    self._real[number] = given
                return
        for number, result in enumerate(results):
            if result is tensor:
                self._saved.append(("result", number))
                return
        self._saved.append(("other", tensor))

    def holds_history(self) -> bool:
        """Whether ctx holds an autograd graph that forward created (`with torch.enable_grad()`).

        Backward may differentiate this graph, so the graph must not belong to the call's record.
        """
        held: list[Any] = [tensor for kind, tensor in self._saved if kind == "other"]
        held += [value for name, value in vars(self.context).items() if name not in _OWN]
        for value in held:  # the loop appends to `held`
            if isinstance(value, list | tuple):
                held += value
            elif isinstance(value, dict):
                held += value.values()
            elif (
                isinstance(value, Tensor)
                and value.requires_grad
                and not any(value is given for given in self.inputs)
            ):
                return True
        return False

    def saves(self, kind: str, count: int) -> list[int]:
        """Returns for each of ``count`` inputs or results whether forward saved it.

        0: not saved; 1: saved; 2: saved, and this object holds the tensor.
        """
        saved = {place for what, place in self._saved if what == kind}
        held = self._real if kind == "input" else {}
        return [int(i in saved) + int(i in held) for i in range(count)]

    @property
    def saves_any(self) -> bool:
        return bool(self._saved)

    def gradients(
        self,
        inputs: tuple[Tensor | None, ...],
        results: tuple[Tensor | None, ...],
        gradients: tuple[Tensor | None, ...],
    ) -> list[Tensor | None]:
        """Runs the Function's backward. Returns the gradients of the tensor arguments.

        ``inputs`` and ``results`` contain the tensors that forward saved. ``gradients`` contains
        the gradients of the outputs that have one.
        """
        context, of_output = self.context, dict(zip(self.differentiable, gradients, strict=True))
        every: list[Tensor | None] = []
        for place, meta in enumerate(self._outputs):
            gradient = of_output.get(place)
            if gradient is None and meta is not None and context.materialize_grads:
                shape, dtype, device = meta
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            every.append(gradient)
        given = [self._real.get(i, t) for i, t in enumerate(inputs)]
        kinds = {"input": given, "result": results}
        context.saved_tensors = tuple(
            tensor if kind == "other" else kinds[kind][tensor] for kind, tensor in self._saved
        )
        has_vjp = self.function.vjp is not Function.vjp
        try:
            found = (self.function.vjp if has_vjp else self.function.backward)(context, *every)
        finally:
            context.saved_tensors = ()
        return self._checked(found if isinstance(found, tuple) else (found,))

    def _checked(self, found: tuple[Any, ...]) -> list[Tensor | None]:
        """Raises autograd's errors for wrong gradients. Returns gradients of tensor arguments."""
        name, expected = f"{self.function.__name__}Backward", len(self._is_tensor)
        if len(found) > expected and all(g is None for g in found[expected:]):
            found = found[:expected]
        if len(found) != expected:
            raise RuntimeError(
                f"function {name} returned an incorrect number of gradients "
                f"(expected {expected}, got {len(found)})"
            )
        checked: list[Tensor | None] = []
        for place, gradient in enumerate(found):
            if self._is_tensor[place]:
                checked.append(self._fitted(gradient, len(checked), place, name))
            elif gradient is not None:
                raise RuntimeError(
                    f"function {name} returned a gradient different than None at position "
                    f"{place + 1}, but the corresponding forward input was not a Variable"
                )
        return checked

    def _fitted(self, gradient: Any, number: int, place: int, name: str) -> Any:
        """Returns the gradient with the shape and dtype of its argument."""
        if gradient is None or not self.context.needs_input_grad[place]:
            return None
        if not isinstance(gradient, Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(gradient).__name__})")
        shape, dtype = self._shapes[number]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.shape != shape:
            try:
                gradient = gradient.sum_to_size(shape)
            except RuntimeError:
                raise RuntimeError(
                    f"Function {name} returned an invalid gradient at index {number} - got "
                    f"{list(gradient.shape)} but expected shape compatible with {list(shape)}"
                ) from None
        if gradient.dtype != dtype:
            if gradient.is_complex() and not dtype.is_complex:
                gradient = gradient.real
            gradient = gradient.to(dtype)
        return gradient

    def reapply(self, results: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """Returns the results with this call as their autograd history."""
        return list(_Reapplied.apply(self, len(results), *results, *inputs))  # type: ignore[no-untyped-call]


class _Reapplied(Function):
    """Wraps a call whose forward has already run: returns its results, and runs its backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = tuple(t.view_as(t) if call.shares_memory else t.clone() for t in tensors[:count])
        ctx.call, ctx.count = call, count
        tensors = *made, *tensors[count:]
        is_saved = *call.saves("result", count), *call.saves("input", len(tensors) - count)
        # Writing to a tensor is an error only if the call saved the tensor.
        ctx.save_for_backward(
            *(t if saved else None for t, saved in zip(tensors, is_saved, strict=True))
        )
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        found = ctx.call.gradients(saved[ctx.count :], saved[: ctx.count], gradients)
        return (None, None, *[None] * ctx.count, *found)


_why: WeakKeyDictionary[type[Function], str] = WeakKeyDictionary()

# For each class: the number of consecutive calls with a pending argument and without a pending
# result. After _MOST_AT_ONCE such calls, calls of the class run eagerly.
_at_once: WeakKeyDictionary[type[Function], int] = WeakKeyDictionary()
_MOST_AT_ONCE = 4


def why_not_captured(function: type[Function]) -> str:
    """Returns why forward of the class can't be captured; "" if it can."""
    why = _why.get(function)
    if why is None:
        why = _why[function] = _find_why(function)
    return why


def _find_why(function: type[Function]) -> str:
    if function.vjp is not Function.vjp and function.backward is not Function.backward:
        return "custom autograd.Function with a vjp and a backward staticmethod"
    module = function.__module__
    if module.partition(".")[0] == "torch" and module != "torch.utils.checkpoint":
        return "autograd.Function of PyTorch itself"  # PyTorch needs the class's own node
    methods: list[Any] = [function.forward, function.setup_context]
    if any("mark_dirty" in m.__code__.co_names for m in methods if hasattr(m, "__code__")):
        return "custom autograd.Function that writes to its arguments"
    return ""


def _note_pending(function: type[Function], any_pending: bool) -> None:
    """Counts consecutive calls without a pending result (``_at_once``)."""
    if any_pending:
        if _at_once:
            _at_once.pop(function, None)
        return
    count = _at_once[function] = _at_once.get(function, 0) + 1
    if count >= _MOST_AT_ONCE:
        _why[function] = "custom autograd.Function whose forward computes its results immediately"


def capture(function: type[Function], arguments: tuple[Any, ...]) -> Any:
    """Calls the Function in a block. The ops of its forward are captured, and run in batches.

    At least one argument is pending. Returns what ``apply`` returns.
    """
    call = Call(function, arguments)
    inputs = call.inputs
    with torch.no_grad():
        if function.setup_context is Function.setup_context:
            found = function.forward(call.context, *arguments)
        else:
            found = function.forward(*arguments)
            function.setup_context(call.context, arguments, found)
        outputs = list(found) if isinstance(found, tuple) else [found]
        call.note_outputs(outputs)
        # If an output is an argument, autograd returns a different tensor object for it.
        for place, output in enumerate(outputs):
            if any(output is given for given in inputs):
                outputs[place] = output.view_as(output)
        results = [outputs[place].detach() for place in call.differentiable]
    _note_pending(function, any(map(_C.is_pending, results)))
    if call.context.dirty_tensors:
        raise RuntimeError(
            f"{function.__name__}.forward calls ctx.mark_dirty() indirectly, which is not possible "
            "in a batch() block. Call it in forward itself, or call the Function in eager()."
        )
    if results and torch.is_grad_enabled() and any(call.context.needs_input_grad):
        captured = _C.capture_function(
            call,
            f"{function.__name__}.apply",
            call.shares_memory,
            call.saves_any,
            call.saves("result", len(results)),
            call.saves("input", len(inputs)),
            results,
            inputs,
            call.holds_history(),
        )
        for place, result in zip(call.differentiable, captured, strict=True):
            outputs[place] = result
    call.inputs = []
    return tuple(outputs) if isinstance(found, tuple) else outputs[0]
