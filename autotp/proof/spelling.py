"""Translation of the ranks' programs for spmd_types: conversions, linear operators, and operators that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from autotp.errors import PlanError
from autotp.ir.op import aten
from autotp.ir.specs import Spec
from autotp.plans.export.styles import AXIS, spmd_types

# What a conversion is, from one kind of layout to another. Letters are the checker's types; "src" and "dst" the slices
# that the call names, S(dim). Rows by group (G) are split along the dimension of the rows. Slices that groups of ranks
# have alike (C) are slices like others: the checker has no type for them. That an all-reduce wants P, and not merely V,
# is how `spmd_types.rules` reads it.
TRANSITIONS = """
I R  convert I R
P I  all_reduce P I
S R  all_gather src R
P S  reduce_scatter P dst
S I  all_gather src I
I S  convert I dst
S S  all_to_all src dst
P R  all_reduce P R
R I  convert R I
I P  convert I P
R P  convert R P
R S  convert R dst
S P  convert src P
I G  convert I dst
R G  convert R dst
P G  all_reduce P R, convert R dst
S G  all_gather src R, convert R dst
G S  convert src P, reduce_scatter P dst
G I  convert src P, all_reduce P I
G R  convert src P, all_reduce P R
G P  convert src P
I C  convert I dst
R C  convert R dst
P C  all_reduce P R, convert R dst
S C  all_gather src R, convert R dst
C I  all_gather src I
C R  all_gather src R
C S  all_gather src R, convert R dst
"""
STEPS: dict[tuple[str, str], Sequence[Sequence[str]]] = {}  # a transition of `spmd_types.rules`, and its types
for _line in TRANSITIONS.strip().splitlines():
    _src, _dst, _steps = _line.split(maxsplit=2)
    STEPS[_src, _dst] = [step.split() for step in _steps.split(", ")]
AGAIN = STEPS["S", "G"]  # the same dimension, sharded otherwise


def transit(x: Any, src: Spec, dst: Spec, out: Any) -> None:
    """Type a conversion's result.

    Args:
        x: a typed tensor. src, dst: the call's own literals. out: a tensor that takes the type.

    Raises:
        SpmdTypeError: of the checker: `x` is not what the conversion says. PlanError: it has no word for these kinds.
    """
    spmd, rules = spmd_types(), spmd_types("rules")
    types = {"I": spmd.I, "R": spmd.R, "P": spmd.P, "src": _slice(spmd, src), "dst": _slice(spmd, dst)}
    kinds = src.mark, dst.mark
    steps = AGAIN if kinds == ("S", "S") and src.sharded_dim == dst.sharded_dim else STEPS.get(kinds, ())
    if not steps:
        raise PlanError(f"the checker has no transition for a conversion from {src.mark} to {dst.mark}")
    for i, (name, a, b) in enumerate(steps):
        last = {"out": out} if i == len(steps) - 1 else {}
        x = getattr(rules, name)(x, AXIS, src=types[a], dst=types[b], **last)


def _slice(spmd: Any, spec: Spec) -> Any:
    return None if spec.dim is None else spmd.S(spec.dim)


# ---- operators that are linear, and that the checker has no function for ---------------------------------------------

Values = Mapping[str, Any]


def _nothing(value: Any) -> bool:
    """Return whether an argument is no number but zero; a tensor's numbers are not known."""
    return not isinstance(value, Tensor) and value in (0, None)


def _summed(value: Any) -> bool:
    """Return whether an argument is a tensor, which may be summands, or no number but zero."""
    return isinstance(value, Tensor) or value == 0


def _exact(arguments: Values) -> bool:
    """Return whether a cast keeps real numbers real: a sum of rounded summands is another number."""
    x, like = arguments["self"], arguments.get("other")
    return _real(x.dtype) <= _real(arguments.get("dtype") or (like if isinstance(like, Tensor) else x).dtype)


# Operators -> the arguments in which they are linear: in those of a group together, in every group by itself.
LINEAR_IN = {
    "slice tril triu real imag conj _conj conj_physical _conj_physical resolve_conj resolve_neg view_as_real "
    "view_as_complex lift_fresh_copy detach_ as_strided view_as expand_as reshape_as broadcast_to view_copy "
    "_reshape_copy ravel tile moveaxis swapaxes swapdims numpy_T adjoint mT mH tensor_split repeat_interleave index "
    "index_select gather take_along_dim diag_embed pixel_shuffle pixel_unshuffle im2col col2im avg_pool1d avg_pool2d "
    "avg_pool3d _adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler stft fft_fft fft_rfft fft_fft2 fft_rfft2 fft_fftn "
    "fft_rfftn fft_ifft fft_irfft fft_ifft2 fft_irfft2 fft_ifftn fft_irfftn pad to _to_copy "
    "type_as constant_pad_nd": "self|input",
    "dropout alpha_dropout feature_dropout": "input",
    "atleast_1d atleast_2d atleast_3d hstack vstack concatenate broadcast_tensors": "self tensors",
    "pad_sequence": "sequences",
    "where": "self other",
    "masked_fill": "self value",
    "complex": "real imag",
    "copy": "src",
    "diff": "self prepend append",
    "outer": "self|vec2",
    "linalg_vecdot": "x|y",
    "linalg_cross inner vdot": "self|other",
    "linalg_solve": "B",
    "_grouped_mm": "self|mat2",
    "transformers.grouped_mm_fallback": "input|weight",
    "slice_scatter select_scatter diagonal_scatter": "self src",
    "scatter": "self src value",
    "index_copy masked_scatter": "self source",
    "index_put": "self values",
    "autotp.counter_dropout": "x",
    "autotp.float8_seen": "y zero",
    "autotp.float8_row_seen": "y rows",
    "autotp.float8_rows_seen": "y rows columns",
}
# By name, as an operator is written: those of other packages are there when somebody imported them.
LINEAR = {
    "aten." * ("." not in name) + name: [group.split() for group in groups.split("|")]
    for names, groups in LINEAR_IN.items()
    for name in names.split()
}
# Of these it depends on the arguments.
HOLDS: dict[str, Callable[[Values], bool]] = {
    **dict.fromkeys(("aten.to", "aten._to_copy", "aten.type_as"), _exact),
    **dict.fromkeys(
        ("aten.dropout", "aten.alpha_dropout", "aten.feature_dropout"), lambda a: not a["train"] or a["p"] == 0
    ),
    "aten.copy": lambda arguments: _real(arguments["src"].dtype) <= _real(arguments["self"].dtype),
    **dict.fromkeys(("aten.pad", "aten.constant_pad_nd"), lambda arguments: _nothing(arguments.get("value"))),
    "aten.pad_sequence": lambda arguments: _nothing(arguments.get("padding_value")),
    "aten.masked_fill": lambda arguments: _summed(arguments.get("value")),
    "aten.scatter": lambda arguments: "reduce" not in arguments and _nothing(arguments.get("value")),
    "aten.index_put": lambda arguments: not arguments.get("accumulate"),
    "aten.where": lambda arguments: all(map(_summed, map(arguments.get, ("self", "other")))),
}


def linear_slots(target: Any, args: Sequence[Any], kwargs: Values) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups of tensor slots in which this call is linear; None where it is not in the table.

    Args:
        target: of the call. args, kwargs: its arguments on a rank.
    """
    packet = str(getattr(target, "overloadpacket", None))
    if packet not in LINEAR:
        return None
    names = [a.name for a in target._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if packet in HOLDS and not HOLDS[packet](arguments):
        return None
    numbers, slots = count(), dict[str, list[int]]()
    for name in names:
        slots[name] = [next(numbers) for _ in tensors_in(arguments.get(name))]
    groups = []
    for group in LINEAR[packet]:
        groups.append(tuple(slot for name in group for slot in slots.get(name, ())))
    return tuple(filter(None, groups))


def untyped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without the checker."""
    with spmd_types().no_typecheck():
        return function(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of one argument."""
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
    """Write a term whose dimensions are no loops; without dimensions it can only be an ellipsis."""
    return "_" * ndim or "..."


def flavoured(values: Sequence[Any], graded: Sequence[bool]) -> list[Any]:
    """Return the operands, with those that carry no gradient as I where all that do are I, and as R otherwise.

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
    """Return a value that has nothing but a number of dimensions and a type."""
    value = spmd_types("rules").NdimWithSpmdType(ndim)
    spmd_types().assert_type(value, {AXIS: kind})
    return value


# ---- operators as the functions in the checker's table ---------------------------------------------------------------

Summand = Callable[[Tensor], Tensor]  # takes a product that is planned to be a summand, and has the checker say so


def _dims(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt an operator whose dimensions may be left out to the checker's function."""

    def call(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        return function(x, dtype=dtype) if dim is None or dim == [] else function(x, dim, keepdim, dtype=dtype)

    return call


def _minus(x: Any, other: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(other, x, alpha=alpha) if isinstance(other, Tensor) else torch.add(torch.neg(x) * alpha, other)


# Where the checker's function takes the operator's own arguments: torch's of the same name, a method, another.
FUNCTIONS = (
    "add sub subtract neg negative clone detach cumsum cat stack reshape transpose t permute flatten unflatten squeeze "
    "unsqueeze select narrow split chunk unbind flip roll movedim diagonal mul mm bmm matmul dot mv"
)
METHODS = "repeat unfold"
EQUAL_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, name): getattr(torch, name) for name in FUNCTIONS.split()},
    **{getattr(aten, name): getattr(torch.Tensor, name) for name in METHODS.split()},
    aten.concat: torch.cat,
    aten.view: torch.reshape,
    aten._unsafe_view: torch.reshape,
    aten.split_with_sizes: torch.split,
    aten.multiply: torch.mul,
}
# Where its arguments are others.
ADAPTED_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.sum: _dims(torch.sum),
    aten.mean: _dims(torch.mean),
    aten.alias: lambda x: x.view_as(x),
    aten.contiguous: lambda x, memory_format=torch.contiguous_format: torch.clone(x),
    aten.expand: lambda x, size, implicit=False: torch.Tensor.expand(x, size),
    aten.rsub: _minus,
    aten.einsum: lambda equation, operands, path=None: torch.einsum(equation, *operands),
}
QUOTIENTS = {aten.div, aten.divide, aten.true_divide}


def _linear(summand: Summand, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = summand(torch.matmul(x, torch.transpose(weight, 0, -1)))
    return product if bias is None else torch.add(product, bias)


def _with_matrix(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(summand: Summand, added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        matrix = summand(product(a, b))
        return torch.add(torch.mul(added, beta) if beta != 1 else added, matrix, alpha=alpha)

    return call


def _convolution(target: Any) -> Callable[..., Tensor]:
    """Spell a convolution, for which the checker has no function, by its einsum rule: linear in either operand."""

    def call(summand: Summand, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        result = untyped(target, x, weight, None, *rest)
        type_by_rule([x, weight], ((0,), (1,)), result)
        product = summand(result)
        if bias is None:
            return product
        return torch.add(product, torch.reshape(bias, [-1, *[1] * (weight.ndim - 2)]))

    return call


def _bilinear(target: Any) -> Callable[..., Tensor]:
    """Spell a bilinear layer: linear in either input and in the weight."""

    def call(summand: Summand, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        result = untyped(target, x, y, weight, None)
        type_by_rule([x, y, weight], ((0,), (1,), (2,)), result)
        product = summand(result)
        return product if bias is None else torch.add(product, bias)

    return call


def _adding(target: Any) -> Callable[..., Tensor]:
    """Spell an operator that adds rows, its last tensor, to its first: as a sum with rows added to zeros."""

    def call(summand: Summand, added: Tensor, *args: Any, **options: Any) -> Tensor:
        with spmd_types().no_typecheck():
            result = target(torch.zeros_like(added), *args, **options)
        operands = [x for value in args for x in tensors_in(value)]
        type_by_rule(operands, ((len(operands) - 1,),), result)
        return torch.add(added, summand(result))

    return call


# A product and what is added to it, which is added once: the product is asserted before.
SUMS: dict[Any, Callable[..., Any]] = {
    aten.linear: _linear,
    aten.addmm: _with_matrix(torch.mm),
    aten.baddbmm: _with_matrix(torch.bmm),
    aten.addbmm: _with_matrix(lambda a, b: torch.sum(torch.bmm(a, b), 0)),
    aten.addmv: _with_matrix(torch.mv),
}
_CONVOLUTIONS = "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"
# The same of operators that the checker has no function for, whose product its einsum rule types.
TYPED_SUMS: dict[Any, Callable[[Any], Callable[..., Any]]] = {
    **dict.fromkeys((getattr(aten, name) for name in _CONVOLUTIONS), _convolution),
    **dict.fromkeys((aten.scatter_add, aten.index_add, aten.index_put), _adding),
    aten.bilinear: _bilinear,
}


def spelled(target: Any, kwargs: dict[str, Any]) -> tuple[Callable[..., Any] | None, bool]:
    """Return the torch function for an operator, or None, and whether that takes a `Summand` first.

    Args:
        target: of the call. kwargs: its arguments by name. Nothing that rounds is linear, though the checker has
            `torch.div` with a `rounding_mode` in its table.
    """
    packet = getattr(target, "overloadpacket", None)
    if packet in TYPED_SUMS:
        return TYPED_SUMS[packet](target), True
    if packet in SUMS:
        return SUMS[packet], True
    if kwargs.get("rounding_mode") is not None or not _real(kwargs.get("dtype")):
        return None, False
    if packet in QUOTIENTS:
        return torch.div, False
    return EQUAL_FUNCTIONS.get(packet, ADAPTED_FUNCTIONS.get(packet)), False


def _real(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_floating_point or dtype.is_complex
