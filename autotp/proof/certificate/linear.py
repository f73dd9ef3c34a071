"""Operators that are linear and that the checker has no function for: which of their operands, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.ir.op import aten
from autotp.kernels import float8 as _operators  # noqa: F401  defines them
from autotp.kernels.operators import OPS
from autotp.plans.export.styles import AXIS, spmd_types

Groups = tuple[tuple[str, ...], ...]  # argument names: linear in those of a group together, in every group by itself
Values = Mapping[str, Any]


def _always(arguments: Values) -> bool:
    return True


def _zero(name: str) -> Callable[[Values], bool]:
    return lambda arguments: _nothing(arguments.get(name))


def _nothing(value: Any) -> bool:
    """Return whether an argument is no number but zero; a tensor's numbers are not known."""
    return not isinstance(value, Tensor) and value in (0, None)


def _tensor_or_zero(value: Any) -> bool:
    return isinstance(value, Tensor) or value == 0


def _sides(arguments: Values) -> tuple[Any, Any]:
    return arguments["self"], arguments["other"]


def _exact(arguments: Values) -> bool:
    """Return whether a cast keeps real numbers real: a sum of rounded summands is another number."""
    x, like = arguments["self"], arguments.get("other")
    same = like.dtype if isinstance(like, Tensor) else x.dtype
    goal = arguments.get("dtype") or same
    return goal.is_floating_point or goal.is_complex or not (x.is_floating_point() or x.is_complex())


ALWAYS = (
    "slice tril triu real imag conj _conj _conj_physical resolve_conj view_as_real view_as_complex lift_fresh_copy "
    "as_strided avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d pixel_shuffle pixel_unshuffle "
    "repeat_interleave index im2col col2im diag_embed pad"
)
SELF: Groups = (("self",), ("input",))  # as its overloads call the first operand
# Packet -> (groups, whether they hold for these arguments).
LINEAR: dict[Any, tuple[Groups, Callable[[Values], bool]]] = {
    **dict.fromkeys((aten.to, aten._to_copy, aten.type_as), (SELF, _exact)),
    **dict.fromkeys((getattr(aten, name) for name in ALWAYS.split()), (SELF, _always)),
    aten.dropout: ((("input",),), lambda arguments: not arguments["train"] or arguments["p"] == 0),
    aten.constant_pad_nd: (SELF, _zero("value")),
    aten.masked_fill: (SELF, _zero("value")),
    aten.where: ((("self", "other"),), lambda arguments: all(map(_tensor_or_zero, _sides(arguments)))),
    aten.complex: ((("real", "imag"),), _always),
    aten.outer: ((("self",), ("vec2",)), _always),
    aten.linalg_vecdot: ((("x",), ("y",)), _always),
    aten.linalg_cross: ((("self",), ("other",)), _always),
    aten._grouped_mm: ((("self",), ("mat2",)), _always),
    aten.slice_scatter: ((("self", "src"),), _always),
    aten.select_scatter: ((("self", "src"),), _always),
    aten.scatter_add: ((("self", "src"),), _always),
    aten.index_add: ((("self", "source"),), _always),
    aten.index_copy: ((("self", "source"),), _always),
    aten.masked_scatter: ((("self", "source"),), _always),
    OPS.counter_dropout: ((("x",),), _always),
    OPS.float8_seen: ((("y", "zero"),), _always),
    OPS.float8_row_seen: ((("y", "rows"),), _always),
    OPS.float8_rows_seen: ((("y", "rows", "columns"),), _always),
}  # fmt: skip


def linear_slots(target: Any, args: Sequence[Any], kwargs: Values) -> tuple[tuple[int, ...], ...] | None:
    """Groups of tensor slots in which this call is linear; None where it is not in the table.

    Args:
        target: of the call. args, kwargs: its arguments on a rank.
    """
    entry = LINEAR.get(getattr(target, "overloadpacket", None))
    if entry is None:
        return None
    names = [a.name for a in target._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    groups, holds = entry
    if not holds(arguments):
        return None
    slots: dict[str, list[int]] = {}
    count = 0
    for name in names:
        for x in tensors_in(arguments.get(name)):
            slots.setdefault(name, []).append(count)
            count += x is not None
    joined = (_joined(slots, group) for group in groups)
    return tuple(group for group in joined if group)


def _joined(slots: Mapping[str, list[int]], names: tuple[str, ...]) -> tuple[int, ...]:
    """The slots of these arguments."""
    return tuple(slot for name in names for slot in slots.get(name, ()))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of one argument."""
    items = value if isinstance(value, list | tuple) else [value]
    return [x for x in items if isinstance(x, Tensor)]


def type_by_rule(operands: Sequence[Tensor], linear: tuple[tuple[int, ...], ...], out: Tensor) -> None:
    """Have the checker type a result by its einsum rule, in which no dimension is a loop.

    Args:
        operands: typed. linear: groups of them. out: takes the type.
    """
    equation = f"{','.join(blank(x.ndim) for x in operands)}->{'_' * out.ndim}"
    values = flavoured(operands, [carries(x) for x in operands])
    spmd_types("rules").einsum(equation, *values, linear_in=linear, out=out)


def blank(ndim: int) -> str:
    """A term whose dimensions are no loops; one without dimensions cannot be written but as none of any."""
    return "_" * ndim or "..."


def flavoured(values: Sequence[Any], graded: Sequence[bool]) -> list[Any]:
    """The operands, with those that carry no gradient as I where all that do are I, and as R otherwise.

    The checker reads torch's own operators so, but not its einsum rule.

    Args:
        values: typed. graded: whether a gradient may reach each of them.
    """
    spmd = spmd_types()
    types = [spmd.get_axis_local_type(x, AXIS) for x in values]
    carried = [t for t, g in zip(types, graded, strict=True) if g]
    flavour = spmd.I if set(carried) == {spmd.I} else spmd.R
    operands = []
    for x, kind, g in zip(values, types, graded, strict=True):
        free = not g and kind in (spmd.I, spmd.R)
        operands.append(standing(x.ndim, flavour) if free and kind is not flavour else x)
    return operands


def carries(x: Any) -> bool:
    """Return whether a gradient may reach this value."""
    return bool(getattr(x, "requires_grad", False)) and torch.is_grad_enabled()


def standing(ndim: int, kind: Any) -> Any:
    """A value that has nothing but a number of dimensions and a type."""
    value = spmd_types("rules").NdimWithSpmdType(ndim)
    spmd_types().assert_type(value, {AXIS: kind})
    return value
