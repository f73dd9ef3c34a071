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
from typing import Any

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
        self.leaves = {x.name: x.node for x in leaves if x.kind.carried and tensors(x.node)}
        self.results: dict[str, fx.Node] = {}  # state -> what the program leaves of it
        self.outgoing: list[tuple[int, fx.Node]] = []  # outputs that become no state, with their positions
        for position, node in placed_outputs(self.program):
            name = None if self.ignored else self.program.becomes(position)
            if name is None:
                self.outgoing.append((position, node))
            else:
                self.results[name] = node

    def value(self, node: fx.Node) -> Value:
        """Find the class of a value."""
        maker, index = resolve(node)
        return self.same[maker], index

    # ---- what may be split -----------------------------------------------------------------------------------------

    def dims(self, name: str, lengths: set) -> tuple[int, ...]:
        """List the dimensions of a state that may be split: of one size for ever, and not the first one, the batch.

        Args:
            name: of the state. lengths: sizes that inputs have along their sequence.
        """
        shapes = [shape_of(n) for n in (self.leaves.get(name), self.results.get(name)) if n is not None]
        if len({len(shape) for shape in shapes}) != 1:
            return ()
        fits = []
        for d, lengths_of_d in enumerate(zip(*shapes, strict=True)):
            n = lengths_of_d[0]
            one = isinstance(n, int) and n > 1 and len(set(lengths_of_d)) == 1
            if d > 0 and one and (name in self.leaves or n not in lengths):
                fits.append(d)
        return tuple(fits)

    def seed(self, candidates: Candidates, lengths: set) -> None:
        """Seed the partitions that states suggest by themselves."""
        for name, node in (*self.leaves.items(), *self.results.items()):
            layout = self.fixed.get(name, R)
            if layout.sharded_dim is not None and layout.distribution is not None:
                candidates.add((self.value(node), layout.sharded_dim), layout.distribution)
            elif node is self.leaves.get(name):
                for d in self.dims(name, lengths):
                    candidates.add_plain((self.value(node), d), shape_of(node)[d])

    # ---- the problem -----------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> list[list[str]]:
        """List the states that share one decision: equal ones that the program begins with, and equal ones of one
        layout that it only leaves."""
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, node in self.leaves.items():
            groups[self.value(node)].append(name)
        for name, node in self.results.items():
            if name not in self.leaves:
                groups[self.value(node), self.fixed.get(name)].append(name)
        return list(groups.values())

    def items(self, candidates: Candidates, prices: Prices) -> Iterator[CarriedItem]:
        """Make the items, each with the names of its states."""
        for names in self.groups:
            leaves = [self.value(self.leaves[names[0]])] if names[0] in self.leaves else []
            results = frozenset(self.value(self.results[n]) for n in names if n in self.results)
            values = [*leaves, *sorted(results, key=str)]
            size, choices = prices.bytes(tensor_at(values[0])), []
            for layout in self._layouts(names, values, candidates, prices.second_sizes):
                ins = tuple(as_read(layout, v in self.grads) for v, _ in values[len(leaves) :][:1])
                outs = tuple(as_read(layout, v in self.grads) for v, _ in leaves)
                part, ties = size * prices.share(layout), penalty([layout], self.tp)
                cost = Cost(activation_bytes=part, budget_bytes=part)
                choices.append(Choice.of(ins, outs, cost, prices.seconds(cost), ties))
            item = Item(names[0], choices, [results] if results else [], [*leaves], len(names), f"the state {names[0]}")  # type: ignore[arg-type]
            yield item, tuple(names)

    def _layouts(self, names: Sequence[str], values: list[Value], candidates: Candidates, lengths: set) -> list[Layout]:
        """List the layouts of a state: all of it, or a slice of a dimension as some operator may have it."""
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
        """List the program's values, not their classes, that these states are left as."""
        return [resolve(self.results[n]) for n in names if n in self.results]

    def cached(self, past: Past) -> set[fx.Node]:
        """Find nodes whose values hold what a call began with: what only moves a state, and what is left of it; in a
        program that is priced for decoding, what only moves what is kept."""
        nodes, stored = set(self.leaves.values()), {node for node, _ in past.stored}
        for node in self.program.graph.nodes:
            if moves(node) and any(i in nodes or resolve(i)[0] in stored for i in node.all_input_nodes):
                nodes.add(node)
        return nodes | {resolve(node)[0] for name, node in self.results.items() if name in self.leaves}

    def begun_parts(self) -> dict[Value, dict[int, float]] | None:
        """Find the values that are kept of a call which begins all its states, with the dimensions along which they
        are as long as its input; None where nothing is."""
        parts = {}
        for node in self.results.values() if not self.leaves else ():
            value = resolve(node)
            long = [d for d, s in enumerate(sizes(tensor_at(value))) if symbols_of(s) & lengths(self.program)]
            parts[value] = dict.fromkeys(long, 1.0)
        return {value: part for value, part in parts.items() if part} or None


def decided(items: Sequence[CarriedItem], problem: Problem, choices: Sequence[int]) -> dict[str, Layout]:
    """Give the layout of each state by the solver's choices: Replicate, or Shard."""
    place = {id(item): i for i, item in enumerate(problem.items)}
    layouts = {}
    for item, names in items:
        choice = item.choices[choices[place[id(item)]]]
        layout = (*choice.ins, *choice.outs)[0]
        layouts |= dict.fromkeys(names, layout if layout.sharded_dim is not None else R)
    return layouts


def placed_as_read(
    items: Sequence[CarriedItem], problem: Problem, choices: Sequence[int], layouts: Mapping[ValueId, Layout]
) -> tuple[int, ...]:
    """Change the solver's choices so that each state that a program begins has the layout of its reader, made already.

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
    """Give a state's layout as that of a value that carries a gradient, or of one that does not."""
    if layout.sharded_dim is not None:
        return layout
    return I if graded else R
