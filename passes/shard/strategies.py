"""From rules to choices: which partitions each dimension may have, and every legal way to run each operator."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autotp.cost.solver.problem import ValueId
from autotp.ir.layouts import Distribution, I, Layout, P, Partial, Partition, R, dealt_by, kinds
from autotp.ir.op import Carry, Factor, Rule, Shape

TORCHS = ("aten", "prims", "autotp")  # whose operators have derivatives for backwards
OPAQUE = Rule(summed=False)  # what is known of an operator of somebody else's: its backward may be anything
MOST = 5  # candidate partitions kept for one dimension of one value
Dim = tuple[ValueId, int]


class Candidates:
    """The partitions that each dimension of each value may have, grown through the factors to a fixed point."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.of: dict[Dim, list[Distribution]] = defaultdict(list)
        self.changed = False

    def seed(self, value: ValueId, shape: Shape, skip: Iterable[int] = ()) -> None:
        """A plain split of every dimension that is long enough."""
        for d, n in enumerate(shape):
            if d not in skip and (not isinstance(n, int) or n > 1):
                for partition in (p for kind in kinds() for p in kind.seeds(n, self.tp)):
                    self.add((value, d), partition)

    def add(self, dim: Dim, partition: Distribution) -> None:
        """Keep a partition among the dimension's simplest; one rank has nothing to split."""
        if self.tp == 1:
            return
        known = self.of[dim]
        if partition not in known:
            ranked = sorted([*known, partition], key=lambda p: p.simplicity(self.tp))[:MOST]
            self.changed |= partition in ranked
            self.of[dim] = ranked

    def full(self, loop: Distribution) -> bool:
        """Whether every rank certainly owns something of a loop that is dealt so."""
        return loop.full(self.tp)

    def loops(self, factor: Factor, ins: list[frozenset[ValueId]], outs: list[ValueId]) -> list[Distribution]:
        """Partitions of a factor's loop that some slot suggests."""
        found: dict[Distribution, None] = {}
        slots = [
            *zip(factor.ins, ins, strict=True),
            *((c, frozenset([o])) for c, o in zip(factor.outs, outs, strict=True)),
        ]
        pieces: dict[int, dict[Distribution, None]] = defaultdict(dict)
        for carry, values in slots:
            for partition in (p for v in values if carry for p in self.of.get((v, carry.dim), ())):
                assert carry is not None
                low = None if carry.groups is not None else partition.lower(carry.repeat, carry.unit, self.tp)
                if low is not None:
                    (found if carry.piece is None else pieces[carry.piece])[low] = None
        if factor.pieces and set(pieces) == {i for i, n in enumerate(factor.pieces) if n != 0}:
            for combination in itertools.islice(itertools.product(*(pieces[i] for i in sorted(pieces))), 16):
                joined = Partition.join(combination, self.tp)
                if joined is not None:
                    found[joined] = None
        return [p for p in found if not factor.pieces or p.cut(factor.pieces, self.tp)]

    def spread(self, factor: Factor, ins: list[frozenset[ValueId]], outs: list[ValueId]) -> None:
        """Carry what one slot suggests to the factor's other slots.

        Rows by group only go onwards, from operands: where their ends are not yet known, nothing can be dealt by them.
        """
        for loop in self.loops(factor, ins, outs):
            if loop.by_data and not self.arrives(factor, loop, ins):
                continue
            for carry, values in (
                *zip(factor.ins, ins, strict=True),
                *zip(factor.outs, ([o] for o in outs), strict=True),
            ):
                partition = place(carry, factor, loop, self.tp, ins) if carry is not None else None
                if carry is not None and partition is not None:
                    for value in values:
                        self.add((value, carry.dim), partition)

    def arrives(self, factor: Factor, loop: Distribution, ins: list[frozenset[ValueId]]) -> bool:
        """Whether some operand may be dealt by these groups."""
        slots = zip(factor.ins, ins, strict=True)
        return any(loop in self.of.get((v, carry.dim), ()) for carry, held in slots if carry for v in held)


def place(
    carry: Carry, factor: Factor, loop: Distribution, tp: int, ins: Sequence[frozenset[ValueId]] = ()
) -> Distribution | None:
    """The partition of a slot's dimension when its factor's loop has this one; None where there is none."""
    if carry.piece is not None:
        pieces = loop.cut(factor.pieces, tp)
        assert pieces is not None
        loop = pieces[carry.piece]
    if carry.groups is not None:
        return loop.by_groups(min(str(v[0]) for v in ins[carry.groups]))  # type: ignore[index]
    return loop.lift(carry.repeat, carry.unit, tp)


def penalty(layouts: Iterable[Layout], tp: int) -> int:
    """What breaks ties between equal costs: what each says of itself."""
    return sum(x.penalty(tp) for x in layouts)


Signature = tuple[tuple[Layout, ...], tuple[Layout, ...], int | None, Distribution | None]


def signatures(
    rule: Rule | None, ins: list[bool], outs: list[bool], slots: list[frozenset[ValueId]], results: list[ValueId],
    candidates: Candidates,
) -> Iterator[Signature]:  # fmt: skip
    """Every legal (layouts of operands, layouts of results, split factor, its loop) of one operator.

    `ins` and `outs` say which slots and results may carry a gradient; the others need no Invariant.
    """
    carries = any(outs)
    as_one = (I,) if rule is not None and not rule.summed else (I, R)
    for whole in as_one if any(ins) else (R,):
        yield tuple(whole if g else R for g in ins), tuple(whole if g and any(ins) else R for g in outs), None, None
    if rule is None:
        return
    for linear in rule.linear:
        if all(ins[s] for s in linear) or not carries:
            yield tuple(P if s in linear else R for s in range(len(ins))), (P,) * len(outs), None, None
    for index, factor in enumerate(rule.factors):
        if _contracts(factor) and not (factor.contracted and (factor.reduction == "sum" or not carries)):
            continue
        for loop in candidates.loops(factor, slots, results):
            if not (rule.empty or candidates.full(loop)):
                continue
            if loop.by_data and (_contracts(factor) or not candidates.arrives(factor, loop, slots)):
                continue  # a sum would add up rows that hold nothing
            got = _split(rule, factor, loop, slots, results, candidates)
            if got is not None:
                yield (*got, index, loop)


def _contracts(factor: Factor) -> bool:
    return any(c is None for c in factor.outs)


def _split(
    rule: Rule, factor: Factor, loop: Distribution, slots: list[frozenset[ValueId]], results: list[ValueId],
    candidates: Candidates,
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]] | None:  # fmt: skip
    ins, outs = [], []
    for side, carries, values in ((ins, factor.ins, slots), (outs, factor.outs, [frozenset([r]) for r in results])):
        for slot, (carry, held) in enumerate(zip(carries, values, strict=True)):
            if carry is None:
                addend = slot in rule.addends and _contracts(factor)
                side.append(Partial(factor.reduction) if side is outs else P if addend else R)
                continue
            partition = place(carry, factor, loop, candidates.tp, slots)
            if partition is None or not all(partition in candidates.of.get((v, carry.dim), ()) for v in held):
                return None
            side.append(dealt_by(carry.dim, partition))
    return tuple(ins), tuple(outs)
