"""The logical axes of a model in its graph: heads, mlp, vocab, embed, batch. Read off structure alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import fx

from autotp.ir.graph import tensors
from autotp.ir.op import Op, Rule, factors_of
from autotp.ir.program import GraphPart

from .dataflow import Dataflow

AXES = ("heads", "mlp", "vocab", "embed", "batch", "sequence")


class PortDims(NamedTuple):
    """Dimensions `dims` of operand (`side` "in") or result ("out") number `slot` of an operator."""

    node: fx.Node
    side: str
    slot: int
    dims: tuple[int, ...]


def find_axes(flow: Dataflow, parts: Sequence[GraphPart]) -> dict[str, list[PortDims]]:
    """Find every axis but the sequence, with the ports that decide whether it is split.

    heads: the queries of an attention. mlp: what the last product of a feed-forward block sums over. vocab: the rows of
    the token embedding and the columns of the head. embed: the columns of the token embedding, and what the first
    products of attention, feed-forward block and head sum over. batch: the inputs' first dimension.

    Args:
        flow: of the canonical graph. parts: of it.
    """
    out = {name: [] for name in AXES if name != "sequence"}
    vocabulary = _vocabulary(flow, parts)
    for part in parts:
        # Heads that are folded into the batch dimension have no dimension of their own.
        if part.heads is not None and part.heads.at[2]:
            out["heads"].append(PortDims(part.heads.at[0], "in", *part.heads.at[1:]))
        products = [n for n in part.nodes if flow.weighted(n)]
        # The last product sums over the width between: gate and up projection, before it, make that width.
        if part.kind == "mlp":
            out["mlp"] += _activations(flow, products[-1])
        if part.kind in ("attention", "mlp", "head"):
            # Only products that read the stream: a down projection sums over the width between, not over the
            # embedding's.
            others = [n for n in products if not set(flow.back(flow.inputs(n))[1]) & set(part.nodes)]
            for product in others:  # that read what other blocks compute
                out["embed"] += _activations(flow, product)
        if part.kind == "head":
            last = len(flow.ops[products[0]].outs[0]) - 1
            out["vocab"].append(PortDims(products[0], "out", 0, (last,)))
        # A BERT embeds positions (512 rows) and token types (2) as well: the rows of neither are the vocabulary.
        if part.kind == "embedding" and flow.ops[part.nodes[0]].ins[0][0] in vocabulary:
            table = flow.ops[part.nodes[0]]
            out["vocab"].append(PortDims(part.nodes[0], "in", 0, (0,)))
            out["embed"].append(PortDims(part.nodes[0], "out", 0, (len(table.outs[0]) - 1,)))
    inputs = {leaf.node for leaf in flow.program.inputs}
    for node, op in flow.ops.items():
        # A size or a number that is read off an input has no tensor to split.
        if tensors(node):
            out["batch"] += [PortDims(node, "in", i, (0,)) for i, s in enumerate(op.slots) if s in inputs and op.ins[i]]
    return out


def _vocabulary(flow: Dataflow, parts: Iterable[GraphPart]) -> set[object]:
    """Give the numbers of rows that a token embedding may have: as many as the head has columns.

    Positions and token types are embedded too: a BERT has tables of 30522, 512 and 2 rows. Without a head it is the
    largest table.
    """
    width: set[object] = {flow.ops[part.nodes[0]].outs[0][-1] for part in parts if part.kind == "head"}
    if width:
        return width
    rows = [flow.ops[part.nodes[0]].ins[0][0] for part in parts if part.kind == "embedding"]
    return {max((n for n in rows if isinstance(n, int)), default=0)}


def summed(op: Op, rule: Rule | None) -> list[PortDims]:
    """List the dimensions of each operand that an operator sums over."""
    sums = [f.ins for f in factors_of(rule) if not any(f.outs)]
    ports = []
    for i in range(len(op.slots)):
        dims = tuple(c.dim for ins in sums if (c := ins[i]) is not None)
        ports.append(PortDims(op.node, "in", i, dims))
    return ports


def _activations(flow: Dataflow, product: fx.Node) -> list[PortDims]:
    """List the dimensions of a product's activations that it sums over."""
    op = flow.ops[product]
    ports = (port for port in summed(op, flow.rules[product]) if port.dims and op.ins[port.slot])
    return [port for port in ports if op.slots[port.slot] not in flow.weights]
