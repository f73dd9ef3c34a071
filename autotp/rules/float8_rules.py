"""Products in float8: a scale is one more operand, and the largest value of a gradient is one more result."""

from __future__ import annotations

from dataclasses import replace

from autotp.ir.op import Op, Rule
from autotp.kernels import float8 as _operators  # noqa: F401  defines them
from autotp.kernels.operators import OPS

from .core import einsum, rule
from .reductions import largest


@rule(OPS.float8_amax.default)
def float8_amax(op: Op) -> Rule:
    """Rule of a maximum, to which a rank without elements adds nothing."""
    return replace(largest(op), empty=True)


@rule(OPS.float8_cast.default)
def float8_cast(op: Op) -> Rule:
    """By a scale of the whole value, wherever it is cast; rounding is not linear."""
    return einsum(op, "...,->...")


@rule(OPS.float8_linear.default)
def float8_linear(op: Op) -> Rule:
    """Rule of a linear layer, but that its gradient is rounded: it is never given as summands."""
    return _alike(einsum(op, "...k,nk,,->...n,", summed=False))


@rule(OPS.float8_delayed.default)
def float8_delayed(op: Op) -> Rule:
    """Rule of `float8_linear`; what earlier calls had, and where the backward writes, every rank has whole."""
    return _alike(einsum(op, "...k,nk,,_,->...n,", summed=False))


@rule(OPS.float8_before.default)
def float8_before(op: Op) -> Rule:
    """A history is one value, which every rank has."""
    return einsum(op, "__,->_")


@rule(OPS.float8_record.default)
def float8_record(op: Op) -> Rule:
    """And is made of largest values over all ranks."""
    return einsum(op, "__,,,->__")


@rule(OPS.float8_rows.default)
def float8_rows(op: Op) -> Rule:
    """Rule of `float8_linear` with a scale for each row of what is summed over: those lie as the rows do."""
    return _alike(einsum(op, "...k,nk,..._,n_,k,k->...n,..._,n", summed=False))


@rule(OPS.float8_rows_hp.default)
def float8_rows_hp(op: Op) -> Rule:
    """Rule of `float8_rows`, whose backward has one scale for the weight."""
    return _alike(einsum(op, "...k,nk,..._,n_,->...n,..._", summed=False))


@rule(OPS.float8_seen.default)
def float8_seen(op: Op) -> Rule:
    """Rule of the gradient's largest value: where it is split, each rank has the largest value of its part."""
    return _candidates(einsum(op, "...,->...", linear=(frozenset({0, 1}),), summed=False))


@rule(OPS.float8_row_seen.default)
def float8_row_seen(op: Op) -> Rule:
    """Rule of the gradient's largest value in each row."""
    return _candidates(einsum(op, "...n,..._->...n", linear=(frozenset({0, 1}),), summed=False))


@rule(OPS.float8_rows_seen.default)
def float8_rows_seen(op: Op) -> Rule:
    """Rule of the gradient's largest value in each row and each column."""
    return _candidates(einsum(op, "...n,..._,n->...n", linear=(frozenset({0, 1, 2}),), summed=False))


def _alike(base: Rule) -> Rule:
    """The results after the first one are zeros, which every rank has whole wherever they lack the loop."""
    return replace(base, factors=tuple(replace(f, alike=frozenset(range(1, len(f.outs)))) for f in base.factors))


def _candidates(base: Rule) -> Rule:
    """The gradients of the operands after the first one are maxima over the loop that these lack."""
    return replace(base, factors=tuple(replace(f, maxima=frozenset(range(1, len(f.ins)))) for f in base.factors))
