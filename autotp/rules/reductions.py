"""Reductions and normalisations: what is reduced by a sum is contracted, everything else must stay whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotp.ir.layouts import Size, divide, simplify
from autotp.ir.op import Carry, Factor, Op, Rule, aten
from autotp.kernels.operators import OPS

from .core import broadcast, dim_labels, einsum, local_count, loops, masked, rule, with_factors

if TYPE_CHECKING:
    from .local import ShardCall


def _reduced(op: Op) -> list[int]:
    n, dims = len(op.ins[0]), op.args.get("dim")
    if dims is None or dims == [] or not n:  # a number has none
        return list(range(n))
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return [d % n for d in dims]


def _labels(op: Op) -> tuple[list, list]:
    n = len(op.ins[0])
    out = dim_labels(n, _reduced(op))
    if not op.args.get("keepdim"):
        out = [x for x in out if x is not None]
    return list(range(n)), out


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(op: Op) -> Rule:
    labels, out = _labels(op)
    return loops(op, [labels], [out], linear=(frozenset({0}),))


@rule(aten.nansum, aten.count_nonzero)
def counted(op: Op) -> Rule:
    """A sum over elements, in which the operator itself is not linear."""
    labels, out = _labels(op)
    return loops(op, [labels], [out])


@rule(aten.histc.default)
def histogram(op: Op) -> Rule:
    """Counts of the parts add up, between ends that do not depend on the data."""
    return einsum(op, "...->_") if op.args["min"] != op.args["max"] else Rule()


@rule(aten.mean.default, aten.mean.dim)
def mean(op: Op) -> Rule:
    labels, out = _labels(op)
    return loops(op, [labels], [out], linear=(frozenset({0}),), localise=_local_mean)


def _local_mean(op: Op, local: ShardCall):
    """Over a split dimension: the local sum over the whole count."""
    if not local.contracted:
        return local.unchanged(op)
    count: Size = 1
    for d in _reduced(op):
        count = simplify(count * op.ins[0][d])
    summed = local.emit(
        aten.sum.dim_IntList,
        (local.operand(0), _reduced(op), bool(op.args.get("keepdim"))),
        {"dtype": op.args["dtype"]},
    )
    return aten.div.Tensor, (summed, local.size(count)), {}


@rule(aten.amax, aten.max.default)
def largest(op: Op) -> Rule:
    """Maximum of the parts, and then of those."""
    labels, out = _labels(op)
    base = loops(op, [labels], [out], empty=False)
    return replace(base, factors=tuple(replace(f, reduction="max") for f in base.factors))


@rule(aten.amin, aten.max.dim, aten.min.dim, aten.var, aten.std, aten.prod.dim_int, aten.any.dim, aten.all.dim)
@rule(aten.argmax, aten.argmin, aten.logsumexp, aten.linalg_vector_norm, aten.norm, aten.var_mean, aten.median.dim)
@rule(
    aten.any.dims,
    aten.all.dims,
    aten.kthvalue,
    aten.linalg_norm,
    aten.std_mean,
    aten.aminmax,
    aten.mode,
    aten.nanmean,
    aten.nanmedian.dim,
)
def whole_reduction(op: Op) -> Rule:
    labels, out = _labels(op)
    return loops(op, [labels], [out] * len(op.outs), whole=frozenset(_reduced(op)))


@rule(aten.quantile.scalar, aten.nanquantile.scalar)
def quantile(op: Op) -> Rule:
    """Rule of a statistic, but that there is none of no numbers."""
    return replace(whole_reduction(op), empty=False)


@rule(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax, aten.cumsum, aten.cumprod, aten.sort, aten.topk)
@rule(aten.argsort, aten.logcumsumexp, aten._safe_softmax, aten.cummax, aten.cummin)
def along(op: Op) -> Rule:
    """Works along one dimension, which stays whole."""
    n = len(op.ins[0])
    if not n:
        return Rule()
    labels = list(range(n))
    linear = (frozenset({0}),) if op.target.overloadpacket is aten.cumsum else ()
    return loops(op, [labels], [labels] * len(op.outs), whole=frozenset({op.args["dim"] % n}), linear=linear)


@rule(aten.linalg_cross)
def cross(op: Op) -> Rule:
    """Works along one dimension, which stays whole; linear in either operand."""
    n = len(op.outs[0])
    linear = (frozenset({0}), frozenset({1}))
    return loops(op, broadcast(op, n), [list(range(n))], whole={op.args["dim"] % n}, linear=linear)


@rule(aten.cosine_similarity)
def cosine(op: Op) -> Rule:
    """Lengths and products along one dimension, which stays whole."""
    n = len(op.outs[0]) + 1
    d = op.args["dim"] % n
    return loops(op, broadcast(op, n), [[x for x in range(n) if x != d]], whole={d})


@rule(aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default)
def layer_norm(op: Op) -> Rule:
    normed = "_" * len(op.args["normalized_shape"])
    results = ",".join([f"...{normed}"] * len(op.outs))
    return einsum(op, f"...{normed}{f',{normed}' * len(op.ins[1:])}->{results}")


@rule(aten.group_norm.default)
def group_norm(op: Op) -> Rule:
    """Whole groups split with their channels; the batch too."""
    groups, whole = op.args["num_groups"], "b" + "_" * (len(op.ins[0]) - 1)
    unit = divide(op.ins[0][1], groups) or 1
    ins = (Carry(1, unit=unit), *[Carry(0, unit=unit)] * len(op.ins[1:]))
    channels = Factor(groups, ins, (Carry(1, unit=unit),), label="g")
    base = einsum(op, f"{whole}{',_' * len(op.ins[1:])}->{whole}", empty=False)
    return with_factors(replace(base, localise=local_count("num_groups", 0, 1)), [channels])


@rule(aten.instance_norm.default)
def instance_norm(op: Op) -> Rule:
    """Every channel of every example is on its own, unless the examples share running statistics."""
    if not op.args["use_input_stats"] or op.slot("running_mean") is not None:
        return Rule()
    space = "_" * (len(op.ins[0]) - 2)
    return einsum(op, f"bc{space}{',c' * len(op.ins[1:])}->bc{space}", empty=False)


@rule(aten.batch_norm.default)
def batch_norm(op: Op) -> Rule:
    """With running statistics every channel is on its own; in training they are shared state, so it runs whole.

    Without any, as where a weight is standardised, a channel's statistics are of all examples.
    """
    if op.args["training"]:
        own = op.slot("running_mean") is None and op.slot("running_var") is None
        space = "_" * (len(op.ins[0]) - 2)
        return einsum(op, f"_c{space}{',c' * len(op.ins[1:])}->_c{space}", empty=False) if own else Rule()
    return einsum(op, f"bc...{',c' * len(op.ins[1:])}->bc...", empty=False)


@rule(OPS.batch_norm.default, aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit.no_stats)
def functional_batch_norm(op: Op) -> Rule:
    """In training with the statistics as results: every channel is on its own, its statistics are of all examples."""
    if not op.args.get("training", True):
        return Rule()
    whole = f"_c{'_' * (len(op.ins[0]) - 2)}"
    return einsum(op, f"{whole}{',c' * len(op.ins[1:])}->{whole}{',c' * len(op.outs[1:])}", empty=False)


@rule(aten.glu.default)
def glu(op: Op) -> Rule:
    """The dimension holds the loop twice: values, then gates."""
    repeats = [1] * len(op.outs[0])
    repeats[op.dim()] = 2
    dims = enumerate(zip(op.outs[0], repeats, strict=True))
    return Rule(tuple(Factor(n, (Carry(i, repeat),), (Carry(i),)) for i, (n, repeat) in dims))


@rule(aten.diff.default)
def diff(op: Op) -> Rule:
    n = len(op.ins[0])
    labels = list(range(n))
    linear = (frozenset(range(len(op.ins))),)
    return loops(op, [labels] * len(op.ins), [labels], whole=frozenset({op.args["dim"] % n}), linear=linear)


@rule(aten._weight_norm.default)
def weight_norm(op: Op) -> Rule:
    """Every slice along one dimension is scaled to its own length (Salimans and Kingma 2016)."""
    labels = [masked(range(len(s)), {op.dim()}) for s in (*op.ins, *op.outs)]
    return loops(op, labels[:2], labels[2:], empty=False)


@rule(aten.stft)
def short_fourier(op: Op) -> Rule:
    """Signals are on their own; of one, every frequency needs all samples of its window."""
    window = ",_" * (len(op.ins) - 1)
    return einsum(
        op, f"..._{window}->...{'_' * (len(op.outs[0]) - len(op.ins[0]) + 1)}", linear=(frozenset({0}),), empty=False
    )


@rule(aten.fft_fft, aten.fft_fft2, aten.fft_fftn, aten.fft_ifft, aten.fft_ifft2, aten.fft_ifftn)
@rule(aten.fft_rfft, aten.fft_rfft2, aten.fft_rfftn, aten.fft_irfft, aten.fft_irfft2, aten.fft_irfftn)
def fourier(op: Op) -> Rule:
    """Transformed dimensions stay whole: every output of them needs every input."""
    labels = list(range(len(op.ins[0])))
    whole = frozenset(_reduced(op))
    return loops(op, [labels], [labels], whole=whole, linear=(frozenset({0}),), empty=False)
