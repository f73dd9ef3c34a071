"""Units of a model, which is cut before its repeated blocks, and how many of them each stage gets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, starmap

from torch import fx

from autotp.cost.units import Unit
from autotp.ir.marks import mark
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import scope_path

MAX_LEVELS = 4  # of lists of modules within lists
COMMON_SHARE = 0.5  # the least part of their operators that neighbours have in common


def units_of(planned: Planned, sharded: Sharded) -> list[Unit]:
    """Find the units of a program: of the outermost lists of modules whose neighbours have much the same operators.

    Args:
        planned: the decisions. sharded: the program that is cut.
    """
    container = planned.program.blocks.containers
    for level in range(MAX_LEVELS):
        starts, operators = _blocks(sharded.graph, container, level)
        pairs = pairwise(sorted(starts, key=lambda path: (container[path], starts[path])))
        lists = {container[a] for a, b in pairs if container[a] == container[b] and _alike(operators[a], operators[b])}
        spans = sorted((at, path) for path, at in starts.items() if container[path] in lists)
        if spans:
            return [Unit(spans[0][1], 0), *(Unit(path, at) for at, path in spans[1:])]
    return []


def _alike(a: Counter[str], b: Counter[str]) -> bool:
    """Return whether two blocks call much the same operators: what all share may be made in the first of them."""
    return (a & b).total() >= COMMON_SHARE * max(a.total(), b.total()) > 0


def _blocks(graph: fx.Graph, blocks: Container[str], level: int) -> tuple[dict[str, int], dict[str, Counter[str]]]:
    """Map paths of blocks at this depth -> position of their first node, and the operators that they call."""
    starts, operators = {}, defaultdict(Counter)
    for i, node in enumerate(graph.nodes):
        around = [p for p in scope_path(node) if p in blocks]
        if node.op == "call_function" and len(around) > level:
            starts.setdefault(around[level], i)
            if mark(node).conversion is None:
                operators[around[level]][str(node.target)] += 1
    return starts, operators


def stage_starts(units: list[Unit], sizes: Iterable[int]) -> list[int]:
    """List the position in the graph at which each stage begins.

    Args:
        units: of the program. sizes: how many of them each stage has, in order.
    """
    starts, at = [], 0
    for size in sizes:
        starts.append(units[at].start)
        at += size
    return starts


@dataclass(frozen=True)
class Weight:
    """Costs of a unit on a rank.

    Attributes:
        seconds: of its forward and backward, for one micro-batch.
        steady: bytes of its parameters, gradients and optimizer states. kept_bytes: bytes that autograd keeps of one
            micro-batch.
    """

    seconds: float
    steady: float = 0.0
    kept_bytes: float = 0.0


@dataclass(frozen=True)
class Division:
    """A division of units into stages.

    Attributes:
        sizes: how many units each stage has.
        seconds, memory: of each stage, for one micro-batch and at its fullest.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    memory: tuple[float, ...]


@dataclass(frozen=True)
class Staging:
    """A model's units and how they are divided: plain data, the same on all ranks.

    Attributes:
        units: paths of the repeated blocks. weights: what each costs a rank, with what follows it.
        division: over the stages.
    """

    units: tuple[str, ...]
    weights: tuple[Weight, ...]
    division: Division


def in_flight(stage: int, ranks: int, chunks: int) -> int:
    """Return how many micro-batches a stage holds activations of at most in a 1F1B schedule.

    With `chunks` stages a rank it is the interleaved one, where a rank's are spread evenly (Narayanan et al. 2021).
    """
    ahead = ranks - stage % ranks
    if chunks == 1:
        return ahead
    return math.ceil((2 * (ahead - 1) + (chunks - 1) * ranks + 1) / chunks)


def divide(
    weights: Sequence[Weight], ranks: int, chunks: int = 1, limits: Sequence[float] = (), rates: Sequence[float] = ()
) -> Division | None:
    """Find the division with the least seconds of the slowest stage, and of equal ones the least memory of the fullest.

    Args:
        weights: of the units, in order. ranks: of the pipeline. chunks: stages of each rank.
        limits: bytes that each stage's rank may hold (the stage its share by `chunks`); () for no limits.
        rates: times as fast as the weights say is what each stage runs on; () where all are alike.

    Returns: None where none fits; every stage has one unit at least.
    """
    count, stages = len(weights), ranks * chunks
    # Sums from the start, so that any run of units is a difference: the search asks for about count^2 / 2 runs.
    seconds = list(accumulate((w.seconds for w in weights), initial=0.0))
    steady = list(accumulate((w.steady for w in weights), initial=0.0))
    kept_bytes = list(accumulate((w.kept_bytes for w in weights), initial=0.0))

    def memory(a: int, b: int, stage: int) -> float:
        # The first of four ranks holds activations of four micro-batches, the last of one.
        return steady[b] - steady[a] + (kept_bytes[b] - kept_bytes[a]) * in_flight(stage, ranks, chunks)

    def time(a: int, b: int, stage: int) -> float:
        return (seconds[b] - seconds[a]) / (rates[stage] if rates else 1.0)

    @cache
    def best(a: int, stage: int) -> tuple[float, float, tuple[int, ...]] | None:
        """Divide the units from `a` on over this stage and the next: the worst seconds and bytes, and the sizes."""
        remaining = stages - stage
        cheapest = None
        # Each stage behind gets a unit at least: of 5 units for 3 stages the first may have 3.
        for b in [count] if remaining == 1 else range(a + 1, count - remaining + 2):
            if cheapest is not None and time(a, b, stage) > cheapest[0]:
                break  # more units are slower still
            stage_bytes = memory(a, b, stage)
            rest = (0.0, 0.0, ()) if remaining == 1 else best(b, stage + 1)
            if rest is None or (limits and stage_bytes > limits[stage] / chunks):
                continue
            # The times first; where they are equal, as one large unit makes them, the memory decides.
            candidate = max(time(a, b, stage), rest[0]), max(stage_bytes, rest[1]), (b - a, *rest[2])
            cheapest = candidate if cheapest is None or candidate[:2] < cheapest[:2] else cheapest
        return cheapest

    division = best(0, 0) if count >= stages else None
    if division is None:
        return None
    spans = [(a, b, stage) for stage, (a, b) in enumerate(pairwise(accumulate(division[2], initial=0)))]
    return Division(division[2], tuple(starmap(time, spans)), tuple(starmap(memory, spans)))
