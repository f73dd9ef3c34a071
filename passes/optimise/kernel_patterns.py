"""Patterns of norms, as one operator or written out, with the residual that is added before; and of GeLU with a
bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotp.ir.marks import write
from autotp.ir.op import aten, is_tensor, sizes
from autotp.ir.scopes import scope_path
from autotp.kernels.common import DTYPES
from autotp.kernels.norm import MAX_COLUMNS

from .expressions import (
    Call,
    Cast,
    Either,
    Name,
    call_in_place,
    calls,
    closed,
    find,
    one_region,
    put,
    scope_of,
    summable,
    value_of,
    whole_along,
)
from .judged import Rewrite

OPS: Any = torch.ops.autotp
X = Cast(Name("x"))
SQUARE = Either((Call(aten.pow, (X, 2.0)), Call(aten.square, (X,)), Call(aten.mul, (X, X))))
MEAN = Call(aten.add, (Call(aten.mean, (SQUARE, [-1], True)), Name("eps", number=True)))
ROOT = Either((Call(aten.rsqrt, (MEAN,)), Call(aten.pow, (MEAN, -0.5))))
NORMAL = Cast(Call(aten.mul, (X, ROOT)))
WRITTEN_OUT = (Cast(Call(aten.mul, (NORMAL, Name("weight")))), NORMAL)
EPS = torch.finfo(torch.float32).eps  # of torch.rms_norm, where none is given


@dataclass(frozen=True)
class FoundNorm:
    """A norm that a graph computes: of `x`, in `nodes`, of which the last one is the result."""

    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    centred: bool
    nodes: tuple[fx.Node, ...]

    @property
    def options(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.eps, self.centred


def norm(node: fx.Node) -> Rewrite | None:
    """Find LayerNorm or RMSNorm over the last dimension."""
    match = _match(node)
    if match is None:
        return None
    return call_in_place(OPS.norm.default, (match.x, *match.options), match.nodes, node, None)


def norm_of_sum(node: fx.Node) -> Rewrite | None:
    """Find a norm with the addition before it, where the module that calls the norm makes it."""
    match = _match(node)
    if match is None or not _added(match, node):
        return None
    x, residual = match.x.args[:2]
    return call_in_place(OPS.add_norm.default, (x, residual, *match.options), (match.x, *match.nodes), node, match.x)


def _match(node: fx.Node) -> FoundNorm | None:
    match = _operator(node) or _written_out(node)
    return match if match is not None and _fits(match, node) else None


def _operator(node: fx.Node) -> FoundNorm | None:
    if not calls(node, aten.layer_norm, aten.rms_norm) or node.kwargs or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    args: list[Any] = [*node.args, *[None] * 5]
    if calls(node, aten.rms_norm):
        return FoundNorm(args[0], args[2], None, EPS if args[3] is None else args[3], False, (node,))
    return FoundNorm(args[0], args[2], args[3], 1e-5 if args[4] is None else args[4], True, (node,))


def _written_out(node: fx.Node) -> FoundNorm | None:
    for pattern in WRITTEN_OUT:
        match = find(pattern, node)
        if match is not None:
            weight = match.names.get("weight")
            return FoundNorm(match["x"], weight, None, float(match["eps"]), False, match.nodes)
    return None


def _fits(match: FoundNorm, node: fx.Node) -> bool:
    """Say whether the kernel takes it: whole rows of a dtype that it knows, and vectors as long as they are."""
    x, out = value_of(match.x), value_of(node)
    columns = sizes(x)[-1] if x.ndim else 0
    vectors = [value_of(v) for v in (match.weight, match.bias) if v is not None]
    return (
        x.dtype in DTYPES
        and x.dtype == out.dtype
        and sizes(x) == sizes(out)
        and isinstance(columns, int)
        and columns <= MAX_COLUMNS
        and all(v.dtype in DTYPES and sizes(v) == sizes(x)[-1:] for v in vectors)
        and whole_along(match.x, -1)
        and summable(match.x)
    )


def _added(match: FoundNorm, node: fx.Node) -> bool:
    """Say whether what is normalised is a sum of two values of its own shape, made where the norm is called.

    A sum that another module makes stays there: it may be that module's output.
    """
    add = match.x
    if not calls(add, aten.add) or add.kwargs or not all(is_tensor(a) for a in add.args):
        return False
    total = value_of(add)
    alike = all(sizes(v) == sizes(total) and v.dtype == total.dtype for v in map(value_of, add.all_input_nodes))
    later = all(user > node for user in add.users if user not in match.nodes)
    nodes = [add, *match.nodes]
    return alike and later and one_region(nodes) and scope_of(nodes) == scope_path(add)


# ---- GeLU with a bias ------------------------------------------------------------------------------------------------

# Patterns of GeLU with a bias.

VALUE = Name("x")
CUBIC = Call(aten.mul, (Call(aten.pow, (VALUE, 3.0)), 0.044715))
TANH = Call(aten.tanh, (Call(aten.mul, (Call(aten.add, (VALUE, CUBIC)), math.sqrt(2 / math.pi))),))
SHIFTED = Call(aten.add, (TANH, 1.0))
GELU = {  # how it is called, or written out
    "gelu": Call(aten.gelu, (VALUE,)),
    "gelu_tanh": Either(
        (
            Call(aten.gelu, (VALUE,), {"approximate": "tanh"}),
            Call(aten.mul, (Call(aten.mul, (VALUE, 0.5)), SHIFTED)),
            Call(aten.mul, (Call(aten.mul, (VALUE, SHIFTED)), 0.5)),
        )
    ),
}


def bias_then_gelu(node: fx.Node) -> Rewrite | None:
    """Find GeLU of a product with a bias; the product goes on without it, and the kernel adds it in float32."""
    for activation, pattern in GELU.items():
        match = find(pattern, node)
        if match is not None and value_of(node).dtype in DTYPES and summable(node):
            product = match["x"]
            between = (product,) if calls(product, aten.reshape, aten.view) else ()
            product = product.args[0] if between else product
            nodes = product, *between, *match.nodes
            if _biased(product) and closed(nodes, [node]):
                return Rewrite(nodes, _split, (product, between, match.nodes, activation == "gelu_tanh"))
    return None


def _biased(product: Any) -> bool:
    """Say whether it is a product of matrices with a bias for each column."""
    if calls(product, aten.linear):
        bias = product.args[2] if len(product.args) > 2 else None
    else:
        bias = product.args[0] if calls(product, aten.addmm) and not product.kwargs else None
    return isinstance(bias, fx.Node) and value_of(bias).ndim == 1


def _split(product: fx.Node, between: tuple[fx.Node, ...], nodes: tuple[fx.Node, ...], tanh: bool) -> fx.Node:
    """Take the bias off the product and put the kernel at the end."""
    out = max(nodes)
    scope = scope_of([product, *between, *nodes])
    if calls(product, aten.linear):
        x, weight, bias = product.args[:3]
        product.args = (x, weight)
    else:
        bias, x, weight = product.args[:3]
        product.target, product.args = aten.mm.default, (x, weight)
    for node in (product, *between):
        write(node, scope=scope)
    new = put(OPS.bias_gelu.default, ((between or (product,))[-1], bias, tanh), nodes, out)
    write(new, scope=scope)
    return new
