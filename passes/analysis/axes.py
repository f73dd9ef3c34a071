"""Where a model's logical axes lie in its graph: heads, mlp, vocab, embed, batch. Read off structure alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from autotp.ir.graph import Capture, tensors
from autotp.ir.op import Op, Rule
from autotp.ir.parts import GraphPart

from .blocks import find_blocks
from .dataflow import Dataflow

AXES = ("heads", "mlp", "vocab", "embed", "batch", "sequence")


class Spot(NamedTuple):
    """Dimensions `dims` of operand (`side` "in") or result ("out") number `slot` of an operator."""

    node: fx.Node
    side: str
    slot: int
    dims: tuple[int, ...]


def find_axes(program: Capture, known: Mapping[fx.Node, tuple[Op, Rule | None]]) -> dict[str, list[Spot]]:
    """Every axis but the sequence, with the spots that decide whether it is dealt.

    heads: the queries of an attention. mlp: what the last product of a feed-forward block sums over. vocab: the rows of
    the token embedding and the columns of the head. embed: the columns of the token embedding, and what the first
    products of attention, feed-forward block and head sum over. batch: the inputs' first dimension.
    """
    flow = Dataflow(program, known)
    found = find_blocks(program, {}, known)
    out: dict[str, list[Spot]] = {name: [] for name in AXES if name != "sequence"}
    width = {flow.ops[f.nodes[0]].outs[0][-1] for f in found if f.kind == "head"}
    rows = [flow.ops[f.nodes[0]].ins[0][0] for f in found if f.kind == "embedding"]
    vocabulary = width or {max((n for n in rows if isinstance(n, int)), default=0)}
    for f in found:
        if f.heads is not None and f.heads.at[2]:
            out["heads"].append(Spot(f.heads.at[0], "in", *f.heads.at[1:]))
        products = [n for n in f.nodes if flow.weighted(n)]
        if f.kind == "mlp":
            out["mlp"] += _summed(flow, products[-1])
        if f.kind in ("attention", "mlp", "head"):
            out["embed"] += [spot for n in _first(flow, f, products) for spot in _summed(flow, n)]
        if f.kind == "head":
            last = len(flow.ops[products[0]].outs[0]) - 1
            out["vocab"].append(Spot(products[0], "out", 0, (last,)))
        if f.kind == "embedding" and flow.ops[f.nodes[0]].ins[0][0] in vocabulary:
            table = flow.ops[f.nodes[0]]
            out["vocab"].append(Spot(f.nodes[0], "in", 0, (0,)))
            out["embed"].append(Spot(f.nodes[0], "out", 0, (len(table.outs[0]) - 1,)))
    inputs = {leaf.node for leaf in program.inputs}
    for n, op in flow.ops.items():
        if not tensors(n):
            continue
        out["batch"] += [Spot(n, "in", i, (0,)) for i, s in enumerate(op.slots) if s in inputs and op.ins[i]]
    return out


def _first(flow: Dataflow, found: GraphPart, products: list[fx.Node]) -> list[fx.Node]:
    """The products of a block that read what other blocks made."""
    return [n for n in products if not set(flow.back(flow.inputs(n))[1]) & set(found.nodes)]


def _summed(flow: Dataflow, product: fx.Node) -> list[Spot]:
    """The dimensions of a product's activations that it sums over."""
    rule, op, out = flow.rules[product], flow.ops[product], []
    for slot, operand in enumerate(op.slots):
        carried = [f.ins[slot] for f in (rule.factors if rule else ()) if all(c is None for c in f.outs)]
        dims = tuple(c.dim for c in carried if c is not None)
        if dims and operand not in flow.weights and op.ins[slot]:
            out.append(Spot(product, "in", slot, dims))
    return out
