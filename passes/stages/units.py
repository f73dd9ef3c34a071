"""Where a model may be cut: before each of its repeated blocks, in the order of its program."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx

from autotp.ir.marks import mark
from autotp.ir.scopes import scope_path
from autotp.passes.analysis.fold import INDEXED

LEVELS = 4  # of lists of modules within lists
ALIKE = 0.5  # the least part of their operators that neighbours have in common


@dataclass(frozen=True)
class Unit:
    """A stretch of a program that is never cut: a repeated block with what follows it.

    Attributes:
        name: path of the block. start: position of its first node in the graph; that of the first unit is 0, so that
            what comes before all blocks is in it.
    """

    name: str
    start: int


def units_of(nodes: Iterable[fx.Node]) -> list[Unit]:
    """The units of a program: of the outermost lists of modules in which neighbours have much the same operators.

    Args:
        nodes: of the program, in its order.
    """
    order = list(nodes)
    for level in range(LEVELS):
        starts, operators = _blocks(order, level)
        pairs = pairwise(sorted(starts, key=lambda path: (INDEXED.sub("", path), starts[path])))
        lists = {INDEXED.sub("", a) for a, b in pairs if _alike(a, b, operators)}
        spans = sorted((at, path) for path, at in starts.items() if INDEXED.sub("", path) in lists)
        if spans:
            return [Unit(spans[0][1], 0), *(Unit(path, at) for at, path in spans[1:])]
    return []


def _alike(a: str, b: str, operators: Mapping[str, Counter[Any]]) -> bool:
    """Whether these are neighbours in one list, with much the same operators: what all blocks share, such as a mask,
    may be made in the first of them."""
    common = (operators[a] & operators[b]).total()
    return INDEXED.sub("", a) == INDEXED.sub("", b) and common >= ALIKE * max(operators[x].total() for x in (a, b)) > 0


def _blocks(order: list[fx.Node], level: int) -> tuple[dict[str, int], dict[str, Counter[Any]]]:
    """Path of a block at this depth -> position of its first node, and the operators that it calls."""
    starts: dict[str, int] = {}
    operators: dict[str, Counter[Any]] = defaultdict(Counter)
    for i, node in enumerate(order):
        if node.op != "call_function":
            continue
        indexed = [p for p in scope_path(node) if INDEXED.search(p)]
        if len(indexed) > level:
            starts.setdefault(indexed[level], i)
            if mark(node).conversion is None:
                operators[indexed[level]][str(node.target)] += 1
    return starts, operators


def stage_starts(units: list[Unit], sizes: Iterable[int]) -> list[int]:
    """The position in the graph at which each stage begins.

    Args:
        units: of the program. sizes: how many of them each stage has, in order.
    """
    starts, at = [], 0
    for size in sizes:
        starts.append(units[at].start)
        at += size
    return starts
