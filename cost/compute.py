"""Flops, bytes and seconds of an operator, by the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autotp import compat
from autotp.cost.machines.cluster import Cluster
from autotp.errors import InputError
from autotp.ir.graph import floating
from autotp.ir.op import operator_name, packet_of

from .terms import NOTHING, Cost


def op_seconds(flops: float, nbytes: float, dtype_name: str, cluster: Cluster) -> float:
    """Seconds of one kernel: arithmetic and memory traffic, and its launch; 0 for a view.

    The longer of arithmetic and memory traffic: the roofline model, Williams, Waterman and Patterson, "Roofline: an
    insightful visual performance model" (2009). What a product packs (`Cluster.packing`) adds to its arithmetic.

    Args:
        flops: floating-point operations, a multiply-add counting as two.
        nbytes: bytes read and written. An operator with neither flops nor bytes starts no kernel.
        dtype_name: of the arithmetic, as torch names it.
        cluster: gives peak rate, memory bandwidth and overheads.
    """
    return sum(op_cost(flops, nbytes, dtype_name, cluster).values())


def op_cost(flops: float, nbytes: float, dtype_name: str, cluster: Cluster) -> Cost:
    """The terms of `op_seconds`, whose arguments it takes: compute and launches."""
    if not flops and not nbytes:
        return NOTHING
    traffic = nbytes / cluster.memory_bandwidth
    packing = cluster.packing * traffic if flops else 0.0
    compute = max(flops / cluster.peak(dtype_name) + packing, traffic)
    return Cost(compute=compute, launches=cluster.launch_overhead * (cluster.product_launches if flops else 1.0))


def size_hint(size: int | torch.SymInt) -> int:
    """The size, or what a symbolic one was in the example inputs; 1 where only the data can tell (nonzero)."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return size


def tensor_bytes(val: Any) -> int:
    """Bytes of a node's value: a tensor's, the sum of a sequence's, 0 of anything else; symbolic sizes by hint."""
    if isinstance(val, torch.Tensor):
        return math.prod(map(size_hint, val.shape)) * val.dtype.itemsize
    return sum(map(tensor_bytes, val)) if isinstance(val, list | tuple) else 0


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of an ATen node, a multiply-add counting as two; symbolic sizes by hint.

    Counts what `torch.utils.flop_counter.FlopCounterMode` counts: matrix products, convolutions and attention
    (a causal one in full). Everything else is bound by memory and counts 0.

    Args:
        node: whose `meta["val"]`, and its inputs', are tensors (fake or meta ones do).

    Raises:
        InputError: an input of a counted operator has no `meta["val"]`.
    """
    formula, packet = _FORMULAS.get(operator_name(node.target)), packet_of(node.target)
    if formula is None and packet not in flop_registry:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)  # type: ignore[arg-type]
    if formula is not None:
        return int(formula(_value(node), *args, **kwargs))
    return int(flop_registry[packet](*args, **kwargs, out_val=_value(node)))


def peak_share(target: Any, cluster: Cluster) -> float:
    """Part of the peak rate that an operator reaches: fused attention has a rate of its own.

    Args:
        target: what the node calls. cluster: gives the rate.
    """
    return cluster.attention_rate if _FORMULAS.get(operator_name(target)) is _attention else 1.0


def _value(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise InputError(f"node {node.name} has no meta['val']: flops are counted on a captured graph, with shapes.")
    return example(node.meta["val"])


def example(val: Any, graded: bool = False) -> Any:
    """A value on the meta device, with the example inputs' sizes; memory of its own.

    Args:
        val: of a node. graded: its tensors ask for gradients, where they may have some.
    """
    if isinstance(val, torch.Tensor):
        shape, stride = (list(map(size_hint, sides)) for sides in (val.shape, val.stride()))
        x = torch.empty_strided(shape, stride, dtype=val.dtype, device="meta")
        return x.requires_grad_(graded and floating(x))
    if isinstance(val, list | tuple):
        return [example(v, graded) for v in val]
    return size_hint(val) if isinstance(val, torch.SymInt) else val


def _matmul(out: torch.Tensor, a: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every element of the result is a product of rows as long as `a`'s last dimension."""
    return 2 * out.numel() * a.shape[-1]


def _convolution(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every element of the result is a product of one filter, [out, in / groups, *kernel]."""
    return 2 * out.numel() * math.prod(weight.shape[1:])


def _transposed(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every element of the input is multiplied by one filter, [in, out / groups, *kernel]."""
    return 2 * x.numel() * math.prod(weight.shape[1:])


def _attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores from q [..., heads, s, d] and k [..., t, d], and their product with v [..., t, e]."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _recurrent(out: Any, x: torch.Tensor, hx: Any, *params: Any, **keywords: Any) -> int:
    """At every step every example is multiplied by all weights, of all layers, directions and gates."""
    weights = (w for w in compat.tree_leaves((params, keywords)) if isinstance(w, torch.Tensor) and w.dim() == 2)
    return 2 * math.prod(x.shape[:-1]) * sum(w.numel() for w in weights)


def _einsum(out: torch.Tensor, equation: str, operands: Sequence[torch.Tensor], *_: Any, **__: Any) -> int:
    """Products of pairs from left to right; a pair that shares no summed index is an elementwise product, 0."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = [_indices(t, x.dim()) for t, x in zip(inputs.split(","), operands, strict=True)]
    sizes = {}
    for term, x in zip(terms, operands, strict=True):
        sizes |= {i: max(n, sizes.get(i, 1)) for i, n in zip(term, x.shape, strict=True)}
    every = [i for term in terms for i in term]
    results = set(_indices(result, out.dim()))
    if not arrow:  # "ij,jk" has the indices that stand once
        results = {i for i in every if every.count(i) == 1 or "." in i}
    flops, indices = 0, set(terms[0])
    for at, term in enumerate(terms[1:], start=2):
        later, others = results.union(*terms[at:]), set(term)
        if (indices & others) - later:  # an index of one side alone that nothing needs is summed before the product
            flops += 2 * math.prod(sizes[i] for i in (indices & others) | ((indices | others) & later))
        indices = (indices | others) & later
    return flops


def _indices(term: str, dims: int) -> list[str]:
    """The index of each dimension; an ellipsis stands for ".1", ".2", ... counted from its right end."""
    head, _, tail = term.partition("...")
    return [*head, *(f".{i}" for i in range(dims - len(head) - len(tail), 0, -1)), *tail]


# Composite operators that torch.export keeps whole, and others that torch's registry lacks.
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten.linear": _matmul,
    "aten.matmul": _matmul,
    "aten.einsum": _einsum,
    "aten.scaled_dot_product_attention": _attention,
    "dealt_attention": _attention,
    "aten.conv1d": _convolution,
    "aten.conv2d": _convolution,
    "aten.conv3d": _convolution,
    "aten.conv_transpose1d": _transposed,
    "aten.conv_transpose2d": _transposed,
    "aten.conv_transpose3d": _transposed,
    **{f"aten.{kind}{cell}": _recurrent for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")},
    **{
        f"autotp.float8_{way}": lambda out, *operands, **_: _matmul(out[0], *operands)
        for way in ("linear", "rows", "rows_hp", "delayed")
    },
    "transformers.grouped_mm_fallback": _matmul,  # [tokens, k] by [experts, k, n], every token by one expert
}
