"""Records that the stages hand on: the planned capture, the program of the ranks, the solver's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .decisions import Decision
from .graph import Capture, Value, tensors
from .layouts import I, Layout, Layouts, R, Size
from .op import Factor, Op, Rule

# Values that hold the ends of groups, by number: one for each of the blocks that share a decision, in graph order.
EndsTable = tuple[tuple[Value, ...], ...]


Parts = Mapping[int, float]  # dimension -> the part of the sequence that it holds


@dataclass
class Past:
    """Values of earlier tokens, as a step of decoding reads them in a program of whole sequences.

    Attributes:
        values: values that are as long as the cache, with the dimensions along which they are. stored: those of them
            that a cache holds.
        sides: such dimensions of every operand and result of an operator that reads some. steps: the part of its
            arithmetic on whole sequences that one step does.
        copies: values that repeat others, such as keys once for every head of the query, and how often: a step reads
            the originals (`passes/optimise/cached_attention.py`).
    """

    values: dict[Value, Parts] = field(default_factory=dict)
    stored: frozenset[Value] = frozenset()
    sides: dict[fx.Node, list[Parts]] = field(default_factory=dict)
    steps: dict[fx.Node, float] = field(default_factory=dict)
    copies: dict[Value, float] = field(default_factory=dict)


@dataclass
class Planned:
    """A captured graph with a decision for every node."""

    program: Capture
    tp: int
    decisions: dict[fx.Node, Decision]
    ops: dict[fx.Node, Op]
    rules: dict[fx.Node, Rule | None]
    same: dict[fx.Node, fx.Node]
    grads: set[fx.Node]
    solution: Solution | None = None
    states: dict[str, Layout] = field(default_factory=dict)  # of what the program carries: Replicate, or Shard
    ends: EndsTable = ()  # what `Groups.ends` numbers
    past: Past = field(default_factory=Past)

    @cached_property
    def trained(self) -> set[fx.Node]:
        """Leaves that have a gradient."""
        return {leaf.node for leaf in self.program.leaves if leaf.kind.trained}

    def split(self, node: fx.Node) -> Factor | None:
        """Return the loop along which an operator is split; None where it is not."""
        rule, decision = self.rules.get(node), self.decisions.get(node)
        return None if rule is None or decision is None or decision.factor is None else rule.factors[decision.factor]


class Decided(NamedTuple):
    """Decisions of a program by the names of its nodes, and layouts of its states, for a rank that has the graph."""

    decisions: Mapping[str, Decision]
    states: Layouts


class MeshPlace(NamedTuple):
    """A rank's place on a mesh axis: its rank there, the axis's size, and the name of the process group."""

    rank: int
    size: int
    group: str


@dataclass
class Sharded:
    """A per-rank program before the rank is known.

    Attributes:
        layouts: of each node. origin: the whole value of which each node is a part.
        ends: node that holds the ends of groups, for each node of Grouped rows.
        states: layouts of what is carried from call to call, alike going in and out.
        pieces: programs of the stages that it is cut into (`autotp.passes.stages.cut`).
        lifetimes: of its values, once they were asked for.
    """

    graph: fx.Graph
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    origin: dict[fx.Node, Value] = field(default_factory=dict)
    ends: dict[fx.Node, fx.Node] = field(default_factory=dict)
    states: dict[str, Layout] = field(default_factory=dict)
    pieces: tuple[Any, ...] = ()
    lifetimes: Any = field(default=None, init=False, repr=False, compare=False)

    def result(self, position: int) -> tuple[Layout, Tensor]:
        """Return the layout of the output at this position, and the (fake) whole value."""
        output = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        output_node = output.args[0][position]  # type: ignore[index]
        node, index = self.origin[output_node]  # type: ignore[index]
        return self.layouts[output_node], tensors(node)[index]  # type: ignore[index]


@dataclass(frozen=True)
class Solution:
    """Solution of the integer program: the chosen index per item, with what was proved of it.

    Attributes:
        choices: index of each item's choice.
        seconds: of all items and conversions. bound: a lower bound of any assignment within the same bytes.
        least_parameter_bytes: the least bytes of parameters per rank that any assignment reaches.
        parameter_bytes: those of this one. budget_bytes: the part that counts against the memory budget.
        least_seconds: the least of any assignment within the same bytes; this one may take the band longer.
        sent_bytes, collectives: what a rank sends in a step.
        rival: the plan that this one is compared with, where there is one.
        terms: its totals, by the names of the cost's terms.
        stopped_after: the CPU seconds that ended the search for a better one; None where it came to its end.
    """

    choices: tuple[int, ...]
    seconds: float
    bound: float
    least_parameter_bytes: float
    parameter_bytes: float
    budget_bytes: float = 0.0
    least_seconds: float = 0.0
    sent_bytes: float = 0.0
    collectives: int = 0
    rival: Solution | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    stopped_after: float | None = None


# ---- named parts -----------------------------------------------------------------------------------------------------

# The named parts of a model: attention with its heads, feed-forward, embedding, head.

# An operator, one of its operand slots, and the dimensions of that operand that hold the heads.
HeadDims = tuple[fx.Node, int, tuple[int, ...]]


@dataclass(frozen=True)
class Heads:
    """Head counts of an attention, widths of a query's and a value's head, and the dimensions of query and kv heads."""

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


# ---- what is sent ----------------------------------------------------------------------------------------------------

# Values that are sent in fewer bytes than they have: numbers in a narrower type, or the largest of each row.

NARROW: dict[str, torch.dtype] = {"autotp.float8_cast.default": torch.float8_e4m3fn}
ARITHMETIC: dict[str, str] = {  # operators whose products are of another type than their results
    "autotp.float8_linear.default": "float8_e4m3fn",
    "autotp.float8_rows.default": "float8_e4m3fn",
    "autotp.float8_rows_hp.default": "float8_e4m3fn",
    "autotp.float8_delayed.default": "float8_e4m3fn",
}
GATHERS = ("all_gather", "all_to_all")  # primitives that add nothing up: sums of such numbers are none


def sent_as(target: Any, primitive: str | None) -> torch.dtype | None:
    """Return the type in which a primitive sends an operator's result; None for its own."""
    return NARROW.get(str(target)) if primitive in GATHERS else None


def packed(x: Tensor, wire: torch.dtype | None) -> Tensor:
    """Pack the numbers as bytes of `wire`, which every backend carries."""
    return x if wire is None else x.to(wire).view(torch.uint8)


def unpacked(x: Tensor, wire: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """Restore what `packed` was given, in this type."""
    return x if wire is None else x.view(wire).to(dtype)


PAIR = 16  # bytes of a value and its place, two numbers of 64 bits: what a rank sends of a row for an argmax


def argmax_share(node: fx.Node, src: Layout, dst: Layout, tp: int) -> float | None:
    """Return the part of a value's bytes that greedy `generate()` sends: ranks exchange the largest of each row.

    Args:
        node: of the value. src, dst: the layouts before and after a gather. tp: ranks, of which each has a pair a row.

    Returns: None where the value is read by other operators, or is not split in columns: it is gathered.
    """
    value = next(iter(tensors(node)), None)
    if value is None or not value.dtype.is_floating_point or any(user.op != "output" for user in node.users):
        return None
    if dst not in (I, R) or src.sharded_dim != value.ndim - 1 or not isinstance(value.shape[-1], int):
        return None
    return min(1.0, PAIR * tp / (value.shape[-1] * value.element_size()))
