"""What a step was measured to take on every rank beside what its plan predicts: a table, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from autotp.plans.plan import Plan
from autotp.text import seconds

from .rows import primitive
from .table import WIDTH, Columns
from .timeline import name_event, rows_of, span

FEW = 4  # blocks that are listed one by one
NAMES = ("", "predicted", "measured", "of it", "fastest rank", "slowest rank")
SHORT = ("", "plan", "seconds", "x", "fastest", "slowest")


@dataclass(frozen=True)
class Span:
    """A block's pass or a collective in one step of one rank; `start` and `seconds` count from the step's begin."""

    name: str
    direction: str
    start: float
    seconds: float
    collective: bool


@dataclass(frozen=True)
class Measured:
    """One row.

    Attributes:
        name: path of a block; of a collective its primitive, such as "all_reduce", after the block that holds it.
        direction: "forward", "backward", or "" for both.
        ranks: seconds by rank, each the median of the repeats.
        predicted: seconds by the plan; None where it has no figure of its own for that.
    """

    name: str
    direction: str
    ranks: tuple[float, ...]
    predicted: float | None = None

    @property
    def seconds(self) -> float:
        """Of the slowest rank, for which the others wait."""
        return max(self.ranks)

    @property
    def slowest(self) -> int:
        """Which rank that is."""
        return self.ranks.index(self.seconds)


@dataclass(frozen=True)
class Profile:
    """What `ShardedModule.profile` measured. `print` shows it as a table.

    Attributes:
        plan: of the module; it was made for `plan.cluster`, and its figures are of that.
        repeats: how many steps were measured; every figure is a median of so many.
        step: the whole step.
        blocks: forward and backward of every repeated block of the kind that `plan.layer` speaks of.
        outside: the step without these; None where nothing repeats.
        collectives: every collective of a block, in order, forward and backward; what is outside, by its primitive.
        spans: of every rank one step, that of median length.
    """

    plan: Plan
    repeats: int
    step: Measured
    blocks: tuple[Measured, ...]
    outside: Measured | None
    collectives: tuple[Measured, ...]
    spans: tuple[tuple[Span, ...], ...] = field(repr=False, default=())

    def to_trace(self, path: str | Path) -> None:
        """Write the plan's timeline of a layer and, below it, a measured step of every rank, for ui.perfetto.dev.

        Args:
            path: of the JSON file.

        Raises:
            PlanError: the plan holds no times.
        """
        rows = rows_of(self.plan)
        for rank, spans in enumerate(self.spans):
            rows += [name_event("process_name", 0, f"rank {rank}, measured", 1 + rank)]
            rows += [name_event("thread_name", i, track, 1 + rank) for i, track in enumerate(("blocks", "collectives"))]
            rows += [_event(s, 1 + rank) for s in spans]
        Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ns"}, indent=1))

    def __rich__(self) -> RenderableType:
        table = Columns("lrrrrr", NAMES, SHORT)
        for row in (
            self.step,
            *_rows_to_print(self.blocks),
            *((self.outside,) if self.outside else ()),
            *_rows_to_print(self.collectives),
        ):
            table.add_row(*_cells(row))
        plan = self.plan
        measured = f"a step as measured (median of {self.repeats}), and as planned for {plan.cluster}"
        title = f"{plan.model}, tp={plan.tp}: {measured}"
        return Group(Text(title, style="bold"), table)

    def __str__(self) -> str:
        console = Console(width=WIDTH, color_system=None, force_terminal=False)
        with console.capture() as text:
            console.print(self)
        return text.get()


def _rows_to_print(rows: Sequence[Measured]) -> Iterator[Measured]:
    """All rows of a few blocks; of many, for each direction, the median block and the slowest one."""
    alike: dict[tuple[str, str, float | None], list[Measured]] = {}
    for row in rows:
        alike.setdefault((_starred(row.name), row.direction, row.predicted), []).append(row)
    for (name, direction, predicted), members in alike.items():
        if len(members) <= FEW:
            yield from members
            continue
        by_rank = zip(*(m.ranks for m in members), strict=True)
        middle = tuple(map(median, by_rank))
        yield Measured(f"{name}, median of {len(members)}", direction, middle, predicted)
        worst = max(members, key=lambda m: m.seconds)
        yield Measured(f"{worst.name}, the slowest", direction, worst.ranks, predicted)


def _starred(name: str) -> str:
    steps = name.split(".")
    for i, step in enumerate(steps):
        steps[i] = "*" if step.isdigit() else step
    return ".".join(steps)


def _cells(row: Measured) -> tuple[str, ...]:
    fast = min(row.ranks)
    ratio = f"{row.seconds / row.predicted:.2f}" if row.predicted else ""
    planned = seconds(row.predicted) if row.predicted is not None else ""
    ends = f"{seconds(fast)} ({row.ranks.index(fast)})", f"{seconds(row.seconds)} ({row.slowest})"
    return f"{row.name} {row.direction}", planned, seconds(row.seconds), ratio, *ends


def _event(s: Span, process: int) -> dict[str, Any]:
    label = f"{primitive(s.name) or s.name} {s.direction}" if s.collective else f"{s.name} {s.direction}"
    kind = "collectives" if s.collective else "blocks"
    return {
        **span(label, s.start, s.seconds, int(s.collective), kind, {"measured": seconds(s.seconds)}),
        "pid": process,
    }
