"""What Megatron's hand-written plan sends for a model, counted from its blocks and priced by the same cost model.

Shoeybi et al. 2019: attention by heads and feed-forward blocks by columns, then rows. Each block's result is
all-reduced forward (g there, f* here), and the gradient of what it reads backward (f). The token embedding is split by
rows: its result is all-reduced forward. The head is split by columns: the gradient of what it reads is all-reduced, and
the logits are gathered, for they are wanted whole. Sequence parallelism (Korthikanti et al. 2022) sends the same bytes,
and the gradients of the norms' weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autotp.cost import call_seconds, collective_bytes
from autotp.cost.solver.solve import solve
from autotp.errors import PlanError
from autotp.ir.graph import resolve, tensors
from autotp.ir.parts import GraphPart
from autotp.ir.program import Planned
from autotp.passes.analysis.axes import find_axes
from autotp.passes.shard.planner import Builder

FEED_FORWARD = ("mlp", "experts")
AXES = ("heads", "mlp", "vocab")  # what it splits
COVERED = 0.9  # of the weights in matrices must lie in attention and feed-forward blocks for the count to apply
LAYER = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


@dataclass(frozen=True)
class Sent:
    """One collective: its primitive, the whole value's bytes, and whether it runs in the backward."""

    primitive: str
    bytes: float
    backward: bool


def hand_plan(planned: Planned, builder: Builder, found: Sequence[GraphPart], sequence: bool = False) -> list[Sent]:
    """The collectives of Megatron's plan; none where it has none: heads that tp does not divide, or a model that is not
    mostly attention and feed-forward blocks. `sequence`: with sequence parallelism."""
    counter = _Counter(planned, builder)
    heads = [f.heads.count for f in found if f.heads is not None]
    uneven = any(not isinstance(n, int) or n % planned.tp for n in heads)
    if not heads or uneven or counter.covered(found) < COVERED:
        return []
    sparse = {layer(f.module) for f in found if f.kind == "experts"}
    head = [f for f in found if f.kind == "head"]
    rows = {counter.rows(f) for f in found if f.kind == "embedding"}
    vocabulary = {planned.ops[f.nodes[-1]].outs[0][-1] for f in head} & rows or {max(rows, key=str, default=0)}
    out: list[Sent] = []
    for f in found:
        mixture = f.kind in FEED_FORWARD and layer(f.module) in sparse
        if f.kind == "attention" or f.kind == "mlp" and not mixture:
            out += counter.block(f)
        elif f.kind == "experts":  # with its router and shared expert: as much as an attention's
            out += [s for s in out if s.primitive == "all_reduce"][-2:]
        elif f.kind == "embedding" and counter.rows(f) in vocabulary:
            out.append(Sent("all_reduce", counter.size(f.nodes[0]), False))
        elif f.kind == "head":
            out += [s for s in counter.block(f) if s.backward]
            out.append(Sent("all_gather", counter.size(f.nodes[-1]), False))
        elif f.kind == "norm" and sequence:
            out += [Sent("all_reduce", counter.size(p), True) for p in f.parameters]
    return out


def priced(sent: Sequence[Sent], builder: Builder) -> tuple[float, float]:
    """Bytes that a rank sends by these collectives, and seconds; those of the backward only where the plan trains."""
    counted = [s for s in sent if builder.objective.training or not s.backward]
    nbytes = sum(collective_bytes(s.primitive, s.bytes, builder.tp) for s in counted)
    return nbytes, sum(call_seconds(s.primitive, s.bytes, builder.tp, builder.cluster) for s in counted)


def hand_step(builder: Builder) -> float:
    """Seconds of a step of Megatron's plan by the same cost model: the fastest plan that splits heads, feed-forward
    width and vocabulary as it does. 0 where the rules, the user's pins or the memory leave no such plan."""
    known = {n: (op, builder.rules[n]) for n, op in builder.ops.items()}
    axes = find_axes(builder.program, known)
    split = {axis: 0 for axis in AXES if axes[axis]}
    try:
        return solve(replace(builder, pins={**split, **builder.pins}).build()[0]).seconds
    except PlanError:
        return 0.0


def layer(path: str) -> str:
    """The repeated layer that a module path or a parameter's name lies in: up to the first number; "" for none."""
    found = LAYER.match(path)
    return found.group(1) if found else ""


@dataclass
class _Counter:
    planned: Planned
    builder: Builder

    def size(self, node: fx.Node) -> float:
        return self.builder.prices.bytes(tensors(node)[0])

    def rows(self, found: GraphPart) -> object:
        return self.planned.ops[found.nodes[0]].ins[0][0]

    def covered(self, found: Sequence[GraphPart]) -> float:
        """Share of the weights in matrices, embeddings and heads aside, that attention and feed-forward blocks hold."""
        leaves = [x.node for x in self.planned.program.leaves if x.kind.trained]
        sizes = {n: torch.Size(n.meta["val"].shape).numel() for n in leaves if n.meta["val"].ndim > 1}

        def held(kinds: Sequence[str]) -> int:
            return sum(sizes.get(n, 0) for n in {n for f in found if f.kind in kinds for n in f.parameters})

        return held(("attention", *FEED_FORWARD)) / max(sum(sizes.values()) - held(("embedding", "head")), 1)

    def block(self, found: GraphPart) -> list[Sent]:
        """A sum over ranks of what the last products make, and of the gradients of what the first ones read."""
        inside = set(found.nodes)
        products = [n for n in found.nodes if n in self.planned.ops and self._product(n)]
        behind = {n: self._behind(n, inside) for n in products}
        last = [n for n in products if not any(n in walked for walked, _ in behind.values())]
        first = [n for n in products if not any(m in behind[n][0] for m in products)]
        read = dict.fromkeys(x for n in first for x in behind[n][1] if x in self.planned.grads)
        out = [Sent("all_reduce", self.size(n), False) for n in last[-1:]]
        return [*out, *(Sent("all_reduce", self.size(x), True) for x in read)]

    def _product(self, node: fx.Node) -> bool:
        """Whether the operator sums products of a parameter and something else, or runs without a rule on one."""
        op, rule = self.planned.ops[node], self.planned.rules[node]
        weighted = any(s in self.builder.prices.weights for s in op.slots)
        summed = rule is None or any(
            all(c is None for c in f.outs) and sum(c is not None for c in f.ins) > 1 for f in rule.factors
        )
        return weighted and summed

    def _behind(self, node: fx.Node, inside: set[fx.Node]) -> tuple[set[fx.Node], dict[fx.Node, None]]:
        """The block's operators behind one of its own, and the values from outside that they all read."""
        walked: set[fx.Node] = set()
        outside: dict[fx.Node, None] = {}
        work = [s for s in self.planned.ops[node].slots if s not in self.builder.prices.weights]
        while work:
            n = resolve(work.pop())[0]
            if n not in inside:
                outside[n] = None
            elif n not in walked:
                walked.add(n)
                work += [s for s in self.planned.ops[n].slots if s not in self.builder.prices.weights]
        return walked, outside
