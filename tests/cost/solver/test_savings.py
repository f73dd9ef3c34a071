"""Savings in the solver: against enumeration on random small graphs, and against what a rank's program then does."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import autotp
from autotp.cost import Cluster
from autotp.cost.collective_costs import call_seconds
from autotp.cost.solver.problem import Choice, Item, Problem, Use
from autotp.cost.solver.savings import Cap, Saving
from autotp.cost.solver.solve import solve
from autotp.ir.layouts import I, Layout, P, Partition, R, Shard
from autotp.text import seconds
from tests.helpers.modules.overlapped import made

LAYOUTS: tuple[Layout, ...] = (I, R, P, Shard(0, Partition.plain(8, 2)))
GRAPHS = 120


def random_problem(seed: int) -> Problem:
    """Three or four operators in a chain with a shortcut, with savings over conversions and choices at random.

    As in a program, what a conversion saves in all is at most what it costs.
    """
    draw = random.Random(seed)
    count = draw.randint(3, 4)
    slots = [draw.sample(range(i), min(i, draw.randint(1, 2))) for i in range(count)]
    items = []
    for i in range(count):
        taken = {(tuple(draw.choice(LAYOUTS) for _ in slots[i]), (draw.choice(LAYOUTS),)) for _ in range(3)}
        choices = [Choice(*layouts, float(draw.randint(0, 20))) for layouts in sorted(taken, key=repr)]
        items.append(Item(f"op{i}", choices, [frozenset([s]) for s in slots[i]], [i], draw.randint(1, 3)))
    uses = []
    for value in range(count):
        readers = tuple((i, k) for i in range(count) for k, s in enumerate(slots[i]) if s == value)
        uses += [Use(value, readers, draw.randint(1, 3))] if readers else []
    pairs = list(itertools.permutations(LAYOUTS, 2))
    prices = {(v, a, b): float(draw.randint(8, 12)) for v in range(count) for a, b in pairs if draw.random() < 0.8}
    savings = []
    for k, use in enumerate(uses):
        readers = [(i, c) for i, _ in use.consumers for c in items[i].choices if draw.random() < 0.7]
        sent: Any = {(k, a, R): 4.0 for a in LAYOUTS if a != R}
        beside = Cap(choices={(i, c.ins, c.outs): float(draw.randint(2, 6)) for i, c in readers})
        savings.append(Saving("hidden", ((Cap(sent), beside),), use.count))
    arcs = [(k, I, R) for k in range(len(uses))]
    one = tuple(Cap(dict.fromkeys((a for a in arcs if a != other), 2.0)) for other in arcs)
    savings += [Saving("bucketed", (one,), 2)] if len(arcs) > 1 and draw.random() < 0.5 else []
    return Problem(items, uses, lambda v, a, b: prices.get((v, a, b)), savings=savings)  # type: ignore[call-overload]


def trees(produced: Layout, wanted: set[Layout]) -> Iterator[dict[Layout, Layout]]:
    """Every way to make the wanted layouts from the produced one: each one's source."""
    missing = sorted(wanted - {produced}, key=repr)
    for sources in itertools.product([produced, *missing], repeat=len(missing)):
        tree = dict(zip(missing, sources, strict=True))
        if all(_rooted(layout, tree, produced) for layout in missing):
            yield tree


def _rooted(layout: Layout, tree: dict[Layout, Layout], root: Layout) -> bool:
    for _ in tree:
        layout = tree.get(layout, layout)
    return layout == root


def assignments(problem: Problem) -> Iterator[tuple[float, float]]:
    """Seconds of every assignment with every set of conversions, and of them what is saved."""
    for picked in itertools.product(*(i.choices for i in problem.items)):
        own = sum(c.seconds * i.count for c, i in zip(picked, problem.items, strict=True))
        taken = {(i, c.ins, c.outs) for i, c in enumerate(picked)}
        ways = []
        for use in problem.uses:
            wanted = {picked[i].ins[slot] for i, slot in use.consumers}
            ways.append(list(trees(picked[use.value].outs[0], wanted)))  # type: ignore[call-overload]
        for every in itertools.product(*ways):
            paid = {(k, a, b): problem.uses[k] for k, tree in enumerate(every) for b, a in tree.items()}
            prices = [(problem.convert(use.value, a, b), use.count) for (_, a, b), use in paid.items()]
            if any(x is None for x, _ in prices):
                continue
            less = sum(s.seconds(paid, taken) for s in problem.savings)
            yield own + sum(x * n for x, n in prices if x is not None) - less, less


def test_equal_to_enumeration_with_savings():
    feasible = decided = 0
    for seed in range(GRAPHS):
        problem = random_problem(seed)
        want = min(assignments(problem), default=None)
        if want is None:
            continue
        feasible += 1
        got = solve(problem)
        assert got.seconds == pytest.approx(want[0], rel=1e-9), seed
        assert got.bound == pytest.approx(want[0], rel=1e-8), seed
        without = solve(replace(problem, savings=()))
        decided += without.choices != got.choices
    assert feasible > 60 and decided > 5, (feasible, decided)


def test_of_two_things_beside_each_other_the_step_has_the_longer_one():
    """A maximum, not a sum: 5 s of communication under 3 s, and under 8 s, of arithmetic."""
    item = Item("made", [Choice((), (I,))], [], ["x"])
    for arithmetic, step in ((3.0, 5.0), (8.0, 8.0)):
        reads = Choice((R,), (R,), arithmetic)
        reader = Item("product", [reads], [frozenset(["x"])], ["y"])
        caps = (Cap({(0, I, R): 5.0}), Cap(choices={(1, reads.ins, reads.outs): arithmetic}))
        problem = Problem([item, reader], [Use("x", ((1, 0),), 1)], lambda *_: 5.0)
        beside = replace(problem, savings=[Saving("hidden", (caps,), 1)])
        assert solve(problem).seconds == pytest.approx(5.0 + arithmetic)
        assert solve(beside).seconds == pytest.approx(step)


# what the solver sees is what a rank's program then does

SLOW = replace(
    Cluster.preset("h100"), name="slow", peak_flops={"float32": 1e8}, memory_bandwidth=1e9, intra_bandwidth=1e6,
    intra_latency=1e-6, launch_overhead=1e-7, collective_overhead=1e-3, matmul_tile=1,
)  # fmt: skip


@pytest.mark.parametrize("name, sequence", [("gpt2", True), ("llama", True), ("llama", False)])
def test_what_is_hidden_and_bucketed_is_what_the_optimisations_say(name, sequence):
    model, inputs = made(name)
    options = {"example_inputs": inputs, "sequence_parallel": sequence, "check_capture": False}
    sharded: Any = autotp.compile(model, 2, cluster=SLOW, **options)
    terms, fired = sharded.plan.totals.terms, {line.partition(":")[0]: line for line in sharded.plan.fired}
    assert f": {seconds(terms['hidden'])} of a step by the cost model" in fired["overlap"], fired
    assert ("chunks" in fired["overlap"]) == sequence and terms["hidden"] > 1e-3
    sums = re.search(r"(\d+) all-reduces of parameters' gradients became (\d+)", fired["bucket"])
    together = int(sums[1]) - int(sums[2]) if sums else 0
    assert terms.get("bucketed", 0.0) == pytest.approx(together * call_seconds("all_reduce", 0, 2, SLOW))
    assert (together > 0) == sequence
    alone = autotp.plan(model, 2, cluster=replace(SLOW, overlaps=False), **options)
    assert alone.totals.terms.get("hidden", 0.0) == 0.0 and alone.totals.seconds > sharded.plan.totals.seconds
