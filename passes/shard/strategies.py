"""From rules to choices: which partitions each dimension may have, and every legal way to run each operator."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autotp.cost.solver.problem import ValueId
from autotp.ir.layouts import Distribution, I, Layout, P, Partial, Partition, R, Replicate, SlotLayouts, dealt_by, kinds
from autotp.ir.op import Carry, Factor, Op, Rule, Shape
from autotp.ir.sizes import Size, UnitsBy
from autotp.rules.core import product

Slots = list[frozenset[ValueId]]  # the values that each operand slot reads, in all equal operators

TORCHS = ("aten", "prims", "autotp")  # whose operators have derivatives for backwards
OPAQUE = Rule(summed=False)  # what is known of an operator of somebody else's: its backward may be anything
MAX_PARTITIONS = 5  # candidate partitions for one dimension of one value
MAX_COMBINATIONS = 16  # combinations of pieces: five candidates for each of q, k and v would be 125
Dim = tuple[ValueId, int]


class Candidates:
    """The partitions that each dimension of each value may have, grown through the factors to a fixed point.

    Args:
        tp: number of ranks.
        fills: whether every rank certainly owns something of a loop; None for `Distribution.full`.
        shares: of the ranks, by which dimensions are sharded; () for equal ones. units: of some lengths exactly.
        ends: number of each value that says where groups end, as in `Groups`.
    """

    def __init__(
        self,
        tp: int,
        fills: Callable[[Distribution, int], bool] | None = None,
        ends: Mapping[ValueId, int] | None = None,
        shares: tuple[int, ...] = (),
        units: UnitsBy = (),
    ) -> None:
        self.tp, self.fills, self.ends, self.shares, self.units = tp, fills, ends or {}, shares, units
        self.of: dict[Dim, list[Distribution]] = defaultdict(list)
        self.grew = False

    def seed(self, value: ValueId, shape: Shape, skip: Iterable[int] = ()) -> None:
        """Add a plain split of every dimension that is long enough."""
        for d, n in enumerate(shape):
            if d not in skip and (not isinstance(n, int) or n > 1):
                for partition in (p for kind in kinds() for p in kind.seeds(n, self.tp)):
                    self.add((value, d), partition.by(self.shares, self.tp, self.units))

    def add_plain(self, dim: Dim, length: Size) -> None:
        """Keep a split of single elements, as a dimension of this length may have by itself."""
        self.add(dim, Partition.plain(length, self.tp).by(self.shares, self.tp, self.units))

    def add(self, dim: Dim, partition: Distribution) -> None:
        """Keep a partition among the dimension's simplest; one rank has nothing to split."""
        if self.tp == 1:
            return
        partitions = self.of[dim]
        if partition not in partitions:
            # Those that several ranks own alike push none of the others out, and none of these them.
            others = [p for p in partitions if p.shared != partition.shared]
            alike = [p for p in (*partitions, partition) if p.shared == partition.shared]
            ranked = sorted(alike, key=self._order)[:MAX_PARTITIONS]
            self.grew |= partition in ranked
            self.of[dim] = sorted([*ranked, *others], key=self._order)

    def _order(self, partition: Distribution) -> tuple[bool, tuple[bool, int, bool, str]]:
        return partition.shared, partition.simplicity(self.tp)

    def full(self, loop: Distribution) -> bool:
        """Say whether every rank certainly owns something of a loop that is sharded so."""
        return loop.full(self.tp) if self.fills is None else self.fills(loop, self.tp)

    def loops(self, factor: Factor, ins: Slots, outs: list[ValueId]) -> list[Distribution]:
        """List the partitions of a factor's loop that some slot suggests.

        Args:
            factor: the loop, and how each slot carries it.
            ins: the values that an operand slot reads, in all equal instances of the operator.
            outs: the value of each result.
        """
        whole: dict[Distribution, None] = {}
        pieces: dict[int, dict[Distribution, None]] = defaultdict(dict)
        for carry, values in _carried(factor, ins, outs):
            # How many rows a group has is data, so rows by group say nothing of the loop over groups.
            if carry is None or carry.groups is not None:
                continue
            for partition in (p for v in values for p in self.of.get((v, carry.dim), ())):
                loop = partition.lower(carry.repeat, carry.unit, self.tp)
                if loop is not None:
                    partitions = whole if carry.piece is None else pieces[carry.piece]
                    partitions[loop] = None
        # A loop that is cut up, as a concatenation of q, k and v, is known once each of its pieces is.
        if factor.pieces and set(pieces) == {i for i, n in enumerate(factor.pieces) if n != 0}:
            in_order = [pieces[i] for i in sorted(pieces)]
            for combination in itertools.islice(itertools.product(*in_order), MAX_COMBINATIONS):
                joined = Partition.join(combination, self.tp)
                if joined is not None:
                    whole[joined] = None
        # A plain split of 8 + 4 columns gives rank 0 six of the first piece: no slice of the pieces is that.
        return [p for p in whole if not factor.pieces or p.cut(factor.pieces, self.tp)]

    def spread(self, factor: Factor, ins: Slots, outs: list[ValueId]) -> None:
        """Carry what one slot suggests to the factor's other slots.

        Rows by group only go onwards, from operands: where their ends are not yet known, nothing can be split by them.

        Args:
            factor, ins, outs: as for `loops`.
        """
        for loop in self.loops(factor, ins, outs):
            if loop.by_data and not self.arrives(factor, loop, ins):
                continue
            for carry, values in _carried(factor, ins, outs):
                partition = self.place(carry, factor, loop, ins) if carry is not None else None
                if carry is not None and partition is not None:
                    for value in values:
                        self.add((value, carry.dim), partition)

    def arrives(self, factor: Factor, loop: Distribution, ins: Slots) -> bool:
        """Say whether some operand may be split by these groups."""
        carried = [(carry, values) for carry, values in zip(factor.ins, ins, strict=True) if carry is not None]
        return any(loop in self.of.get((v, carry.dim), ()) for carry, values in carried for v in values)

    def place(
        self, carry: Carry, factor: Factor, loop: Distribution, ins: Sequence[frozenset[ValueId]]
    ) -> Distribution | None:
        """Find the partition of a slot's dimension when its factor's loop has this one; None where there is none.

        Args:
            carry: of the slot. factor, ins: as for `loops`.
            loop: the partition of the factor's loop.
        """
        if carry.piece is not None:
            pieces = loop.cut(factor.pieces, self.tp)
            assert pieces is not None
            loop = pieces[carry.piece]
        if carry.groups is not None:
            return loop.by_groups(min(self.ends[v] for v in ins[carry.groups]))
        return loop.lift(carry.repeat, carry.unit, self.tp)


def _carried(
    factor: Factor, ins: Sequence[frozenset[ValueId]], outs: Iterable[ValueId]
) -> Iterator[tuple[Carry | None, frozenset[ValueId]]]:
    """Pair each slot's place in a loop with the values that are there; results come after operands."""
    return zip(factor.carries, (*ins, *(frozenset([o]) for o in outs)), strict=True)


def several_read(op: Op, factor: Factor) -> bool:
    """Say whether several elements of a result are made of each step of a loop in an operand, as a group of queries
    reads one head of keys: the loop is wider in a result or a further operand, or what follows it is expanded."""
    result = factor.outs[0] if factor.outs else None
    if result is None or not isinstance(factor.size, int):
        return False
    for carry, shape in zip(factor.ins, op.ins, strict=True):
        if carry is None or carry.unit != 1:
            continue
        # A view has as many elements before as after, and names the same ones otherwise.
        wider = result.unit != 1 and product(shape) != product(op.outs[0])
        behind = shape[carry.dim + 1 : carry.dim + 2], op.outs[0][result.dim + 1 : result.dim + 2]
        if wider or behind[0] == (1,) != behind[1]:
            return True
    return False


def penalty(layouts: Iterable[Layout], tp: int) -> int:
    """Count points that break ties of equal costs: one for a further segment, one for repetition, two for unevenness.

    Which dimension is split does not count.

    Args:
        layouts: of an operator's operands and results.
        tp: number of ranks.
    """
    return sum(x.penalty(tp) for x in layouts)


Signature = tuple[SlotLayouts, SlotLayouts, int | None, Distribution | None]


def signatures(
    rule: Rule | None, ins: list[bool], outs: list[bool], slots: Slots, results: list[ValueId],
    candidates: Candidates,
) -> Iterator[Signature]:  # fmt: skip
    """Yield every legal (layouts of operands, layouts of results, split factor, its loop) of one operator.

    Args:
        rule: None for an operator without one, which runs whole.
        ins, outs: which slots and results may carry a gradient; the others need no Invariant.
        slots: the values that each operand slot reads; `results`: the value of each result.
        candidates: the partitions that each dimension may have.
    """
    yield from _whole(rule, ins, outs)
    # Nothing is known of its loops: a sort that somebody wrote would sort each part by itself.
    if rule is None:
        return
    carries = any(outs)
    for linear in rule.linear:
        # Values without a gradient are masks and positions, which every rank computes whole.
        if all(ins[s] for s in linear) or not carries:
            operands: list[Layout] = [R] * len(ins)
            for slot in linear:
                operands[slot] = P
            yield tuple(operands), (P,) * len(outs), None, None
    for index, factor in enumerate(rule.factors):
        # A maximum over the ranks has no gradient: none of them knows that it was the largest.
        partial = factor.contracted and (factor.reduction == "sum" or not carries)
        if factor.contracts and not partial:
            continue
        for loop in candidates.loops(factor, slots, results):
            # Of three rows four ranks have 1, 1, 1 and none, and many kernels refuse a tensor without elements.
            if not rule.runs_without(factor) and not candidates.full(loop):
                continue
            # What several ranks have alike would count twice in a sum, and its gradients come as summands.
            if loop.shared and (None in factor.outs or not rule.summed):
                continue
            # A sum over rows by group would add up rows that hold nothing.
            if loop.by_data and (factor.contracts or not candidates.arrives(factor, loop, slots)):
                continue
            layouts = _split(rule, factor, loop, slots, results, candidates)
            if layouts is not None:
                yield (*layouts, index, loop)


def _whole(rule: Rule | None, ins: list[bool], outs: list[bool]) -> Iterator[Signature]:
    """Yield signatures where all ranks compute the whole: alike (I), or for their parts, with summed gradients (R)."""
    # The backward that somebody wrote may clip, and then summands are not what it may be given.
    alike = (I,) if rule is not None and not rule.summed else (I, R)
    graded = any(ins)
    for whole in alike if graded else (R,):
        layout = {True: whole, False: R}
        operands = tuple(layout[g] for g in ins)
        yield operands, tuple(layout[g and graded] for g in outs), None, None


def _split(
    rule: Rule, factor: Factor, loop: Distribution, slots: Slots, results: list[ValueId],
    candidates: Candidates,
) -> tuple[SlotLayouts, SlotLayouts] | None:  # fmt: skip
    """Give the layouts of operands and results where this loop is split; None where some slot cannot be."""
    layouts = []
    for slot, (carry, values) in enumerate(_carried(factor, slots, results)):
        if carry is None:
            layouts.append(_uncarried(rule, factor, slot))
            continue
        partition = candidates.place(carry, factor, loop, slots)
        # The candidates are capped, so a partition that one slot suggests may be none of another's.
        if partition is None or not all(partition in candidates.of.get((v, carry.dim), ()) for v in values):
            return None
        layouts.append(dealt_by(carry.dim, partition))
    return tuple(layouts[: len(slots)]), tuple(layouts[len(slots) :])


def _uncarried(rule: Rule, factor: Factor, slot: int) -> Layout:
    """Give the layout of an operand or, numbered after them, a result that lacks the loop which is split."""
    if slot >= len(factor.ins):
        return I if slot - len(factor.ins) in factor.alike else Partial(factor.reduction)
    if slot in factor.maxima:
        return Replicate("max")
    # A bias is added once: as an addend of every rank's summand it would count tp times.
    return P if slot in rule.addends and factor.contracts else R
