"""Collectives of Megatron's hand-written plan for a model, counted from its blocks, priced by the same cost model.

Shoeybi et al. 2019: attention by heads and feed-forward blocks by columns, then rows. Each block's result is
all-reduced forward (g there, f* here), and the gradient of what it reads backward (f). The token embedding is split by
rows: its result is all-reduced forward. The head is split by columns: the gradient of what it reads is all-reduced, and
the logits are gathered, for they are wanted whole. Sequence parallelism (Korthikanti et al. 2022) sends the same bytes,
and the gradients of the norms' weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autotp.cost.collective_costs import call_seconds, collective_bytes
from autotp.ir.graph import resolve, tensors
from autotp.ir.program import GraphPart
from autotp.passes.shard.decide import FEED_FORWARD, splits
from autotp.passes.shard.planner import Builder
from autotp.plans.plan import Plan

LAYER = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


@dataclass(frozen=True)
class CollectiveSend:
    """One collective: its primitive, the whole value's bytes, and whether it runs in the backward."""

    primitive: str
    bytes: float
    backward: bool


def priced(sends: Sequence[CollectiveSend], builder: Builder) -> tuple[float, float]:
    """Bytes that a rank sends by these collectives, and seconds; those of the backward only where the plan trains."""
    counted = [s for s in sends if builder.objective.training or not s.backward]
    nbytes = sum(collective_bytes(s.primitive, s.bytes, builder.tp) for s in counted)
    return nbytes, sum(call_seconds(s.primitive, s.bytes, builder.tp, builder.cluster) for s in counted)


def hand_bytes(plan: Plan) -> float:
    """Bytes that a rank sends in a step of Megatron's plan; 0 where it has none, or the plan was read from a file."""
    builder = plan.builder
    if not isinstance(builder, Builder):
        return 0.0
    summed = any(c.op == "parameter" and c.backward for c in plan.collectives)  # as sequence parallelism must
    return priced(hand_plan(builder, builder.parts, summed), builder)[0]


def hand_plan(builder: Builder, parts: Sequence[GraphPart], sequence: bool = False) -> list[CollectiveSend]:
    """The collectives of Megatron's plan, for each block those of Shoeybi et al. 2019.

    Args:
        builder: of the graph; gives sizes in bytes, and which values carry gradients.
        parts: the named parts of the graph.
        sequence: with sequence parallelism, under which the gradients of norms are sums over ranks.

    Returns:
        None of them where Megatron has no plan.
    """
    counter = _Counter(builder)
    if not splits(builder, parts):
        return []
    # Where a layer has experts, what looks like a feed-forward block beside them is a shared expert, counted with them.
    sparse = {layer(part.module) for part in parts if part.kind == "experts"}
    vocabulary = counter.vocabulary(parts)
    out: list[CollectiveSend] = []
    for part in parts:
        shared_expert = part.kind in FEED_FORWARD and layer(part.module) in sparse
        if part.kind == "attention" or part.kind == "mlp" and not shared_expert:
            out += counter.block(part)
        elif part.kind == "experts":  # with its router and shared expert: as much as an attention's
            out += [s for s in out if s.primitive == "all_reduce"][-2:]
        elif part.kind == "embedding" and counter.rows(part) in vocabulary:
            out.append(CollectiveSend("all_reduce", counter.size(part.nodes[0]), False))
        elif part.kind == "head":
            # Its scores are gathered, not summed: only the gradient of what it reads is a sum.
            out += [s for s in counter.block(part) if s.backward]
            out.append(CollectiveSend("all_gather", counter.size(part.nodes[-1]), False))
        elif part.kind == "norm" and sequence:
            out += [CollectiveSend("all_reduce", counter.size(p), True) for p in part.parameters]
    return out


def layer(path: str) -> str:
    """The repeated layer that a module path or a parameter's name lies in: up to the first number; "" for none."""
    match = LAYER.match(path)
    return match.group(1) if match else ""


@dataclass
class _Counter:
    builder: Builder

    def size(self, node: fx.Node) -> float:
        return self.builder.prices.bytes(tensors(node)[0])

    def rows(self, part: GraphPart) -> object:
        """Count the rows an embedding's table has."""
        return self.builder.ops[part.nodes[0]].ins[0][0]

    def vocabulary(self, parts: Sequence[GraphPart]) -> set[object]:
        """The rows of the token embedding: as many as the head has columns; without a head, of the largest table."""
        rows = {self.rows(part) for part in parts if part.kind == "embedding"}
        widths: set[object] = {self.builder.ops[part.nodes[-1]].outs[0][-1] for part in parts if part.kind == "head"}
        return widths & rows or {max(rows, key=str, default=0)}

    def block(self, part: GraphPart) -> list[CollectiveSend]:
        """A sum over ranks of what the last product computes, and of the gradients of what the first ones read."""
        inside = set(part.nodes)
        products = [n for n in part.nodes if n in self.builder.ops and self._product(n)]
        behind = {n: self._behind(n, inside) for n in products}
        walked = set().union(*(nodes for nodes, _ in behind.values()))
        # The last product is one that no other has behind it; the first ones have no other behind them.
        last = [n for n in products if n not in walked]
        first = [n for n in products if not behind[n][0] & set(products)]
        # q, k and v read one value, whose gradient is summed once.
        read = dict.fromkeys(x for n in first for x in behind[n][1] if x in self.builder.grads)
        out = [CollectiveSend("all_reduce", self.size(n), False) for n in last[-1:]]
        return [*out, *(CollectiveSend("all_reduce", self.size(x), True) for x in read)]

    def _product(self, node: fx.Node) -> bool:
        """Tell whether the operator sums products of a parameter and another, or runs without a rule on one."""
        op, rule = self.builder.ops[node], self.builder.rules[node]
        weighted = any(s in self.builder.prices.weights for s in op.slots)
        summed = rule is None or any(
            all(c is None for c in f.outs) and sum(c is not None for c in f.ins) > 1 for f in rule.factors
        )
        return weighted and summed

    def _behind(self, node: fx.Node, inside: set[fx.Node]) -> tuple[set[fx.Node], dict[fx.Node, None]]:
        """The block's operators behind one of its own, and the values from outside that they all read."""
        walked: set[fx.Node] = set()
        outside: dict[fx.Node, None] = {}
        work = [s for s in self.builder.ops[node].slots if s not in self.builder.prices.weights]
        while work:
            n = resolve(work.pop())[0]
            if n not in inside:
                outside[n] = None
            elif n not in walked:
                walked.add(n)
                work += [s for s in self.builder.ops[n].slots if s not in self.builder.prices.weights]
        return walked, outside
