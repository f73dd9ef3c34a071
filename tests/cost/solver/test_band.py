"""Plans within a band of the least seconds: against enumeration, a test for each stage, and rivals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autotp.cost.solver import band as stages
from autotp.cost.solver.problem import Choice, Item, Problem, Traffic, Use
from autotp.cost.solver.search import Search
from autotp.cost.solver.solve import Infeasible, solve
from autotp.ir.layouts import Layout, P, Partition, R, Shard

S, T = Shard(0, Partition.plain(8, 2)), Shard(1, Partition.plain(6, 2))
LAYOUTS: tuple[Layout, ...] = (R, P, S)
GRAPHS, BAND = 120, 0.25


@dataclass(frozen=True)
class Plan:
    """One choice per item, with what it comes to; ordered as plans within a band are."""

    sent: float
    collectives: int
    penalty: int
    seconds: float
    chosen: tuple[int, ...]

    @property
    def order(self) -> tuple[float, int, int, float]:
        return self.sent, self.collectives, self.penalty, round(self.seconds, 6)


def random_problem(seed: int) -> Problem:
    """A chain of operators after a leaf, with one reader a value: a conversion costs what it sends, times a factor."""
    draw = random.Random(seed)
    count = draw.randint(3, 5)
    items = []
    for i in range(count):
        choices = [
            Choice(
                (draw.choice(LAYOUTS),) if i else (), (draw.choice(LAYOUTS),), float(draw.randint(10, 20)),
                penalty=draw.randint(0, 2),
            )
            for _ in range(draw.randint(2, 3))
        ]  # fmt: skip
        items.append(Item(f"op{i}", choices, [frozenset([i - 1])] if i else [], [i], draw.randint(1, 2)))
    uses = [Use(v, ((v + 1, 0),), draw.randint(1, 2)) for v in range(count - 1)]
    pairs = list(itertools.product(range(count), itertools.permutations(LAYOUTS, 2)))
    prices = {(v, *pair): float(draw.randint(1, 6)) for v, pair in pairs}
    sent = {key: Traffic(float(draw.randint(0, 2)), draw.randint(0, 2)) for key in prices}
    return Problem(items, uses, lambda v, a, b: prices.get((v, a, b)), traffic=lambda v, a, b: sent[v, a, b])  # type: ignore[call-overload]


def plans(problem: Problem) -> Iterator[Plan]:
    """Every assignment of a chain."""
    for chosen in itertools.product(*(range(len(i.choices)) for i in problem.items)):
        picked = [item.choices[k] for item, k in zip(problem.items, chosen, strict=True)]
        seconds = sum(c.seconds * i.count for c, i in zip(picked, problem.items, strict=True))
        sent, calls = 0.0, 0
        for use in problem.uses:
            ((reader, slot),) = use.consumers
            a, b = picked[reader - 1].outs[0], picked[reader].ins[slot]
            if a != b:
                seconds += (problem.convert(use.value, a, b) or 0.0) * use.count
                way = problem.traffic(use.value, a, b)
                sent, calls = sent + way.bytes * use.count, calls + way.collectives * use.count
        yield Plan(sent, calls, picked[0].penalty * problem.items[0].count, seconds, chosen)


def best(found: Sequence[Plan], band: float) -> Plan:
    """The first in order of those within the band."""
    most = min(p.seconds for p in found) * (1 + band)
    return min((p for p in found if p.seconds <= most * (1 + 1e-9)), key=lambda p: p.order)


@pytest.mark.parametrize("most_nodes", [stages.MAX_STAGE_NODES, 0], ids=["own", "general"])
def test_equal_to_enumeration(monkeypatch, most_nodes):
    monkeypatch.setattr(stages, "MAX_STAGE_NODES", most_nodes)
    other = 0
    for seed in range(GRAPHS if most_nodes else GRAPHS // 4):
        problem = random_problem(seed)
        found = list(plans(problem))
        for band in (0.0, BAND):
            got, want = solve(problem, band=band), best(found, band)
            mine = next(p for p in found if p.chosen == got.choices)
            assert mine.order == want.order, (seed, band)
            assert got.sent_bytes == want.sent and got.collectives == want.collectives, seed
            assert got.seconds == pytest.approx(want.seconds, rel=1e-6), seed
            assert got.least_seconds == pytest.approx(min(p.seconds for p in found)), seed
            assert got.bound <= got.least_seconds * (1 + 1e-9), seed
        other += best(found, BAND).order != best(found, 0.0).order
    assert other > GRAPHS // 10, "the band must matter"


def test_beside_a_rival_equal_to_enumeration():
    """No slower than the best plan that a rival allows; where that is outside of the band, faster by the band."""
    within = outside = 0
    for seed in range(GRAPHS):
        problem, draw = random_problem(seed), random.Random(seed)
        rival = frozenset(
            (i, draw.randrange(len(item.choices))) for i, item in enumerate(problem.items) if seed & 1 << i
        )
        got = solve(replace(problem, rivals=(rival,)), band=BAND)
        found = list(plans(problem))
        theirs = best([p for p in found if not rival & set(enumerate(p.chosen))], BAND)
        assert got.rival is not None and got.rival.seconds == pytest.approx(theirs.seconds), seed
        least = min(p.seconds for p in found)
        near = theirs.seconds <= least * (1 + BAND) * (1 + 1e-9)
        limit = theirs.seconds if near else min(least * (1 + BAND), theirs.seconds / (1 + BAND))
        want = best(found, limit / least - 1)
        mine = next(p for p in found if p.chosen == got.choices)
        assert mine.order == want.order, seed
        within += near and want.order != best(found, BAND).order
        outside += not near and want.order != best(found, BAND).order
    assert within > GRAPHS // 20 and outside > 0, "rivals must matter"


def chain(*steps: Sequence[Choice], **fields: Any) -> Problem:
    """Items of which each reads what the one before makes. To S two bytes are sent in one collective, to P one in two,
    to T none in three; all of them take a second."""
    items = [Item(f"op{i}", list(c), [frozenset([i - 1])] if i else [], [i]) for i, c in enumerate(steps)]
    uses = [Use(i, ((i + 1, 0),), 1) for i in range(len(steps) - 1)]
    traffic = {S: Traffic(2.0, 1), P: Traffic(1.0, 2), T: Traffic(0.0, 3)}
    return Problem(items, uses, lambda v, a, b: 1.0, traffic=lambda v, a, b: traffic.get(b, Traffic()), **fields)


def source(outs: Layout = R, seconds: float = 98.0, **amounts: Any) -> Choice:
    return Choice((), (outs,), seconds, **amounts)


def reads(layout: Layout, seconds: float = 1.0) -> Choice:
    return Choice((layout,), (R,), seconds)


FEW_BYTES, FEW_CALLS = reads(P), reads(S)
CASES = {
    "bytes before collectives": ([[source()], [FEW_CALLS, FEW_BYTES]], [0, 1]),
    "collectives before partitions": ([[source(), source(T, penalty=9)], [Choice((T,), (R,))]], [1, 0]),
    "partitions before time": ([[source(R, penalty=1), source(S, 99.0)], [Choice((R,), (R,)), Choice((S,), (S,))]],
                               [1, 1]),
    "time at last": ([[source(R, 99.0), source(R)], [Choice((R,), (R,))]], [1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_order_within_the_band(name):
    steps, want = CASES[name]
    assert list(solve(chain(*steps), band=0.02).choices) == want
    backward = chain(*(choices[::-1] for choices in steps))
    assert list(solve(backward, band=0.02).choices) == [len(c) - 1 - k for c, k in zip(steps, want, strict=True)]


def first_of(a: Choice, b: Choice, leaves: int) -> bool:
    """Whether `a` is taken before `b` in either order, beside leaves whose penalties come to much."""
    heavy = [Choice((), (R,), 1.0), Choice((), (S,), 1.0, penalty=3)]
    more = [Item(f"leaf{i}", heavy, [], [i + 1], 10) for i in range(leaves)]
    problems = [chain(pair) for pair in ((a, b), (b, a))]
    found = [solve(replace(x, items=[*x.items, *more]), band=0.02) for x in problems]
    return [x.choices[0] for x in found] == [0, 1]


@pytest.mark.parametrize("leaves", [0, 100])
def test_equal_plans_are_told_apart(leaves, monkeypatch):
    """By time, however little beside the counts, and then by what the solver's head says of ties."""
    lean, full = source(activation_bytes=8.0), source(S, activation_bytes=9.0)
    quick, slow = source(seconds=98.0 * (1 - 1e-5)), source(S, seconds=98.0)
    assert first_of(lean, full, leaves) and first_of(quick, slow, leaves)
    monkeypatch.setattr(stages, "EQUAL_SECONDS", 1.0)
    assert not first_of(lean, full, leaves), "the negative control: where all counts as equal"


def test_no_plan_outside_of_the_band(monkeypatch):
    slow = chain([source()], [FEW_CALLS, reads(R, 5.0)])
    assert solve(slow, band=0.02).choices == (0, 0) and solve(slow, band=0.05).choices == (0, 1)
    assert solve(slow).choices == (0, 0)
    within = Search.within
    monkeypatch.setattr(Search, "within", lambda self, cost, most: within(self, cost, most * 2))
    assert solve(slow, band=0.02).choices == (0, 1), "the negative control: nothing else keeps to the band"


def test_never_slower_than_a_rival():
    """Whole is slower by 1% and sends nothing. A rival that may not be whole holds the plan to its time."""
    problem = chain([source()], [FEW_CALLS, reads(R, 3.0)])
    assert solve(problem, band=0.02).choices == (0, 1)
    got = solve(replace(problem, rivals=(frozenset({(1, 1)}),)), band=0.02)
    assert got.rival is not None and got.rival.choices == (0, 0) and got.choices == (0, 0)
    assert got.seconds == got.rival.seconds and got.sent_bytes == got.rival.sent_bytes == 2.0


def test_a_rival_outside_of_the_band_is_beaten_by_more_than_the_band():
    whole, between = reads(R, 5.1), reads(T, 2.5)
    problem = chain([source()], [FEW_CALLS, between, whole])
    assert solve(problem, band=0.02).choices == (0, 1), "1.5% slower, and nothing is sent"
    got = solve(replace(problem, rivals=(frozenset({(1, 0), (1, 1)}),)), band=0.02)
    assert got.rival is not None and got.rival.choices == (0, 2) and got.rival.seconds > 1.02 * got.least_seconds
    assert got.choices == (0, 0) and got.seconds * 1.02 < got.rival.seconds


def test_a_slow_rival_does_not_widen_the_band():
    outside, slow = reads(R, 5.0), reads(T, 50.0)
    problem = chain([source()], [FEW_CALLS, outside, slow])
    got = solve(replace(problem, rivals=(frozenset({(1, 0), (1, 1)}),)), band=0.02)
    assert got.rival is not None and got.rival.choices == (0, 2) and got.choices == (0, 0)


def test_the_better_rival_counts_and_one_that_cannot_be_does_not():
    problem = chain([source()], [FEW_CALLS, FEW_BYTES, reads(R, 2.5)])
    by_calls, by_bytes, none = frozenset({(1, 1), (1, 2)}), frozenset({(1, 0), (1, 2)}), frozenset({(0, 0)})
    for rivals in itertools.permutations((by_calls, by_bytes, none)):
        got = solve(replace(problem, rivals=rivals), band=0.02)
        assert got.rival is not None and got.rival.choices == (0, 1)
    assert solve(replace(problem, rivals=(none,)), band=0.02).rival is None


def test_what_is_infeasible_is_so_with_a_band():
    problem = Problem([Item("a", [source()], [], [0]), Item("b", [FEW_CALLS], [frozenset([0])], [1])],
                      [Use(0, ((1, 0),), 1)], lambda *_: None)  # fmt: skip
    with pytest.raises(Infeasible):
        solve(problem, band=0.02)
