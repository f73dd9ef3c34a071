"""States of a program: what is carried from call to call, as items of the decision problem.

A state is one item that reads what the program leaves of it and makes what it begins with, both in one layout: a slice
of any dimension that neither grows nor is the batch's, or all of it. So what a rank holds can be reordered, cropped and
selected by the batch and the length as the whole could. What a call begins with is never gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autotp.cost.prices import Prices, lengths
from autotp.cost.solver.problem import Choice, Item, Problem, ValueId
from autotp.cost.terms import Cost
from autotp.errors import PlanError
from autotp.ir.graph import Alike, Capture, Value, placed_outputs, resolve, shape_of, short_name, tensor_at, tensors
from autotp.ir.layouts import I, Layout, Layouts, R, dealt_by
from autotp.ir.op import sizes, symbols_of
from autotp.ir.program import Past

from .strategies import Candidates, penalty

CarriedItem = tuple[Item, tuple[str, ...]]  # and the names of its states

# Operators that only move what a state holds, by name: their results are as large as the state.
MOVES = {
    "view", "reshape", "_unsafe_view", "unflatten", "flatten", "transpose", "permute", "movedim", "t", "mT", "slice",
    "select", "narrow", "expand", "expand_as", "unsqueeze", "squeeze", "contiguous", "clone", "alias", "to", "_to_copy",
    "cat", "stack", "repeat", "repeat_interleave", "index_copy", "index_put", "index_select", "slice_scatter", "roll",
    "copy", "detach", "flip", "where", "masked_fill",
}  # fmt: skip


@dataclass
class States:
    """The states of one program.

    Attributes:
        same: node -> representative of its class of equal nodes.
        grads: nodes whose values carry gradients.
        fixed: layouts of states that another program of the plan decided.
        ignored: plan inputs and outputs as if none was a state.
    """

    program: Capture
    tp: int
    same: Alike
    grads: set[fx.Node]
    fixed: Layouts
    ignored: bool = False

    def __post_init__(self) -> None:
        leaves = [] if self.ignored else self.program.leaves
        carried = [x for x in leaves if x.kind.carried and tensors(x.node)]
        self.leaves = {x.name: x.node for x in carried}
        self.results: dict[str, fx.Node] = {}  # state -> what the program leaves of it
        self.outgoing: list[tuple[int, fx.Node]] = []  # outputs that become no state, with their positions
        for position, node in placed_outputs(self.program):
            name = None if self.ignored else self.program.becomes(position)
            if name is None:
                self.outgoing.append((position, node))
            else:
                self.results[name] = node
        self.members: dict[fx.Node, list[str]] = defaultdict(list)
        for name, node in self.leaves.items():
            self.members[self.same.get(node, node)].append(name)

    def value(self, node: fx.Node) -> Value:
        """The class of a value."""
        maker, index = resolve(node)
        return self.same.get(maker, maker), index

    # ---- what may be split -----------------------------------------------------------------------------------------

    def dims(self, name: str, lengths: set) -> tuple[int, ...]:
        """Dimensions of a state that may be split: of one size for ever, and not the first one, the batch.

        Args:
            name: of the state. lengths: sizes that inputs have along their sequence.
        """
        shapes = [shape_of(n) for n in (self.leaves.get(name), self.results.get(name)) if n is not None]
        if len({len(shape) for shape in shapes}) != 1:
            return ()
        free = name not in self.leaves
        fits = []
        for d, each in enumerate(zip(*shapes, strict=True)):
            one = isinstance(each[0], int) and each[0] > 1 and len(set(each)) == 1
            if d > 0 and one and not (free and each[0] in lengths):
                fits.append(d)
        return tuple(fits)

    def seed(self, candidates: Candidates, lengths: set) -> None:
        """The partitions that states suggest by themselves."""
        for name, node in (*self.leaves.items(), *self.results.items()):
            layout = self.fixed.get(name, R)
            if layout.sharded_dim is not None and layout.distribution is not None:
                candidates.add((self.value(node), layout.sharded_dim), layout.distribution)
            elif node is self.leaves.get(name):
                for d in self.dims(name, lengths):
                    candidates.add_plain((self.value(node), d), shape_of(node)[d])

    # ---- the problem -----------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> dict[tuple[str, ...], Value | None]:
        """States that share one decision -> what they begin with; None for those that only begin here."""
        groups: dict[tuple[str, ...], Value | None] = {tuple(names): (n, 0) for n, names in self.members.items()}
        begun: dict[tuple[Value, Layout | None], list[str]] = defaultdict(list)
        for name, node in self.results.items():
            if name not in self.leaves:
                begun[self.value(node), self.fixed.get(name)].append(name)
        return groups | {tuple(names): None for names in begun.values()}

    def items(self, candidates: Candidates, prices: Prices) -> Iterator[CarriedItem]:
        """The items, each with the names of its states."""
        for names, leaf in self.groups.items():
            results = frozenset(self.value(self.results[n]) for n in names if n in self.results)
            yield self._item(names, leaf, results, candidates, prices), names

    def _item(
        self,
        names: tuple[str, ...],
        leaf: Value | None,
        results: frozenset[Value],
        candidates: Candidates,
        prices: Prices,
    ) -> Item:
        begun: list[Value] = [leaf] if leaf is not None else []
        values = [*begun, *sorted(results, key=str)]
        size, choices = prices.bytes(tensor_at(values[0])), []
        for layout in self._layouts(names, values, candidates, prices.second_sizes):
            ins = tuple(as_read(layout, v in self.grads) for v, _ in values[len(begun) :][:1])
            outs = tuple(as_read(layout, v in self.grads) for v, _ in begun)
            part, ties = size * prices.share(layout), penalty([layout], self.tp)
            cost = Cost(activation_bytes=part, budget_bytes=part)
            choices.append(Choice.of(ins, outs, cost, prices.seconds(cost), ties))
        return Item(names[0], choices, [results] if results else [], [*begun], len(names), f"the state {names[0]}")  # type: ignore[arg-type]

    def _layouts(
        self, names: tuple[str, ...], values: list[Value], candidates: Candidates, lengths: set
    ) -> list[Layout]:
        """All of it, or a slice of a dimension as some operator may have it."""
        fixed = self.fixed.get(names[0])
        allowed = set.intersection(*(set(self.dims(n, lengths)) for n in names))
        if fixed is not None:
            if fixed.sharded_dim not in (None, *allowed) and names[0] in self.leaves:
                raise PlanError(
                    f"the plan splits the state {names[0]!r} along dimension {fixed.sharded_dim}, which grows or is "
                    "the batch in this call. Plan with example inputs that pass the state, so that this is known."
                )
            return [fixed]
        layouts: dict[Layout, None] = {R: None}
        for d in sorted(allowed):
            for partition in (p for v in values for p in candidates.of.get((v, d), ())):
                if not partition.by_data and partition.static:
                    layouts[dealt_by(d, partition)] = None
        return list(layouts)

    def consumers(self, names: tuple[str, ...]) -> list[Value]:
        """The program's values, not their classes, that these states are left as."""
        return [resolve(self.results[n]) for n in names if n in self.results]

    def cached(self, past: Past) -> set[fx.Node]:
        """Nodes whose values hold what a call began with: what only moves a state, and what is left of it; in a program
        that is priced for decoding, what only moves what is kept."""
        nodes, stored = set(self.leaves.values()), {node for node, _ in past.stored}
        for node in self.program.graph.nodes:
            if moves(node) and any(i in nodes or resolve(i)[0] in stored for i in node.all_input_nodes):
                nodes.add(node)
        return nodes | {resolve(node)[0] for name, node in self.results.items() if name in self.leaves}

    def begun_parts(self) -> dict[Value, dict[int, float]] | None:
        """The values that are kept of a call which begins all its states, with the dimensions along which they are as
        long as what was said; None where nothing is."""
        parts: dict[Value, dict[int, float]] = {}
        for node in self.results.values() if not self.leaves else ():
            value = resolve(node)
            long = [d for d, s in enumerate(sizes(tensor_at(value))) if symbols_of(s) & lengths(self.program)]
            parts[value] = dict.fromkeys(long, 1.0)
        return {value: part for value, part in parts.items() if part} or None

    def marks(self) -> dict[fx.Node, str]:
        """Mark states that lie differently from their equals in other blocks."""
        return {node: repr(self.fixed[name]) for name, node in self.leaves.items() if name in self.fixed}


def decided(items: Sequence[CarriedItem], problem: Problem, choices: Sequence[int]) -> dict[str, Layout]:
    """Give the layout of each state by the solver's choices: Replicate, or Shard."""
    place = {id(item): i for i, item in enumerate(problem.items)}
    layouts: dict[str, Layout] = {}
    for item, names in items:
        choice = item.choices[choices[place[id(item)]]]
        layout = (*choice.ins, *choice.outs)[0]
        layouts |= dict.fromkeys(names, layout if layout.sharded_dim is not None else R)
    return layouts


def lying_as_read(
    items: Sequence[CarriedItem], problem: Problem, choices: Sequence[int], layouts: Mapping[ValueId, Layout]
) -> tuple[int, ...]:
    """The solver's choices, with each state that a program begins as what reads it has it: that is there already.

    Args:
        items, problem, choices: see `decided`. layouts: of each value where it is read as what is kept.
    """
    place, settled = {id(item): i for i, item in enumerate(problem.items)}, [*choices]
    for item, _ in items:
        if item.outs or not item.ins:
            continue
        read = {layouts.get(value) for value in item.ins[0]}
        alike = [k for k, choice in enumerate(item.choices) if read == {choice.ins[0]}]
        settled[place[id(item)]] = [*alike, settled[place[id(item)]]][0]
    return tuple(settled)


def moves(node: fx.Node) -> bool:
    """Say whether an operator only moves what it is given."""
    return node.op == "call_function" and short_name(node.target).removeprefix("aten.").split(".")[0] in MOVES


def as_read(layout: Layout, graded: bool) -> Layout:
    """A state's layout as that of a value that carries a gradient, or of one that does not."""
    if layout.sharded_dim is not None:
        return layout
    return I if graded else R
