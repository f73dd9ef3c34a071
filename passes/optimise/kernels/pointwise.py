"""Where GeLU with a bias and gated activations are in a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autotp.ir.marks import mark, write
from autotp.ir.op import aten, sizes
from autotp.kernels.common import DTYPES
from autotp.passes.optimise.matching import (
    Call,
    Either,
    Match,
    Name,
    calls,
    closed,
    find,
    put,
    scope_of,
    summable,
    value_of,
)

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
ACTIVATIONS = {**GELU, "silu": Either((Call(aten.silu, (X,)), Call(aten.mul, (X, Call(aten.sigmoid, (X,))))))}


def gate(node: fx.Node) -> fx.Node | None:
    """`activation(x) * y`, x and y being of one shape."""
    for activation, match in _gates(node):
        return put(OPS.gated.default, (match["x"], match["y"], activation), match.nodes, node)
    return None


def gate_of_halves(node: fx.Node) -> fx.Node | None:
    """The same where x and y are the halves of one value, and nothing else reads them."""
    for activation, match in _gates(node):
        x, y = match["x"], match["y"]
        split = _halved(x, y)
        if split is not None and closed(nodes := (split, x, y, *match.nodes), [node]):
            return put(OPS.gated_halves.default, (split.args[0], activation, x.args[1] == 0), nodes, node)
    return None


def _gates(node: fx.Node) -> Iterator[tuple[str, Match]]:
    if calls(node, aten.mul) and value_of(node).dtype in DTYPES:
        for activation, pattern in ACTIVATIONS.items():
            match = find(Call(aten.mul, (pattern, Name("y"))), node)
            factors = [] if match is None else [match["x"], match["y"]]
            if match is not None and factors[0] is not factors[1] and all(_alike(x, node) for x in factors):
                yield activation, match


def _halved(x: fx.Node, y: fx.Node) -> fx.Node | None:
    """The call that cuts the last dimension of a value into these two, which are of one size."""
    if x.target is not operator.getitem or y.target is not operator.getitem or x.args[0] is not y.args[0]:
        return None
    split = x.args[0]
    if not isinstance(split, fx.Node) or not calls(split, aten.split_with_sizes, aten.chunk, aten.split):
        return None
    source, lengths, dim, *_ = (*split.args, 0)
    own, whole = sizes(value_of(x)), sizes(value_of(source))  # type: ignore[arg-type]
    equal = not isinstance(lengths, Sequence) or lengths[0] == lengths[1]
    last = dim % len(own) == len(own) - 1  # type: ignore[operator]
    return split if last and equal and whole[-1] == 2 * own[-1] and x.args[1] != y.args[1] else None


def _alike(x: fx.Node, like: fx.Node) -> bool:
    """Whether both are of one shape and dtype, as wholes and on this rank."""
    a, b = value_of(x), value_of(like)
    return sizes(a) == sizes(b) and a.dtype == b.dtype and mark(x).layout == mark(like).layout


def bias_then_gelu(node: fx.Node) -> fx.Node | None:
    """GeLU of a product with a bias; the product goes on without it, and the kernel adds it in float32."""
    for activation, pattern in GELU.items():
        match = find(pattern, node)
        if match is not None and value_of(node).dtype in DTYPES and summable(node):
            product = match["x"]
            between = (product,) if calls(product, aten.reshape, aten.view) else ()
            product = product.args[0] if between else product
            if _biased(product) and closed([product, *between, *match.nodes], [node]):
                return _split(product, between, match.nodes, activation == "gelu_tanh")
    return None


def _biased(product: Any) -> bool:
    """A product of matrices with a bias for each column."""
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
