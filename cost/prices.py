"""Prices of choices and conversions on a cluster: the link between a captured graph and `autotp.cost`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autotp.comm import conversions
from autotp.cost.machines.cluster import Cluster
from autotp.cost.solver.problem import Traffic
from autotp.ir.graph import Capture, Leaf, resolve, shape_of, size_hint, tensor_at, tensors
from autotp.ir.layouts import Hint, I, Layout, R, SlotLayouts
from autotp.ir.marks import BatchConversion, mark, write
from autotp.ir.op import EXPERTS, Factor, Op, aten, dtype_name, gives_views, packet_of, sizes
from autotp.ir.program import ARITHMETIC, Parts, Past, argmax_share, sent_as

from .collective_costs import call_seconds, collective_bytes
from .compute import node_flops, op_cost, peak_share
from .objective import Objective
from .saved_tensors import Keepers
from .terms import NOTHING, TERMS, Cost

Hints = Mapping[Any, int]  # a size for every symbol

FREE = {aten.reshape, aten.flatten, aten.contiguous, aten.to}  # usually views, though their schemas do not say so


BACKWARD = 2  # times the forward's arithmetic and bytes
RESCUE = 1000  # times its seconds: what gathering a weight costs, so that it is never the cheaper of two ways
NO_PARTS: Parts = {}
LOOKUPS = {aten.embedding, aten.index_select, aten.gather, aten.index}


class Surcharge(Protocol):
    """Seconds that a mesh axis adds for layouts that it does not want; a term of their own, beside real times."""

    def operator(self, op: Op, outs: SlotLayouts, nbytes: Callable[[Tensor], float]) -> float:
        """For an operator with results in these layouts."""
        ...

    def conversion(self, a: Layout, b: Layout, nbytes: float) -> float:
        """For a conversion of so many bytes."""
        ...


@dataclass
class Prices:
    """Seconds and bytes of one captured graph's operators and conversions.

    Attributes:
        program: the captured graph; sizes come from the example inputs' hints.
        grads: nodes whose values carry gradients: their operators count forward and backward.
        sequence: True or False forces or forbids sequence parallelism by ruling conversions out.
        objective: inference counts the forward alone. Layouts stay those of training, so gradients stay right.
        keepers: say what is kept for the backward.
        surcharge: of the mesh axis that is planned for, if it has one.
        cached: nodes whose values hold what a call began with, which no rank gathers.
        past: what decoding reads of earlier tokens.
        imbalance: the most rows that a rank gets for its experts, over the mean.
        gathers_weights: a weight may be gathered, at `RESCUE` times the price: for a program of a plan that was made
            for another one, where no other way is left.
        rank: whose part counts, and whose machine `cluster` is; None: the largest part. part: what a rank has of
            every sharded dimension, in place of what layouts say.
    """

    program: Capture
    tp: int
    cluster: Cluster
    grads: set[fx.Node]
    leaves: Mapping[fx.Node, Leaf]
    sequence: bool | None
    objective: Objective
    keepers: Keepers
    surcharge: Surcharge | None
    cached: set[fx.Node]
    past: Past
    imbalance: float
    gathers_weights: bool = False
    rank: int | None = None
    part: float | None = None

    def __post_init__(self) -> None:
        self._bytes: dict[int, tuple[float, Tensor]] = {}  # by identity, which lasts as long as the value is held
        self._saved = cache(self.keepers.of)
        self.tokens = lengths(self.program)
        # One token of a whole sequence's program stands for decoding, where the program has no past of its own.
        self.guesses = self.objective.name == "decode" and not any(x.kind.carried for x in self.program.leaves)
        # Greedy generation wants the place of the largest logit: their gather, under 2% of a token, moves no plan.
        model = self.program.origin[0] if self.program.origin is not None else None
        self.greedy = self.objective.name == "decode" and hasattr(model, "generate")
        seconds = {s for leaf in self.program.inputs for s in shape_of(leaf.node)[1:2]}
        self.second_sizes = {s for s in seconds if not isinstance(s, int) or s > 1}  # one token cannot be split
        # Decoding has one token a sequence.
        self.hints = {**self.program.hints, **(dict.fromkeys(self.tokens, 1) if self.guesses else {})}
        self.hint, self.whole = sizer(self.hints), sizer(self.program.hints)
        self._read: dict[fx.Node, list[float]] = {}
        self.outputs = {resolve(n)[0] for n in self.program.graph.output_node().all_input_nodes}
        self.weights = {n for n, leaf in self.leaves.items() if leaf.kind.weight}
        self.travelled: set[fx.Node] = set()  # values that have the rows of a rank's experts, from others
        for n in self.program.graph.nodes:  # and what is made of one weight alone: transposed, cast
            read = [i for i in n.all_input_nodes if tensors(i)]
            if len(read) == 1 and read[0] in self.weights:
                self.weights.add(n)
            over = mark(n).batch
            if over.target.mark == "T" if over is not None else not self.travelled.isdisjoint(n.all_input_nodes):
                self.travelled.add(n)

    @cached_property
    def of_ranks(self) -> tuple[Prices, ...]:
        """Prices of what each rank does on its own machine; () where all are alike, and of an axis beside tp."""
        if not self.cluster.ranks or self.surcharge is not None:
            return ()
        return tuple([self.on(rank) for rank in range(self.tp)])

    def on(self, rank: int, part: float | None = None) -> Prices:
        """Prices of what a rank does on its own machine, with this part of every sharded dimension."""
        prices = copy(self)
        prices.rank, prices.part, prices.cluster = rank, part, self.cluster.rank(rank)
        prices.__dict__["of_ranks"] = ()
        return prices

    def _slowest(self, price: Callable[[Prices], Cost]) -> Cost:
        """A cost whose seconds are those of the rank that is done last, and whose bytes are those of the fullest."""
        cost = price(self)
        if not self.of_ranks:
            return cost
        slow = max(map(price, self.of_ranks), key=self.seconds)
        times = {name: slow[name] for name in cost if TERMS[name].unit == "s"}
        return Cost(**{**cost, **times})

    def parameter_share(self, layout: Layout) -> float:
        """Part of a parameter that counts towards the parameters of a rank; of unlike ranks the mean, for copies are to
        be few, and not what the fast ranks have."""
        if not self.of_ranks:
            return self.share(layout)
        return sum(prices.share(layout) for prices in self.of_ranks) / self.tp

    def share(self, layout: Layout) -> float:
        """Part of a value that a rank holds: of `rank`, or the largest."""
        if self.part is not None and layout.distribution is not None and not layout.distribution.by_data:
            return self.part
        return layout.part(self.rank, self.tp, self.hint)

    def bytes(self, val: Tensor) -> float:
        """Bytes of the whole value."""
        if id(val) not in self._bytes:
            self._bytes[id(val)] = nbytes(val, self.hint), val
        return self._bytes[id(val)][0]

    def cache_bytes(self, value: Any) -> float:
        """Bytes that the whole value (node, result) has of earlier tokens."""
        return nbytes(tensor_at(value), self.hint, self.past.values[value], self.whole)

    def seconds(self, cost: Cost) -> float:
        """Return what a cost weighs in a step of the objective."""
        return self.objective.seconds(cost)

    def weight(self, val: Tensor, layout: Layout, counted: bool) -> Cost:
        """Return what a rank's part of a leaf costs by being there, and by the optimizer's step.

        Args:
            val: the whole value. layout: of the leaf.
            counted: whether it is a weight, which counts with gradient and optimizer states where it is trained.
        """
        return self._slowest(lambda prices: prices._weight(val, layout, counted))

    def _weight(self, val: Tensor, layout: Layout, counted: bool) -> Cost:
        part = self.bytes(val) * self.share(layout)
        if not counted:
            return Cost(budget_bytes=part)
        with_states = self.objective.budget_bytes(part, val)
        # A step reads the gradient, and reads and writes the weight and its states.
        traffic = 2 * with_states - part if with_states > part else 0.0
        optimizer = traffic / self.cluster.memory_bandwidth
        counted_bytes = self.bytes(val) * self.parameter_share(layout)
        return Cost(parameter_bytes=counted_bytes, budget_bytes=with_states, optimizer=optimizer)

    def flops(self, node: fx.Node) -> float:
        """Floating-point operations of the whole operator, forward; decoding does one row's part of them, and all on
        what a cache holds."""
        flops = mark(node).flops
        if flops is None:
            write(node, flops=(flops := node_flops(node)))
        if not self.guesses or not flops:
            return flops
        if node in self.past.steps:
            return flops * self.past.steps[node]
        lengths = self.tokens & {x for s in shape_of(node) for x in getattr(s, "free_symbols", ())}
        return flops / math.prod(self.program.hints[x] for x in lengths)

    def _sides(self, op: Op) -> list[float]:
        """Bytes of the whole of each operand and result, as far as a step reads or writes them."""
        if op.node not in self._read:
            vals = [*(s.meta["val"] for s in op.slots), *tensors(op.node)]
            long = self.past.sides.get(op.node, [{}] * len(vals))
            times = [self.past.copies.get(resolve(x), 1.0) for x in op.slots] + [1.0] * len(vals)
            sides = zip(vals, long, times, strict=False)
            self._read[op.node] = [nbytes(v, self.hint, parts, self.whole) / n for v, parts, n in sides]
        return self._read[op.node]

    def operator(self, op: Op, ins: SlotLayouts, outs: SlotLayouts, split: Factor | None) -> Cost:
        """Return what one rank's call with this factor split costs, with activations that it saves for the backward.

        Args:
            op: the call, with whole shapes.
            ins, outs: layouts of its operands and results.
            split: the loop of its rule that is split; None where it runs whole or passes sums.
        """
        cost = self._slowest(lambda prices: prices._operator(op, ins, outs, split))
        if self.surcharge is None:
            return cost
        return cost + Cost(surcharge=self.surcharge.operator(op, outs, self.bytes))

    def _operator(self, op: Op, ins: SlotLayouts, outs: SlotLayouts, split: Factor | None) -> Cost:
        results = tensors(op.node)
        if is_free(op):
            return NOTHING
        if (over := mark(op.node).batch) is not None:
            return Cost(communication=sum(seconds for seconds, *_ in self.across(op, over, self.share(outs[0]))))
        sides = [size * self.share(x) for size, x in zip(self._sides(op), [*ins, *outs], strict=False)]
        by_expert = op.node in self.travelled or split is not None and split.label == EXPERTS
        load = self.imbalance if by_expert else 1.0
        for i, x in enumerate([*op.slots, *outs][: len(sides)]):
            sides[i] *= 1.0 if x in self.weights else load
        if packet_of(op.target) in LOOKUPS:
            sides[0] = min(sides[0], sides[-1])  # of a table, the rows that are asked for
        nbytes = sum(sides)
        # The part of the loop that a rank runs: of a split one the least that any operand or result has of it.
        part = min(map(self.share, [*ins, *outs]), default=1.0) if split is not None else 1.0
        dtype = ARITHMETIC.get(str(op.target), dtype_name(results[0].dtype if results else torch.int64))
        if split is not None:
            nbytes *= 1 + 2 * split.copies  # read once more, and written
        flops = self.flops(op.node)
        part *= self._waste(op, split, outs) if flops and split is not None else 1.0
        part = part * load / peak_share(op.target, self.cluster)
        forward = op_cost(flops * part, nbytes, dtype, self.cluster)
        if op.node not in self.grads or not self.objective.training:
            return forward
        saved = self._activation_bytes(op.node, [*ins, *outs]) * load
        return (1 + BACKWARD) * forward + Cost(activation_bytes=saved, budget_bytes=saved)

    def across(self, op: Op, over: BatchConversion, part: float) -> list[tuple[float, str, float, int]]:
        """Price a conversion over a mesh axis beside tp, whose ranks have the stride tp, forward and backward.

        Args:
            op: the conversion. over: it. part: of the value that a tp rank has.

        Returns: seconds, the collective ("none" for none), its bytes and ranks, of each direction that there is.
        """
        (a, b, ranks), stride = over[:3], self.tp
        size = part * max(self.bytes(op.slots[0].meta["val"]), self.bytes(tensors(op.node)[0]))
        if "T" in (a.mark, b.mark):  # a rank's own rows go as the whole of all ranks do, to the one that gets most
            copies = conversions.copies_of(a, b)
            ranks, stride = ranks // copies, stride * copies
            size *= ranks * self.imbalance
        elif conversions.among_few(a, b):
            size *= ranks // conversions.copies_of(a, b)
        elif conversions.primitive(a, b) == "all_to_all":  # both sides are slices of the whole
            size *= ranks
        ways = [(a, b), (b.dual, a.dual)] if op.node in self.grads and self.objective.training else [(a, b)]
        out = []
        for src, dst in ways:
            spent = self.one_way(src, dst, size, ranks, stride) or 0.0
            out.append((spent, *conversions.sending(src, dst, size, ranks)))
        return out

    def _activation_bytes(self, node: fx.Node, layouts: list[Layout]) -> float:
        """Bytes of what this call is the first to save for the backward."""
        least = min(map(self.share, layouts), default=1.0)
        total = 0.0
        for x, at in self._saved(node):
            size = self.bytes(x) if isinstance(x, Tensor) else x
            total += size * (least if at is None else self.share(layouts[at]))
        return total

    def _waste(self, op: Op, split: Factor, outs: SlotLayouts) -> float:
        """The factor that splitting a product's columns adds to its arithmetic: columns are computed in whole tiles."""
        last, out = len(op.outs[0]) - 1, outs[0]
        if out.sharded_dim != last or None not in split.ins:
            return 1.0
        columns, tile = size_hint(op.outs[0][last], self.hints), self.cluster.matmul_tile
        part = columns * self.share(out)
        return math.ceil(part / tile) / part * columns / math.ceil(columns / tile) if part else 1.0

    def convert(self, value: Any, a: Layout, b: Layout) -> float | None:
        """Seconds of a conversion of a value (node, result), forward and backward; None where there is none.

        Args:
            value: node and number of its result.
            a, b: the layouts before and after.
        """
        cost = self.conversion(value, a, b)
        return None if cost is None else self.seconds(cost)

    def conversion(self, value: Any, a: Layout, b: Layout) -> Cost | None:
        """Price a conversion in terms.

        Args:
            value: whole, with `meta["val"]`. a, b: from which layout to which.
        """
        node = value[0]
        # Copies of a head for the few ranks that share it are not the gathering of a weight, which is forbidden.
        few = conversions.among_few(a, b)
        moves = node in self.weights and a.sharded_dim is not None and not few
        if moves and not self.gathers_weights:
            return None  # moving a weight is data parallelism's business, not tensor parallelism's
        if node in self.cached and (a.sharded_dim is not None or a.partial) and not (few and a.copies > 1):
            return None  # as long as all that was said, for every token
        if self._forbidden(node, a, b):
            return None
        # Forward a to b; backward the gradient goes from the dual of b to the dual of a. A plan that does not train has
        # no backward, but stays legal for one that does: both ways must exist, and only the first is paid.
        ways = self.ways(value, a, b)
        seconds = [self.one_way(*way) for way in ways]
        if None in seconds:
            return None
        # A slice of a replicated value is a copy on each rank, which is computing and not communication.
        out = {}
        for (x, y, _), spent in zip(ways, seconds[: 1 + self.objective.training], strict=False):
            kind = conversions.KINDS.get(conversions.key(x, y))
            name = "communication" if kind is not None and kind.primitive else "compute"
            out[name] = out.get(name, 0.0) + (RESCUE if moves else 1) * (spent or 0.0)
        if self.surcharge is not None:
            out["surcharge"] = self.surcharge.conversion(a, b, self.bytes(tensor_at(value)))
        return Cost(**out)

    def ways(self, value: Any, a: Layout, b: Layout) -> list[tuple[Layout, Layout, float]]:
        """Conversions forward and, of what has a gradient, backward, each with the bytes of the whole that is sent."""
        node, size = value[0], self.bytes(tensor_at(value))
        back = [(b.dual, a.dual, size)] if node in self.grads else []
        return [(a, b, size * self._narrow(node, a, b)), *back]

    def step_ways(self, value: Any, a: Layout, b: Layout) -> list[tuple[Layout, Layout, float]]:
        """Return those of `ways` that a step of the objective has."""
        return self.ways(value, a, b)[: 1 + self.objective.training]

    def traffic(self, value: Any, a: Layout, b: Layout) -> Traffic:
        """Return what a rank sends for a conversion of a value (node, result) in a step, forward and backward.

        Args:
            value: node and number of its result.
            a, b: the layouts before and after.
        """
        calls = [
            call for way in self.step_ways(value, a, b) if (call := conversions.sending(*way, self.tp))[0] != "none"
        ]
        return Traffic(sum(collective_bytes(*call) for call in calls), len(calls))

    def _narrow(self, node: fx.Node, a: Layout, b: Layout) -> float:
        """The part of a value's bytes that its conversion sends forward."""
        if self.greedy and (share := argmax_share(node, a, b, self.tp)) is not None:
            return share
        wire = sent_as(node.target, conversions.primitive(a, b)) if conversions.key(a, b) in conversions.KINDS else None
        return 1.0 if wire is None else wire.itemsize / tensors(node)[0].element_size()

    def _forbidden(self, node: fx.Node, a: Layout, b: Layout) -> bool:
        """Return whether `sequence` rules a conversion out: False those to a shard, True those to whole values."""
        if self.sequence is None or node in self.leaves or node not in self.grads:
            return False
        if not self.sequence:
            return b.sharded_dim is not None and a.sharded_dim is None
        lengths = self._lengths(node)
        if not lengths or node in self.outputs:
            return False
        if a.partial:
            return b.sharded_dim not in lengths
        return b == I or b == R and a.sharded_dim not in lengths

    def _lengths(self, node: fx.Node) -> list[int]:
        """A value's dimensions along the sequence: the inputs' second dimension, alone or in a product."""
        symbols = self.second_sizes
        return [d for d, s in enumerate(shape_of(node)) if s in symbols or symbols & getattr(s, "free_symbols", set())]

    def one_way(self, a: Layout, b: Layout, size: float, ranks: int = 0, stride: int = 1) -> float | None:
        """Seconds of a conversion in one direction; None where there is none.

        Args:
            a, b: from which layout to which. size: bytes of the whole value.
            ranks: of the group, the tp ranks where it is 0. stride: distance between them.
        """
        if a == b:
            return 0.0
        kind = conversions.KINDS.get(conversions.key(a, b))
        if kind is None:
            return None
        work = "none" if kind.primitive is None and kind.pre is kind.post else kind.primitive or "local"
        _, size, ranks = conversions.sending(a, b, size, ranks or self.tp)
        return call_seconds(work, size, ranks, self.cluster, stride)


def lengths(program: Capture) -> set[Any]:
    """The symbols of the inputs' second dimension: the lengths of sequences."""
    sides = [shape_of(leaf.node)[1:2] for leaf in program.inputs]
    return {s for side in sides for s in side if not isinstance(s, int)} & set(program.hints)


def sizer(hints: Hints) -> Hint:
    """`size_hint` with these sizes for the symbols; substituting is slow, and a graph has few different sizes."""
    return cache(lambda size: size_hint(size, hints))


def nbytes(val: Tensor, hint: Hint, parts: Parts = NO_PARTS, whole: Hint | None = None) -> float:
    """Bytes of the whole value.

    Args:
        hint: sizes for its symbols. parts: dimensions that have a part of what they have with the sizes of `whole`.
    """
    count = float(val.element_size())
    for d, s in enumerate(sizes(val)):
        count *= parts[d] * whole(s) if whole is not None and d in parts else hint(s)
    return count


def is_free(op: Op) -> bool:
    """Return whether the operator only makes a view."""
    return gives_views(op.target) or packet_of(op.target) in FREE
