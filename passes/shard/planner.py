"""From a captured graph to a decision problem: items, and choices with their costs."""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from torch import fx

from autotp import compat
from autotp.cost import Cluster
from autotp.cost.objective import TRAINING, Objective
from autotp.cost.prices import Prices
from autotp.cost.saved_tensors import Keepers
from autotp.cost.solver.problem import CACHE, Choice, Item, Problem, Use, ValueId
from autotp.cost.solver.solve import feasible
from autotp.cost.terms import Cost
from autotp.errors import PlanError
from autotp.ir.graph import (
    Capture,
    Value,
    differentiable,
    outputs_of,
    placed_outputs,
    read,
    resolve,
    shape_of,
    tensor_at,
    tensors,
    where,
)  # fmt: skip
from autotp.ir.layouts import Copies, Distribution, I, Layout, Layouts, Partition, R, Shard, SlotLayouts, dealt_by
from autotp.ir.op import Op, factors_of, sizes
from autotp.ir.program import GraphPart, Past
from autotp.ir.sizes import UnitsBy
from autotp.passes.analysis import fold
from autotp.passes.analysis.axes import PortDims, find_axes
from autotp.passes.analysis.blocks import find_blocks
from autotp.passes.analysis.dataflow import Dataflow
from autotp.text import listed

from .axis import TENSOR, AxisRules
from .beside import Savings
from .ends import ends_table
from .past import CacheParts, past_of
from .pins import Dims, check_neighbours, placed_apart
from .pins import find as find_pins
from .states import CarriedItem, States
from .strategies import OPAQUE, TORCHS, Candidates, penalty, several_read, signatures

Slots = list[set[Value]]  # the values that each operand slot reads, in all equal operators

Built = tuple[Problem, list[fx.Node]]  # the problem, and the representative node of each item

OUTPUT_SLOT = "output"


class Reading:
    """Facts that planning reads off a program, whatever the degree: read once where it is planned for several.

    Attributes:
        program: it must not change. axis: whose rules are asked.
        grads: nodes whose values carry gradients. calls: operators that are planned, and `ops`, `rules` of them.
        same: node -> its representative among equal blocks. leaves: those that are tensors.
    """

    def __init__(self, program: Capture, axis: AxisRules = TENSOR) -> None:
        self.program, self.axis = program, axis
        self.grads = differentiable(program)
        nodes = list(program.graph.nodes)
        self.past = {x.node for x in program.leaves if x.kind.carried}
        calls = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem]
        self.calls = [n for n in calls if _planned(n) and not (n.target is compat.sym_size and n.args[0] in self.past)]
        self.ops = {n: Op.of(n) for n in self.calls}
        self.same = fold.repeated(program, self.grads).same
        # Equal nodes have equal rules. A block's nodes may stand before those of the first block that it equals: what
        # is written to states is written at the end, in any order.
        heads = {n: axis.rule(self.ops[n]) for n in self.calls if self.same[n] is n}
        self.rules = {n: heads[self.same[n]] for n in self.calls}
        self.leaves = {leaf.node: leaf for leaf in program.leaves if tensors(leaf.node)}

    @cached_property
    def digest(self) -> str:
        """Digest of the program."""
        return self.program.digest()

    @cached_property
    def flow(self) -> Dataflow:
        """Origins of the values of the graph."""
        return Dataflow(self.program, {n: (op, self.rules[n]) for n, op in self.ops.items()})

    @cached_property
    def parts(self) -> list[GraphPart]:
        """Give the named parts of the graph."""
        return find_blocks(self.flow, self.same)

    @cached_property
    def axes(self) -> dict[str, list[PortDims]]:
        """Give the logical axes of the graph."""
        return find_axes(self.flow, self.parts)


@dataclass
class Builder:
    """Builds the problem of one captured graph."""

    program: Capture
    tp: int
    cluster: Cluster
    pinned: Layouts = field(default_factory=dict)
    pins: Dims = field(default_factory=dict)
    sequence: bool | None = None
    objective: Objective = TRAINING
    memory: float | None = None
    carried: Layouts = field(default_factory=dict)  # layouts of states that are decided
    axis: AxisRules = TENSOR
    band: float | None = None  # of the least seconds; None: only seconds count
    seconds: float = inf  # of the search for a better plan
    cache_parts: CacheParts | None = None  # what the model's own cache holds of the program's values, where it is known
    read_before: Reading | None = None  # of the program by these rules, where that was read already
    shares: tuple[int, ...] = ()  # of the ranks; () for equal ones
    units: UnitsBy = ()  # what ranks have of dimensions of some lengths, whatever their shares
    groups: tuple[int, ...] = ()  # sizes that groups with copies may have; () for what heads and nodes suggest
    imbalance: float = 1.0  # the most rows that a rank gets for its experts, over the mean

    def __post_init__(self) -> None:
        self.reading = self.read_before = reading = self.read_before or Reading(self.program, self.axis)
        self.grads, self.ops, self.rules, self.leaves = reading.grads, reading.ops, reading.rules, reading.leaves
        self.user = find_pins(self.program, self.pins, self.ops, lambda: reading.axes)
        marks = self.user.marks(self.leaves)
        # States that another program of the plan placed unlike their equals in other blocks.
        states = {n: x.name for n, x in self.leaves.items() if x.kind.carried}
        marks |= {n: repr(self.carried[name]) for n, name in states.items() if name in self.carried}
        marks |= placed_apart(self.leaves, self.pinned, reading.same)
        of_cache = (self.cache_parts or {}).items()
        marks |= {node: repr(parts) for (node, _), parts in of_cache}  # of a window fewer are read
        sequence = self.sequence if self.user.sequence is None else self.user.sequence
        if sequence:  # what leaves the model may be gathered, and it alone
            marks = {n: "output" for _, n in placed_outputs(self.program)} | marks
        self.same = fold.find(self.program, self.grads, marks).same if marks else reading.same
        self.states = States(self.program, self.tp, self.same, self.grads, self.carried, self.axis.ignores_states)
        self.calls = [n for n in reading.calls if self.axis.decides(n)]
        self.ends = ends_table(self.calls, self.ops, self.rules, self.same)
        numbers: dict[ValueId, int] = {(self.same[row[0][0]], row[0][1]): k for k, row in enumerate(self.ends)}
        self.candidates = Candidates(self.tp, self.axis.fills, numbers, self.shares, self.units)
        decoded = self.objective.name == "decode" and not reading.past
        parts = self.cache_parts if self.cache_parts is not None else self.states.begun_parts()
        self.past = past_of(self.program, self.calls, self.ops, self.rules, parts) if decoded else Past()
        cached = self.states.cached(self.past)
        self.prices = Prices(
            self.program, self.tp, self.cluster.over(self.tp), self.grads, self.leaves, sequence, self.objective,
            Keepers(self.ops, self.same, self.grads), self.axis.surcharge, cached, past=self.past,
            imbalance=self.imbalance,
        )  # fmt: skip
        # What is kept of earlier tokens has the layout of the first operand that reads it.
        self.cache_readers: dict[Value, tuple[fx.Node, int]] = {}
        self.cache_bytes: dict[fx.Node, dict[int, float]] = defaultdict(dict)
        unread = set(self.past.stored)
        for n in self.calls if unread else ():
            for slot, operand in enumerate(self.ops[n].slots):
                if (value := resolve(operand)) in unread:
                    unread.remove(value)
                    self.cache_readers[self.states.value(operand)] = self.same[n], slot
                    self.cache_bytes[self.same[n]][slot] = self.prices.cache_bytes(value)

    @cached_property
    def parts(self) -> list[GraphPart]:
        """Give the named parts of the graph."""
        return self.reading.parts if self.same is self.reading.same else find_blocks(self.reading.flow, self.same)

    def build(self) -> Built:
        """Build the problem, and list the representative node of each item."""
        members = Counter(self.same[n] for n in [*self.leaves, *self.calls])
        # The same operand of equal operators may be several values: the first block reads the embedding, the others
        # the block before.
        slots: dict[fx.Node, Slots] = {}
        for n in self.calls:
            sets = slots.setdefault(self.same[n], [set() for _ in self.ops[n].slots])
            for values, operand in zip(sets, self.ops[n].slots, strict=True):
                values.add(self.states.value(operand))
        self._grow(slots)
        # Leaves first: the layouts of parameters are what the plan is about, and errors name items by position.
        heads = [*members]
        self.carried_items = carried = list(self.states.items(self.candidates, self.prices))
        carried_items = {item.outs[0][0]: item for item, _ in carried if item.outs}  # type: ignore[index]
        items = [
            carried_items.get(n)
            or (self._leaf(n, members[n]) if n in self.leaves else self._call(n, slots[n], members[n]))
            for n in heads
        ]
        goals = {i: goal for (i, _), goal in zip(placed_outputs(self.program), self.goals(), strict=True)}
        layouts = tuple(goals[i] for i, _ in self.states.outgoing)
        outgoing: Any = [frozenset([self.states.value(n)]) for _, n in self.states.outgoing]
        items.append(Item(OUTPUT_SLOT, [Choice(layouts, ())], outgoing))
        items += [item for item, _ in carried if not item.outs]
        uses = self._uses({n: i for i, n in enumerate(heads)}, items, carried)
        problem = Problem(items, uses, self.prices.convert, self.memory, traffic=self.prices.traffic)
        problem.savings = Savings(problem, heads, self.prices, self.ops, self.leaves).all()
        # Pins have taken choices away by now. That some neighbour cannot live with what is left is said here, by name.
        names = {n: self.leaves[n].name for n in heads if n in self.leaves}
        asks = {i: self.user.parameters[names[n]] for i, n in enumerate(heads) if names.get(n) in self.user.parameters}
        asks |= {i: next(iter(self.user.ports[n].values()))[0] for i, n in enumerate(heads) if n in self.user.ports}
        check_neighbours(problem, heads, asks)
        return problem, heads

    def goals(self) -> SlotLayouts:
        """Give the layouts in which the graph's outputs leave it: as the axis wants; otherwise whole, but where the
        user pinned them."""
        settled = self.axis.outputs(self.program, self.grads, self.tp, self._partitions)
        if settled is not None:
            return settled
        out = []
        for i, x in enumerate(outputs_of(self.program)):
            value = resolve(x)
            ask, shape = self.user.outputs.get(i), sizes(tensor_at(value))
            whole = I if value[0] in self.grads else R
            out.append(Shard(d := ask.dims[0], Partition.plain(shape[d], self.tp)) if ask and ask.split else whole)
        return tuple(out)

    def _partitions(self, node: fx.Node, dim: int) -> list[Distribution]:
        """List the partitions that a dimension of a value may have."""
        return self.candidates.of.get((self.states.value(node), dim), [])

    def _grow(self, slots: dict[fx.Node, Slots]) -> None:
        """Seed the candidates and let them spread until nothing changes."""
        work = [n for n in slots if self.rules[n] is not None]
        self._seed(work, slots)
        self.candidates.grew = True
        while self.candidates.grew:
            self.candidates.grew = False
            for n in (*work, *reversed(work)):
                for factor in factors_of(self.rules[n]):
                    self.candidates.spread(factor, [frozenset(s) for s in slots[n]], self._results(n))

    def _seed(self, work: list[fx.Node], slots: Mapping[fx.Node, Slots]) -> None:
        """Seed the partitions that dimensions may have by themselves; those of others follow from them."""
        seeds = self.axis.seeds(self.leaves.values(), self.tp)
        if seeds is not None:
            for node, dim, partition in seeds:
                self.candidates.add(((node, 0), dim), partition)
            return
        for node, leaf in self.leaves.items():
            if node is self.same[node] and not leaf.kind.carried:
                self.candidates.seed((node, 0), shape_of(node), skip=(0,) if leaf.kind.passed else ())
        self.states.seed(self.candidates, self.prices.second_sizes)
        for n in work:
            self._seed_view(n)
            self._seed_shared(n, slots[n])

    def _seed_view(self, node: fx.Node) -> None:
        """Seed a dimension that a view splits off (heads off a hidden size), whatever its size, and one that a weight
        has several times over (the units of a cell, for each of its gates).

        The innermost part (the head size) is not seeded: sharding it would cut every head.
        """
        for factor in factors_of(self.rules[node]):
            split, new = factor.ins[0] if factor.ins else None, factor.outs[0]
            carries = zip(self.ops[node].slots, factor.ins, strict=True)
            gates = any(c is not None and c.repeat != 1 and x in self.leaves for x, c in carries)
            view = split is not None and split.unit != 1 and len(factor.outs) == 1
            if new is None or new.unit != 1 or new.repeat != 1 or not (view or gates):
                continue
            if isinstance(factor.size, int) and factor.size > 1:
                self.candidates.add_plain(((node, 0), new.dim), factor.size)

    def _seed_shared(self, node: fx.Node, slots: Slots) -> None:
        """Seed copies of heads of keys and values that are fewer than the ranks, each on several of these."""
        for factor in factors_of(self.rules[node]):
            if self.shares or self.units or not several_read(self.ops[node], factor):
                continue  # a group of unlike ranks would have no part for each
            ways = Copies.of_units(factor.size, self.tp, self.groups, self.cluster.devices_per_node)
            for carry, values in zip(factor.ins, slots, strict=True):
                if carry is not None and carry.repeat == carry.unit == 1:
                    for value, copies in itertools.product(values, ways):
                        self.candidates.add((value, carry.dim), copies)

    def _results(self, node: fx.Node) -> list[Any]:
        return [(node, i) for i in range(len(self.ops[node].outs))]

    def _leaf(self, node: fx.Node, count: int) -> Item:
        leaf, val = self.leaves[node], node.meta["val"]
        settled = self.axis.leaf(leaf, node in self.grads, self.tp)
        if settled is not None:
            return Item(leaf.name, [Choice((), (settled,))], [], [(node, 0)], count)
        whole = I if node in self.grads else R
        layouts: list[Layout] = [whole]
        if leaf.kind.weight:
            sharded = [(d, p) for d in range(val.ndim) for p in self.candidates.of.get(((node, 0), d), ())]
            storable = [(d, p) for d, p in sharded if not p.by_data and not p.shared]
            layouts += [dealt_by(d, p) for d, p in storable if leaf.kind.trained or p.is_plain(self.tp)]
            layouts = self._pinned(node, layouts)
            if not node.users:  # nothing to decide: every rank holds its part
                layouts = [min(layouts, key=self.prices.share)]
        choices = [self._choice((), (x,), self.prices.weight(val, x, leaf.kind.weight)) for x in layouts]
        kind = "weights" if leaf.kind.trained else "tables"
        return Item(leaf.name, choices, [], [(node, 0)], count, kind=kind)

    def _choice(self, ins: SlotLayouts, outs: SlotLayouts, cost: Cost) -> Choice:
        """Make a choice with its price."""
        return Choice.of(ins, outs, cost, self.prices.seconds(cost), penalty([*ins, *outs], self.tp))

    def _pinned(self, node: fx.Node, layouts: list[Layout]) -> list[Layout]:
        """Select of a parameter's layouts what pins leave: those of an earlier plan, or what the user's pin asks
        for."""
        name = self.leaves[node].name
        if name in self.pinned:
            return [self.pinned[name]]
        ask = self.user.parameters.get(name)
        splits = [x for x in layouts if ask is None or ask.fits(x)]
        if not splits:
            readers = dict.fromkeys(where(n) for n, _, _ in read(node, self.ops))
            raise PlanError(
                f"{ask} of {name} cannot be kept: no operator that uses it splits there ({listed(readers)}); it can "
                f"be {listed(layouts)}. Change or drop the pin."
            )
        return splits

    def _call(self, node: fx.Node, slots: Slots, count: int) -> Item:
        op, results = self.ops[node], self._results(node)
        operands: list[frozenset[Any]] = [frozenset(s) for s in slots]
        ins = [resolve(s)[0] in self.grads for s in op.slots]
        outs = [node in self.grads] * len(op.outs)
        choices: dict[tuple, Choice] = {}
        rule, cached = self.rules[node], self.cache_bytes.get(node, {})
        # An operator of a library without a rule is opaque: unlike one of torch's, nothing is known of its backward.
        foreign = getattr(node.target, "namespace", "aten") not in TORCHS
        read_rule = OPAQUE if rule is None and foreign else rule
        for read_as, made_as, index, loop in signatures(read_rule, ins, outs, operands, results, self.candidates):
            # Two loops may have the same layouts, which are one choice: the first stands for both.
            if (read_as, made_as) not in choices and self._knows_ends(node, read_as, made_as):
                split = rule.factors[index] if rule is not None and index is not None else None
                cost = self.prices.operator(op, read_as, made_as, split)
                # What is kept for less of a dimension that is summed over, as a latent, is lean at the price of a sum
                # of all earlier tokens in every step: that is not asked for.
                summed = any(x.partial for x in made_as)
                for slot, size in cached.items():
                    share = 1.0 if summed else self.prices.parameter_share(read_as[slot])
                    cost += Cost(parameter_bytes=size * share)
                choices[read_as, made_as] = replace(self._choice(read_as, made_as, cost), factor=index, loop=loop)
        pinned_choices = self.user.keep(op, list(choices.values()))
        label, kind = f"activations of {where(node)}", CACHE if cached else Item.kind
        return Item(node.name, pinned_choices, operands, results, count, label, kind)

    def _knows_ends(self, node: fx.Node, *layouts: SlotLayouts) -> bool:
        """Say whether the ends of all groups by which rows are sharded are known before this node."""
        numbers = {x.groups.ends for side in layouts for x in side if x.groups is not None}
        return all(self.ends[k][0][0] < node for k in numbers)

    def conflict(self) -> PlanError | None:
        """Make the error that names the fewest pins which together leave no plan; None where other reasons do."""
        pins = dict(self.pins)
        for key in self.pins:
            fewer = {k: v for k, v in pins.items() if k != key}
            pins = pins if self._feasible(fewer) else fewer
        if not pins or not self._feasible({}):
            return None
        texts = []
        for key, dim in pins.items():
            texts.append(f"{key!r}: {'Replicate()' if dim is None else f'Shard({dim})'}")
        what = "these pins together" if len(pins) > 1 else "this pin"
        return PlanError(f"no legal plan keeps {what}: {' and '.join(texts)}. Drop one.")

    def _feasible(self, pins: Dims) -> bool:
        try:
            feasible(replace(self, pins=pins, memory=None).build()[0])
        except PlanError:
            return False
        return True

    def _uses(self, index: dict[fx.Node, int], items: list[Item], carried: list[CarriedItem]) -> list[Use]:
        """Group instances of a value by their consumers."""
        # Consumers are (item, operand slot); an item stands for the nodes of all equal blocks.
        consumers: dict[Value, set[tuple[int, int]]] = defaultdict(set)
        reads = [_read_alike(item) for item in items]
        for n in self.calls:
            i, firsts = index[self.same[n]], dict[Any, tuple[Value, int]]()
            for slot, operand in enumerate(self.ops[n].slots):
                # Operands of one call that are equal values of equal steps, and are read alike, are one use.
                here = resolve(operand)
                value, first = firsts.setdefault((self.states.value(operand), reads[i][slot]), (here, slot))
                consumers[here].add((i, slot if value == here else first))
        # The program's output is the item after these; what becomes a state again is an item of `carried`.
        for slot, (_, n) in enumerate(self.states.outgoing):
            consumers[resolve(n)].add((len(index), slot))
        place = {id(item): i for i, item in enumerate(items)}
        for item, names in carried:
            for value in self.states.consumers(names):
                consumers[value].add((place[id(item)], 0))
        # Values of equal blocks with equal consumers are converted alike: one use, which is paid so many times.
        groups = Counter()
        for (node, i), users in consumers.items():
            groups[(self.same[node], i), tuple(sorted(users))] += 1
        return [Use(value, users, count) for (value, users), count in groups.items()]


def _read_alike(item: Item) -> list[int]:
    """Find for each operand of an item the first one with the same values that every choice reads alike."""
    ways: list[Any] = []
    for slot, values in enumerate(item.ins):
        ways.append((values, [choice.ins[slot] for choice in item.choices]))
    return [ways.index(way) for way in ways]


def _planned(node: fx.Node) -> bool:
    """Say whether an operator has tensor results, or reads one: a size or an item read off a shard would be wrong."""
    return bool(tensors(node)) or any(tensors(i) for i in node.all_input_nodes)
