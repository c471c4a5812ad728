"""Passes that shorten a dynamic cell's program. A pass takes lines and returns lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_autobatch._cell_indexing import put_rows
from torch_autobatch._cell_ops import ROW_MAJOR, is_pure
from torch_autobatch._cell_program import VARIABLE, Line, Program, renamed

Lines = Sequence[Line]

_IN_PLACE_OPTION = ", inplace=True"
# Functions with the option ``inplace`` whose results have the dtype and strides of the argument.
_ACTIVATIONS = frozenset(
    (
        *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardtanh"),
        *("hardswish", "hardsigmoid", "threshold", "dropout", "alpha_dropout"),
    )
)

_UNINITIALIZED = ("empty", "empty_like", "new_empty", "empty_strided")

# In-place ops whose out-of-place form returns the dtype and the sizes of the first argument. For
# the ops of the first set, this is true only if the other arguments are numbers.
_FUNCTIONAL_OF_NUMBERS = frozenset(("pow_", "clamp_", "clamp_min_", "clamp_max_"))
_FUNCTIONAL = frozenset(
    (
        *("scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_fill_"),
        *(
            "index_put_",
            "index_copy_",
            "masked_fill_",
            "relu_",
            "tanh_",
            "sigmoid_",
            "exp_",
            "sqrt_",
            "neg_",
        ),
    )
)


def optimized(
    lines: Lines, returned: str, own: set[str], constant: Callable[[Any], str]
) -> tuple[list[Line], str]:
    """Returns the shortened lines, and the source of the result with the new names of variables.

    `own`: variables whose memory the call has allocated. `constant`: returns a constant's name.
    """
    if any(line.writes and line.writes not in own for line in lines):
        return without_unused(lines, returned), returned  # inputs may share the written memory
    lines, names = without_writes(lines, own, constant)
    returned = renamed(returned, names)
    lines = without_repetitions(lines, returned)
    return without_unused(lines, returned), returned


class _Aliases:
    """Groups of variables that may share memory, because one is computed from another."""

    def __init__(self, lines: Lines) -> None:
        self._group: dict[str, str] = {}
        for line in lines:
            if line.is_call and not line.fresh:
                for variable in line.arguments():
                    if variable[0] != "s":
                        self._group[self._find(variable)] = self._find(line.target)

    def _find(self, variable: str) -> str:
        while variable in self._group and self._group[variable] != variable:
            variable = self._group[variable]
        return variable

    def of(self, variable: str, among: Iterable[str]) -> set[str]:
        group = self._find(variable)
        return {other for other in among if self._find(other) == group}


def without_writes(
    lines: Lines, own: set[str], constant: Callable[[Any], str]
) -> tuple[list[Line], dict[str, str]]:
    """Replaces in-place ops with out-of-place ops.

    An op is replaced if the call has allocated the memory and no alias of the memory exists.
    Returns the lines and, for each variable that is written to, the variable that replaces it.
    """
    names: dict[str, str] = {}
    found: list[Line] = []
    is_in_no_grad = False
    for line in lines:
        line = line.renamed(names)
        if line.name == "_set_grad_enabled":
            is_in_no_grad = "False" in line.source
        to = line.writes  # a write without autograd does not change the tensor's autograd history
        if to in own and not is_in_no_grad and _has_counterpart(line) and _is_alone(line, found):
            in_rows, keeps_type = line.name in ROW_MAJOR, line.keeps_type
            line = _out_of_place(line, constant)
            names = {of: line.target if by == to else by for of, by in names.items()}
            names[to] = line.target
            own.add(line.target)
            if keeps_type:  # an in-place op with a result of another shape is an error
                is_dense = [Line("", f"{to}.is_contiguous() is True")] if in_rows else []
                found += (*is_dense, line, Line("", f"{line.target}.shape == {to}.shape"))
                continue
        found.append(line)
    return found, names


def _out_of_place(line: Line, constant: Callable[[Any], str]) -> Line:
    if _IN_PLACE_OPTION in line.source:
        source, name = line.source.replace(_IN_PLACE_OPTION, ""), line.name
    else:
        name = _counterpart(line.name)
        op = put_rows if name == "put_rows" else getattr(Tensor, name)
        source = constant(op) + line.source[line.source.index("(") :]
    return Line(line.target, source, name=name, fresh=True, draws=line.draws, selects=line.selects)


def _counterpart(name: str) -> str:
    return name.replace("__i", "__") if name.startswith("__i") else name.removesuffix("_")


def _has_counterpart(line: Line) -> bool:
    if _IN_PLACE_OPTION in line.source:
        return line.name in _ACTIVATIONS and line.variables() == {line.writes}
    if line.keeps_type or line.name in ROW_MAJOR:
        return line.keeps_type
    if line.name in _FUNCTIONAL_OF_NUMBERS:
        return line.arguments() == {line.writes}
    return line.name in _FUNCTIONAL


def _is_alone(line: Line, before: Lines) -> bool:
    """Returns whether no earlier line makes an alias of the variable that `line` writes to."""
    to = line.writes
    aliases = _Aliases(before).of(to, {other.target for other in before if other.is_call})
    return aliases <= {to} and VARIABLE.findall(line.source).count(to) == 1


def _with_aliases(lines: Lines, variables: Iterable[str]) -> set[str]:
    aliases = _Aliases(lines)
    tensors = {name for line in lines if line.is_call for name in (line.target, *line.arguments())}
    return set(variables).union(*(aliases.of(variable, tensors) for variable in variables))


def _written(lines: Lines) -> set[str]:
    return _with_aliases(lines, {line.writes for line in lines if line.writes})


def objects_of_their_own(lines: Lines, returned: str) -> set[str]:
    """Returns the variables that are written to or returned, and their possible aliases."""
    return _written(lines) | _with_aliases(lines, set(VARIABLE.findall(returned)))


def without_repetitions(lines: Lines, returned: str) -> list[Line]:
    """Replaces a pure call that repeats an earlier call with the result of the earlier call."""
    written, fixed = _written(lines), objects_of_their_own(lines, returned)
    names: dict[str, str] = {}
    known: dict[tuple[str, str], str] = {}
    found: list[Line] = []
    mode = ""
    for line in lines:
        line = line.renamed(names)
        if line.name == "_set_grad_enabled":
            mode = line.source
        is_plain = line.is_number or (line.is_call and is_pure(line.name) and not line.writes)
        if is_plain and line.target not in fixed and not line.arguments() & written:
            first = known.setdefault((mode, line.source), line.target)
            if first != line.target:
                names[line.target] = first
                continue
        found.append(line)
    return found


def without_unused(lines: Lines, returned: str) -> list[Line]:
    """Removes sizes, views and other pure results that are not used, and repeated conditions."""
    used = set(VARIABLE.findall(returned))
    kept: list[Line] = []
    for line in reversed(lines):
        has_no_effect = line.is_call and is_pure(line.name) and not line.writes
        if line.target not in used and (line.is_number or has_no_effect):
            continue
        used |= line.variables()
        kept.append(line)
    found: list[Line] = []
    for line in reversed(kept):
        if not line.is_condition or line.reads or line not in found:
            found.append(line)
    return found


def asks_after_draws(lines: Lines) -> bool:
    """Returns whether a condition comes after a call that draws random numbers.

    If the condition fails, the function runs and draws again.
    """
    first = next((i for i, line in enumerate(lines) if line.draws), None)
    return first is not None and any(line.is_condition for line in lines[first:])


def names_of_inputs(lines: Lines) -> set[str]:
    """Returns the names of inputs, and of sizes that are computed only from inputs."""
    names = {name for line in lines for name in line.variables() if name[0] == "x"}
    for line in lines:
        if line.is_number and line.variables() <= names:
            names.add(line.target)
    return names


def may_repeat(line: Line, program: Program) -> bool:
    """Returns whether a call has no effect, and gives the same result for the same arguments."""
    if line.name == "tensor":  # a call may repeat if its data is in the source, and not in a list
        constants = (program.constants[name] for name in line.arguments() if name[0] == "k")
        return all(isinstance(value, (torch.dtype, torch.device)) for value in constants)
    return is_pure(line.name) and not line.writes and line.name not in _UNINITIALIZED
