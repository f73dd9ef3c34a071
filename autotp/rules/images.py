"""Convolution, pooling and resizing: channels and batch split, positions stay whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotp.ir.layouts import divide
from autotp.ir.op import Carry, Factor, Op, Rule, aten

from .core import einsum, local_count, rule, with_factors
from .views import THROUGH

if TYPE_CHECKING:
    from .local import ShardCall


@rule(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution)
@rule(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)
def convolution(op: Op) -> Rule:
    """Input channels are contracted. With groups, whole groups split, and so does each group's own convolution."""
    space, bias, channel = "_" * (len(op.ins[1]) - 2), len(op.ins) > 2, len(op.ins[0]) - len(op.ins[1]) + 1
    addends, batch = frozenset({2} if bias else ()), "b" * channel
    linear = (frozenset({0, *addends}),)
    transposed = "transpose" in str(op.target) or op.args.get("transposed")
    if op.args["groups"] == 1:
        weight = "io" if transposed else "oi"
        equation = f"{batch}i{space},{weight}{space}{',o' * bias}->{batch}o{space}"
        return einsum(op, equation, linear=linear, addends=addends, empty=False)
    # With groups no letter says what splits: a channel is (group, place in it), and either may be dealt by itself.
    equation = f"{batch}_{space},__{space}{',_' * bias}->{batch}_{space}"
    base = einsum(op, equation, linear=linear, empty=False)
    factors = [*_groups(op, channel), *_within(op, channel, bool(transposed))]
    contracts = any(f.contracts for f in factors)
    base = replace(base, localise=_group_count, addends=addends if contracts else frozenset[int]())
    return with_factors(base, factors)


def _groups(op: Op, channel: int) -> list[Factor]:
    """Groups of channels, those of the operands with those of the result."""
    groups = op.args["groups"]
    x, w, y = (divide(s[d], groups) for s, d in ((op.ins[0], channel), (op.ins[1], 0), (op.outs[0], channel)))
    if x is None or w is None or y is None:
        return []
    ins = (Carry(channel, unit=x), Carry(0, unit=w), *[Carry(0, unit=y) for _ in op.ins[2:]])
    return [Factor(groups, ins, (Carry(channel, unit=y),), label="g")]


def _within(op: Op, channel: int, transposed: bool) -> list[Factor]:
    """The channels of a group, the same ones of every group: those of its input are contracted, as without groups."""
    groups, lasts = op.args["groups"], op.ins[2:]
    few, many = divide(op.ins[0][channel], groups), divide(op.outs[0][channel], groups)
    every = Carry(channel, repeat=groups)
    first, second = Carry(0, repeat=groups), Carry(1)
    inner, outer = (first, second) if transposed else (second, first)
    of_bias = [Carry(0, repeat=groups) for _ in lasts]
    factors = []
    if few is not None and few != 1:
        factors.append(Factor(few, (every, inner, *[None for _ in lasts]), (None,), label="i"))
    if many is not None and many != 1:
        factors.append(Factor(many, (None, outer, *of_bias), (every,), label="o"))
    return factors


def _group_count(op: Op, local: ShardCall) -> Any:
    """The call of a rank: of whole groups it has fewer."""
    if local.factor is not None and local.factor.label == "g":
        return local_count("groups", 1, 0)(op, local)
    return local.unchanged(op)


@rule(aten.max_pool1d, aten.max_pool2d, aten.max_pool3d, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
@rule(aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d)
@rule(aten.adaptive_max_pool1d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
@rule(aten.max_pool1d_with_indices, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
@rule(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten.upsample_linear1d)
@rule(aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d)
@rule(aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa)
@rule(aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)
def positions(op: Op) -> Rule:
    """Rule of positions: what comes before the one, two or three dimensions of positions is free; all but maxima are
    linear."""
    name = op.target.overloadpacket.__name__
    space = "_" * next(n for n in (1, 2, 3) if f"{n}d" in name)
    results = ",".join([f"...{space}"] * len(op.outs))
    return einsum(op, f"...{space}->{results}", linear=() if "max" in name else THROUGH, empty=False)


@rule(aten.grid_sampler.default)
def grid_sampler(op: Op) -> Rule:
    """Images are read at the grid's positions, which are independent of each other."""
    to = "xyz"[: len(op.ins[0]) - 2]
    return einsum(op, f"bc{'_' * len(to)},b{to}_->bc{to}", linear=THROUGH, empty=False)


@rule(aten.im2col.default, aten.col2im.default)
def columns(op: Op) -> Rule:
    """Every channel becomes a window of rows, and back."""
    there = op.target is aten.im2col.default
    image, rows = (op.ins[0], op.outs[0]) if there else (op.outs[0], op.ins[0])
    window = divide(rows[-2], image[-3])
    if window is None:
        return Rule()
    batch = [Factor(image[0], (Carry(0),), (Carry(0),))] * (len(rows) - 2)
    one, many = Carry(len(image) - 3), Carry(len(rows) - 2, unit=window)
    before, after = (one, many) if there else (many, one)
    return Rule((*batch, Factor(image[-3], (before,), (after,))), THROUGH, empty=False)


@rule(aten.pixel_shuffle, aten.pixel_unshuffle)
def pixel_shuffle(op: Op) -> Rule:
    """Rows, columns and channels move together: a pixel of one side is a square of channels on the other."""
    few, many = (op.ins[0], op.outs[0]) if op.target is aten.pixel_shuffle.default else (op.outs[0], op.ins[0])
    n, r = len(few), divide(many[-1], few[-1])
    if r is None:
        return Rule()
    squares = [Carry(d) for d in range(n - 3)] + [Carry(n - 3, unit=r * r), Carry(n - 2), Carry(n - 1)]
    pixels = [Carry(d) for d in range(n - 2)] + [Carry(n - 2, unit=r), Carry(n - 1, unit=r)]
    ins, outs = (squares, pixels) if few is op.ins[0] else (pixels, squares)
    sizes = [*many[: n - 2], *few[n - 2 :]]
    return Rule(tuple(Factor(s, (a,), (b,)) for s, a, b in zip(sizes, ins, outs, strict=True)), THROUGH, empty=False)
