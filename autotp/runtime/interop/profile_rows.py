"""The rows of a measured step from the spans that every rank's profiler saw."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_high

from autotp.plans.estimates import Layer
from autotp.plans.plan import Plan
from autotp.plans.show.measured import Measured, Profile, Span

STEP = "step"


@dataclass(frozen=True)
class Key:
    """What a row is of: a block's pass, the whole step (`block` and `direction` empty), or a collective of either.

    Attributes:
        place: of the collective among those of its block and direction; -1 for a sum of those outside of all blocks.
    """

    block: str
    direction: str
    collective: str = ""
    place: int = -1


def _rows(step: Sequence[Span], whole: bool) -> dict[Key, float]:
    """Seconds by row; `whole`: all of the step is the one block."""
    rows: dict[Key, float] = defaultdict(float)
    places: Counter[tuple[str, str]] = Counter()
    passes = [s for s in step if not s.collective]
    for s in step:
        if not s.collective:
            rows[Key("" if s.name == STEP else s.name, s.direction)] += s.seconds
            continue
        around = [p for p in passes if p.direction == s.direction and p.start <= s.start < p.start + p.seconds]
        key = Key("", s.direction, s.name)
        if around or whole:
            block = around[0].name if around else ""
            key = Key(block, s.direction, s.name, places[block, s.direction])
            places[block, s.direction] += 1
        rows[key] += s.seconds
    return rows


def _rank_rows(steps: Sequence[Sequence[Span]], whole: bool) -> list[dict[Key, float]]:
    return [_rows(step, whole) for step in steps]


def _medians(by_rank: Sequence[Sequence[dict[Key, float]]], key: Key, without: Sequence[Key] = ()) -> tuple[float, ...]:
    """The median over the steps of every rank of a row's seconds, without those of other rows."""

    def seconds(rows: dict[Key, float]) -> float:
        return rows.get(key, 0.0) - sum(rows.get(k, 0.0) for k in without)

    return tuple(median(map(seconds, rank)) for rank in by_rank)


def profile_of(plan: Plan, repeats: int, steps: Sequence[Sequence[Sequence[Span]]], alike: bool) -> Profile:
    """Rows from the steps of every rank.

    Args:
        plan: of the module. repeats: how many steps were timed. steps: their spans, by rank and step.
        alike: they are steps of the kind that the plan is for, whose predictions then stand beside them.
    """
    layer = plan.layer
    one_block = layer is None or not layer.module
    by_rank = [_rank_rows(rank, one_block) for rank in steps]
    keys = list(dict.fromkeys(key for rank in by_rank for rows in rank for key in rows))
    times = {k: _medians(by_rank, k) for k in keys}
    passes = [k for k in keys if k.block and not k.collective]
    whole = Key("", "")
    rest = _medians(by_rank, whole, passes)
    planned = layer.outside.seconds if layer is not None and alike else None
    return Profile(
        plan=plan,
        repeats=repeats,
        step=Measured(STEP, "", times[whole], plan.totals.passes if alike else None),
        blocks=tuple(Measured(k.block, k.direction, times[k], _predicted(layer, k.direction)) for k in passes),
        outside=Measured("outside of the blocks", "", rest, planned) if passes else None,
        collectives=tuple(_collectives(layer, times)),
        spans=tuple(_typical(*rank) for rank in zip(steps, by_rank, strict=True)),
    )


def _typical(steps: Sequence[Sequence[Span]], rows: Sequence[dict[Key, float]]) -> tuple[Span, ...]:
    """The step whose length is the median, of an even number the longer one."""
    lengths = [each[Key("", "")] for each in rows]
    return tuple(steps[lengths.index(median_high(lengths))])


def _predicted(layer: Layer | None, direction: str) -> float | None:
    if layer is None:
        return None
    return sum(getattr(step, direction) for step in layer.steps) or None


def _collectives(layer: Layer | None, times: dict[Key, tuple[float, ...]]) -> Iterator[Measured]:
    """Every collective; where a block has those of the plan in their order, beside the plan's figure."""
    by_pass: dict[tuple[str, str], list[Key]] = defaultdict(list)
    for key in times:
        if key.collective:
            by_pass[key.block, key.direction].append(key)
    for (block, direction), keys in by_pass.items():
        planned = _planned(layer, direction)
        names = [name for name, _ in planned]
        alike = [k.collective for k in keys] == names and keys[0].place >= 0
        for i, k in enumerate(keys):
            name = f"{block}.{k.collective} {k.place + 1}" if block else k.collective
            yield Measured(name, direction, times[k], planned[i][1] if alike else None)


def _planned(layer: Layer | None, direction: str) -> list[tuple[str, float]]:
    """The collectives of the plan's layer in the order of a pass, with their seconds."""
    steps = layer.steps if layer is not None else ()
    ordered = steps if direction == "forward" else reversed(steps)
    sends = [(getattr(step, f"{direction}_sends"), getattr(step, direction)) for step in ordered]
    return [(sends, took) for sends, took in sends if sends and took]
