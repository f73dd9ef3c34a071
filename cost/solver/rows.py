"""Columns and rows of the integer program that stands at the head of `cost/solver/solve.py`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from autotp.ir.layouts import Layout

from .integer_program import IntegerProgram, Row, Terms
from .problem import Problem, Use
from .savings import add_savings

Picks = list[list[int]]  # the columns of each item's choices

ACTIVATIONS, PARTITIONS, CONVERSIONS = 1e4, 1e-3, 1e-4  # weights of the second order
MICRO = 1e6  # seconds -> microseconds, so that HiGHS' absolute tolerances are far below what matters

Columns = dict[Layout, list[int]]  # layout -> columns of the choices that produce it, or read it


class Arc(NamedTuple):
    """A conversion of one use: its layouts, and the column that says whether it is paid."""

    source: Layout
    target: Layout
    column: int


def build(problem: Problem) -> tuple[IntegerProgram, Picks]:
    """The program without limits, and the columns of each item's choices."""
    program = IntegerProgram()
    picks, producers = add_items(problem, program)
    conversion_columns = {}
    for k, use in enumerate(problem.uses):
        late = 1 + k / len(problem.uses)  # of equal plans, the one that converts early
        arcs = add_use(problem, program, picks, producers[use.value], use, late)
        conversion_columns |= {(k, arc.source, arc.target): arc.column for arc in arcs}
    choices = [(i, c.ins, c.outs) for i, item in enumerate(problem.items) for c in item.choices]
    choice_columns = dict(zip(choices, itertools.chain.from_iterable(picks), strict=True))
    add_savings(program, problem.savings, conversion_columns, choice_columns, MICRO)
    return program, picks


def add_items(problem: Problem, program: IntegerProgram) -> tuple[Picks, dict[object, Columns]]:
    """Columns and rows of the choices: the columns of each item, and value -> layout -> columns that produce it.

    Args:
        problem: its items. program: gets a column for each choice and a row for each item.
    """
    picks = []
    producers = {}
    activations = attrgetter("activation_bytes")
    most = sum(max(map(activations, item.choices)) * item.count for item in problem.items) or 1.0
    for item in problem.items:
        columns = [program.column(True) for _ in item.choices]
        leaves = 0 if item.ins else item.count
        points = [choice.penalty * leaves for choice in item.choices]
        program.most_penalty += max(points) - min(points)
        picks.append(columns)
        program.rows.append(Row(dict.fromkeys(columns, 1.0), 1, 1))
        for column, choice, point in zip(columns, item.choices, points, strict=True):
            program.microseconds[column] = choice.seconds * item.count * MICRO
            activation_points = ACTIVATIONS * choice.activation_bytes / most
            program.second_order[column] = (activation_points + PARTITIONS * choice.penalty) * item.count
            program.parameter_bytes[column] = choice.parameter_bytes * item.count
            program.budget_bytes[column] = choice.budget_bytes * item.count
            program.penalty[column] = point - min(points)
            for value, layout in zip(item.outs, choice.outs, strict=True):
                producers.setdefault(value, defaultdict(list))[layout].append(column)
    return picks, producers


def add_use(
    problem: Problem, program: IntegerProgram, picks: Picks, producers: Columns, use: Use, late: float
) -> list[Arc]:
    """Ship the value from the layout that is produced to the one that each consumer reads.

    Every consumer has a flow of its own over the conversions; a conversion is paid once, at its largest flow. This is
    the multi-commodity form of a directed Steiner tree, whose relaxation is nearly always integral here: with one
    column "is available" per layout instead, a two-layer Llama took 10 s where this takes 0.1 s.

    Args:
        problem, program: the items with their columns.
        picks: the columns of each item's choices.
        producers: layout -> columns of the choices that produce the value in it.
        use: the value's consumers.
        late: 1 for the first use to 2 for the last, by which the second order weighs its conversions.
    """
    readers = readers_of(problem, picks, use)
    targets = list(dict.fromkeys(layout for columns in readers for layout in columns))
    arcs = add_conversions(problem, program, list(producers), targets, use, late)
    program.rows += no_detour(arcs, readers, targets)
    for columns in readers:
        # A single consumer's flow is what is paid; a second column for it would only be another name.
        flow = [arc.column for arc in arcs]
        if len(readers) > 1:
            flow = [program.column(False) for _ in arcs]
        program.rows += paid_once(flow, arcs)
        program.rows += conserved(flow, arcs, producers, columns, targets)
    return arcs


def readers_of(problem: Problem, picks: Picks, use: Use) -> list[Columns]:
    """Per consumer: the columns of the choices that read each layout."""
    readers = {}
    for item, slot in use.consumers:
        columns = readers.setdefault((item, slot), defaultdict(list))
        for column, choice in zip(picks[item], problem.items[item].choices, strict=True):
            columns[choice.ins[slot]].append(column)
    return list(readers.values())


def add_conversions(
    problem: Problem, program: IntegerProgram, produced: list[Layout], targets: list[Layout], use: Use, late: float
) -> list[Arc]:
    """The conversions between layouts of a use, with a column and its price for each.

    Args:
        problem: gives the seconds of a conversion.
        program: gets a column for each.
        produced, targets: layouts that the value is produced in, and read in.
        use, late: as in `add_use`.
    """
    arcs = []
    for a, b in itertools.product(dict.fromkeys([*produced, *targets]), targets):
        seconds = problem.convert(use.value, a, b) if a != b else None
        if seconds is not None:
            column = program.column(False)
            arcs.append(Arc(a, b, column))
            program.microseconds[column] = seconds * use.count * MICRO
            program.second_order[column] = CONVERSIONS * use.count * late
            traffic = problem.traffic(use.value, a, b)
            program.sent_bytes[column], program.collectives[column] = (n * use.count for n in traffic)
    return arcs


def no_detour(arcs: list[Arc], readers: list[Columns], targets: list[Layout]) -> list[Row]:
    """Forbid conversions to a layout that no consumer reads.

    A reduce-scatter and an all-gather can be cheaper than the all-reduce between the same layouts, by rounding or on an
    unusual cluster; the plan's program would not go that way, and then pays another price than the plan's.

    Args:
        arcs: the conversions between the value's layouts. targets: those that conversions lead to.
        readers: of each consumer the columns by the layout that it reads.
    """
    rows = []
    for layout in targets:
        into = {arc.column: 1.0 for arc in arcs if arc.target == layout}
        if into:
            columns = [i for reader in readers for i in reader.get(layout, ())]
            rows.append(Row(into | dict.fromkeys(columns, -1.0), -np.inf, 0))
    return rows


def paid_once(flow: list[int], arcs: list[Arc]) -> list[Row]:
    """A consumer's flow is at most what is paid."""
    return [Row({f: 1.0, arc.column: -1.0}, -np.inf, 0) for f, arc in zip(flow, arcs, strict=True) if f != arc.column]


def conserved(
    flow: list[int], arcs: list[Arc], producers: Columns, reader: Columns, targets: list[Layout]
) -> list[Row]:
    """The flow into a layout, produced or converted, is read there or goes on.

    Args:
        flow: a column for each arc.
        arcs: the conversions of the use.
        producers, reader: layout -> columns of choices that produce the value in it, or with which a consumer reads it.
        targets: layouts that some consumer reads.
    """
    rows = []
    for layout in dict.fromkeys([*producers, *targets]):
        balance = dict.fromkeys(producers.get(layout, ()), 1.0)
        # An item of a repeated block may read what its twin in the block before produces: then producer and reader are
        # one column, whose terms cancel.
        for i in reader.get(layout, ()):
            balance[i] = balance.get(i, 0.0) - 1.0
        for f, arc in zip(flow, arcs, strict=True):
            if layout in (arc.source, arc.target):
                balance[f] = 1.0 if arc.target == layout else -1.0
        rows.append(Row(balance, 0, 0))
    return rows


def within(sizes: list[list[float]], knapsack: Terms, picks: Picks, limit: float) -> list[Row]:
    """Rows for at most `limit` bytes.

    One knapsack row says it. Its relaxation would leave every large parameter whole by a fraction, so choices that are
    too large even when all others are at their least are ruled out one by one.

    Args:
        sizes: bytes that each choice of each item comes to, all instances together.
        knapsack: the same, per column.
        picks: the columns of each item's choices.
        limit: bytes.
    """
    least = sum(map(min, sizes))
    rows, excess, items = [Row(knapsack, 0.0, limit)], {}, {}
    for i, (columns, size) in enumerate(zip(picks, sizes, strict=True)):
        if any(size):
            room = limit - (least - min(size))
            for column, n in zip(columns, size, strict=True):
                excess[column], items[column] = n - min(size), i
                if n > room:
                    rows.append(Row({column: 1.0}, 0, 0))
    return [*rows, *covers(excess, items, limit - least)]


def covers(excess: Terms, item: dict[int, int], room: float) -> list[Row]:
    """Add rows: of choices that each take over 1 / (k + 1) of the room at most k are taken, for every k.

    These cover inequalities follow from the knapsack for whole columns, and cut off fractional ones.

    Args:
        excess: bytes that a column's choice comes to beyond its item's least.
        item: per column, its item.
        room: what all the excess may come to.
    """
    rows = []
    before = 0
    for k in range(1, len(set(item.values()))):
        large = [c for c, n in excess.items() if room / (k + 1) < n <= room]
        if len({item[c] for c in large}) > k and len(large) > before:
            rows.append(Row(dict.fromkeys(large, 1.0), 0, k))
            before = len(large)
    return rows
