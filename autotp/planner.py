"""From a captured graph to a decision problem and back: items, choices with their costs, and what was chosen."""

from __future__ import annotations

import fnmatch
import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autotp.cost import Cluster, collective_seconds, node_flops, op_seconds
from autotp.passes.fold import fold
from autotp.rules.core import Op, Rule, rule_of, sizes

from . import compat, conversions
from .errors import PlanError
from .graph import Capture, differentiable, short_name, size_hint
from .layouts import I, Layout, Partial, Partition, R, Shard
from .plan import Decision
from .problem import Choice, Item, Problem, Solution, Use
from .slices import to_runtime
from .solve import solve
from .strategies import Candidates, penalty, share, signatures

Value = tuple[fx.Node, int]
OUTPUT_SLOT = "output"


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


def resolve(node: fx.Node) -> Value:
    """The value behind a node: `getitem` nodes name a result of the operator before them."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0], int(node.args[1])  # type: ignore[arg-type]
    return node, 0


@dataclass
class Builder:
    """Builds the problem of one captured graph."""

    program: Capture
    tp: int
    cluster: Cluster
    pinned: Mapping[str, Layout] = field(default_factory=dict)
    pins: Mapping[str, int | None] = field(default_factory=dict)
    sequence: bool | None = None

    def __post_init__(self) -> None:
        self.grads = differentiable(self.program)
        self.same = fold(self.program, self.grads)
        nodes = list(self.program.graph.nodes)
        self.calls = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem and _planned(n)]
        self.ops = {n: Op.of(n) for n in self.calls}
        self.rules: dict[fx.Node, Rule | None] = {}
        for n in self.calls:
            self.rules[n] = rule_of(self.ops[n])
        self.leaves = {leaf.node: leaf for leaf in self.program.leaves if tensors(leaf.node)}
        self.candidates = Candidates(self.tp)

    def value(self, node: fx.Node) -> Value:
        producer, index = resolve(node)
        return self.same[producer], index

    def build(self) -> tuple[Problem, list[fx.Node]]:
        """The problem, and the representative node of each item."""
        members = Counter(self.same[n] for n in [*self.leaves, *self.calls])
        slots: dict[fx.Node, list[set[Value]]] = {}
        for n in self.calls:
            sets = slots.setdefault(self.same[n], [set() for _ in self.ops[n].slots])
            for held, operand in zip(sets, self.ops[n].slots, strict=True):
                held.add(self.value(operand))
        self._grow(slots)
        heads = [n for n in members if n in self.leaves] + [n for n in members if n not in self.leaves]
        items = [self._leaf(n, members[n]) if n in self.leaves else self._call(n, slots[n], members[n]) for n in heads]
        outputs = self._outputs()
        items.append(
            Item(
                OUTPUT_SLOT,
                [Choice(tuple(self._goal(n) for n in outputs), ())],
                [frozenset([self.value(n)]) for n in outputs],
            )
        )
        return Problem(items, self._uses({n: i for i, n in enumerate(heads)}, outputs), self.convert_seconds), heads

    def _outputs(self) -> list[fx.Node]:
        out = next(n for n in self.program.graph.nodes if n.op == "output")
        return [x for x in compat.tree_leaves(out.args) if isinstance(x, fx.Node) and tensors(x)]

    def _goal(self, node: fx.Node) -> Layout:
        return I if resolve(node)[0] in self.grads else R

    def _grow(self, slots: dict[fx.Node, list[set[Value]]]) -> None:
        """Seed the candidates and let them spread until nothing changes."""
        for node, leaf in self.leaves.items():
            if node is self.same[node]:
                self.candidates.seed((node, 0), shape_of(node), skip=(0,) if leaf.kind == "input" else ())
        work = [n for n in slots if self.rules[n] is not None]
        for n in work:
            self._seed_view(n)
        self.candidates.changed = True
        while self.candidates.changed:
            self.candidates.changed = False
            for n in (*work, *reversed(work)):
                rule = self.rules[n]
                assert rule is not None
                for factor in rule.factors:
                    self.candidates.spread(factor, [frozenset(s) for s in slots[n]], self._results(n))

    def _seed_view(self, node: fx.Node) -> None:
        """A dimension that a view splits off (heads off a hidden size) may be dealt by itself, whatever its size.

        The innermost part (the head size) is not seeded: dealing it out would cut every head.
        """
        rule = self.rules[node]
        assert rule is not None
        for factor in rule.factors:
            split, new = factor.ins[0] if factor.ins else None, factor.outs[0] if len(factor.outs) == 1 else None
            if split is None or new is None or split.unit == 1 or new.unit != 1 or new.repeat != 1:
                continue
            if isinstance(factor.size, int) and factor.size > 1:
                self.candidates.add(((node, 0), new.dim), Partition.plain(factor.size, self.tp))

    def _results(self, node: fx.Node) -> list[Any]:
        return [(node, i) for i in range(len(self.ops[node].outs))]

    def _leaf(self, node: fx.Node, count: int) -> Item:
        leaf, val = self.leaves[node], node.meta["val"]
        whole = I if node in self.grads else R
        layouts: list[Layout] = [whole]
        if leaf.kind == "parameter":
            layouts += [Shard(d, p) for d in range(val.ndim) for p in self.candidates.of.get(((node, 0), d), ())]
            layouts = self._pinned(leaf.name, layouts)
        stored = self._bytes(val) if leaf.kind == "parameter" else 0.0
        choices = [Choice((), (x,), stored=stored * self._share(x), penalty=penalty([x], self.tp)) for x in layouts]
        return Item(leaf.name, choices, [], [(node, 0)], count)

    def _pinned(self, name: str, layouts: list[Layout]) -> list[Layout]:
        """What pins leave of a parameter's layouts: exact ones of an earlier plan, or the user's dimension by pattern."""
        if name in self.pinned:
            return [self.pinned[name]]
        for pattern, dim in self.pins.items():
            if fnmatch.fnmatchcase(name, pattern):
                kept = [x for x in layouts if (x.dim if isinstance(x, Shard) else None) == dim]
                if not kept:
                    raise PlanError(
                        f"the pin {pattern!r} asks for Shard({dim}) of {name}, but no operator that uses it can be split "
                        f"there; it can be {', '.join(sorted({str(x) for x in layouts}))}. Change or drop the pin."
                    )
                return kept
        return layouts

    def _call(self, node: fx.Node, slots: list[set[Value]], count: int) -> Item:
        op, results = self.ops[node], self._results(node)
        held = [frozenset(s) for s in slots]
        ins = [resolve(s)[0] in self.grads for s in op.slots]
        outs = [node in self.grads] * len(op.outs)
        choices: dict[tuple, Choice] = {}
        for got in signatures(self.rules[node], ins, outs, held, results, self.candidates):
            choices.setdefault(got[:2], self._choice(op, *got))
        return Item(node.name, list(choices.values()), held, results, count)

    def _choice(
        self, op: Op, ins: tuple[Layout, ...], outs: tuple[Layout, ...], factor: int | None, loop: Any
    ) -> Choice:
        vals = [s.meta["val"] for s in op.slots]
        results = tensors(op.node)
        moved = sum(self._bytes(v) * self._share(x) for v, x in zip([*vals, *results], [*ins, *outs], strict=False))
        part = min((self._share(x) for x in [*ins, *outs]), default=1.0) if factor is not None else 1.0
        view = op.node.meta.get("is_view", _is_view(op))
        dtype = str(results[0].dtype if results else "int64").removeprefix("torch.")
        seconds = 0.0 if view else op_seconds(self._flops(op.node) * part, moved, dtype, self.cluster)
        graded = op.node in self.grads
        saved = (
            0.0
            if view or not graded
            else sum(self._bytes(v) * self._share(x) for v, x in zip(results, outs, strict=True))
        )
        return Choice(
            ins, outs, seconds * (3 if graded else 1), saved, 0.0, penalty([*ins, *outs], self.tp), factor, loop
        )

    def _flops(self, node: fx.Node) -> float:
        if "flops" not in node.meta:
            node.meta["flops"] = node_flops(node)
        return node.meta["flops"]

    def _share(self, layout: Layout) -> float:
        return share(layout, self.tp, lambda s: size_hint(s, self.program.hints))

    def _bytes(self, val: Tensor) -> float:
        count = 1
        for s in sizes(val):
            count *= size_hint(s, self.program.hints)
        return float(count * val.element_size())

    def _uses(self, index: dict[fx.Node, int], outputs: list[fx.Node]) -> list[Use]:
        """Instances of a value grouped by who consumes them."""
        consumers: dict[Value, set[tuple[int, int]]] = defaultdict(set)
        for n in self.calls:
            for slot, operand in enumerate(self.ops[n].slots):
                consumers[resolve(operand)].add((index[self.same[n]], slot))
        for slot, n in enumerate(outputs):
            consumers[resolve(n)].add((len(index), slot))
        groups: Counter[tuple[Value, tuple[tuple[int, int], ...]]] = Counter()
        for (node, i), users in consumers.items():
            groups[(self.same[node], i), tuple(sorted(users))] += 1
        return [Use(value, users, count) for (value, users), count in groups.items()]

    def convert_seconds(self, value: Any, a: Layout, b: Layout) -> float | None:
        """Seconds of a conversion of this value, forward and backward; None where there is none."""
        node, i = value
        leaf = self.leaves.get(node)
        if leaf is not None and leaf.kind == "parameter" and isinstance(a, Shard):
            return None  # moving a weight is data parallelism's business, not tensor parallelism's
        if self._forbidden(node, a, b):
            return None
        size = self._bytes(tensors(node)[i])
        forward = self._one_way(a, b, size)
        if forward is None or node not in self.grads:
            return forward
        backward = self._one_way(b.dual, a.dual, size)
        return None if backward is None else forward + backward

    def _forbidden(self, node: fx.Node, a: Layout, b: Layout) -> bool:
        """What `sequence_parallel=False` (or True) rules out for activations: being dealt out (or summed whole)."""
        if self.sequence is None or node in self.leaves or node not in self.grads:
            return False
        if self.sequence:
            return isinstance(a, Partial) and b in (I, R) and self._sequential(node)
        return isinstance(b, Shard) and not isinstance(a, Shard)

    def _sequential(self, node: fx.Node) -> bool:
        lengths = {s for leaf in self.program.inputs for s in shape_of(leaf.node)[1:2]}
        return any(s in lengths for s in shape_of(node))

    def _one_way(self, a: Layout, b: Layout, size: float) -> float | None:
        if a == b:
            return 0.0
        kind = conversions.KINDS.get(conversions.key(to_runtime(a), to_runtime(b)))
        if kind is None:
            return None
        work = "none" if kind.primitive is None and kind.pre is kind.post else kind.primitive or "local"
        return collective_seconds(work, size, self.tp, self.cluster)


def _planned(node: fx.Node) -> bool:
    """Operators with tensor results, and those that read a tensor: a size or an item read off a shard would be wrong."""
    return bool(tensors(node)) or any(tensors(i) for i in node.all_input_nodes)


def tensors(node: fx.Node) -> list[Tensor]:
    """The tensor values of a node."""
    return [v for v in compat.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]


def shape_of(node: fx.Node) -> tuple:
    """The shape of a node's first tensor value."""
    found = tensors(node)
    return sizes(found[0]) if found else ()


VIEWS = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "permute",
        "transpose",
        "t",
        "select",
        "unbind",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "alias",
        "detach",
        "contiguous",
        "to",
    ]
)


def _is_view(op: Op) -> bool:
    return short_name(op.target).removeprefix("aten.").split(".")[0] in VIEWS


def decide(builder: Builder) -> Planned:
    """Solve, and spread each item's choice over the nodes it stands for."""
    problem, heads = builder.build()
    solution = solve(problem)
    chosen: dict[fx.Node, Decision] = {}
    for node, item, k in zip(heads, problem.items, solution.chosen, strict=False):
        c = item.choices[k]
        chosen[node] = Decision(c.ins, c.outs, c.factor, c.loop)
    decisions = {n: chosen[builder.same[n]] for n in [*builder.leaves, *builder.calls]}
    return Planned(
        builder.program, builder.tp, decisions, builder.ops, builder.rules, builder.same, builder.grads, solution
    )
