"""Patterns of GeLU with a bias."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autotp.ir.marks import write
from autotp.ir.op import aten
from autotp.kernels.common import DTYPES

from .judged import Rewrite
from .matching import Call, Either, Name, calls, closed, find, put, scope_of, summable, value_of

OPS: Any = torch.ops.autotp
X = Name("x")
CUBIC = Call(aten.mul, (Call(aten.pow, (X, 3.0)), 0.044715))
TANH = Call(aten.tanh, (Call(aten.mul, (Call(aten.add, (X, CUBIC)), math.sqrt(2 / math.pi))),))
SHIFTED = Call(aten.add, (TANH, 1.0))
GELU = {  # how it is called, or written out
    "gelu": Call(aten.gelu, (X,)),
    "gelu_tanh": Either(
        (
            Call(aten.gelu, (X,), {"approximate": "tanh"}),
            Call(aten.mul, (Call(aten.mul, (X, 0.5)), SHIFTED)),
            Call(aten.mul, (Call(aten.mul, (X, SHIFTED)), 0.5)),
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
