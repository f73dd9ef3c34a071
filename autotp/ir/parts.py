"""The named parts of a model: attention with its heads, feed-forward, embedding, head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .layouts import Size

# An operator, one of its operand slots, and the dimensions of that operand that hold the heads.
HeadDims = tuple[fx.Node, int, tuple[int, ...]]


@dataclass(frozen=True)
class Heads:
    """Head counts of an attention, widths of a query's and a value's head, and where query and kv heads are seen."""

    count: Size
    kv: Size
    width: Size
    value: Size
    at: HeadDims
    kv_at: HeadDims


@dataclass(frozen=True)
class GraphPart:
    """A part of the graph.

    Attributes:
        kind: "attention", "mlp", "norm", "embedding", "head", "experts", "adapter", "other".
        detail: what it is in words.
        nodes: its operators, in the order of the graph.
        module: the innermost module that holds those with parameters.
        parameters: leaves that it reads.
        first: the equal part in the first of the repeated blocks; itself where there is none.
        heads: of an attention.
    """

    kind: str
    detail: str
    nodes: tuple[fx.Node, ...]
    module: str
    parameters: tuple[fx.Node, ...]
    first: int
    heads: Heads | None = None
