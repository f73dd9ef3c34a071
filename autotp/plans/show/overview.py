"""What `print` shows of a plan: the first screen, the blocks in short, the notes and a legend. At most `MOST` lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from autotp.text import amount

from . import rows
from .flow import ways
from .head import SCREEN, head
from .lines import Lines, columns, wrapped
from .report import plain, sweep_table

if TYPE_CHECKING:
    from autotp.plans.plan import Collective, Plan

    from .rows import EqualBlocks

MOST = 50  # lines of what is printed
LEAST = 12  # lines that the blocks have at least
NOTES = 4
FEW = 0.001  # of all bytes: places that send less are not shown
LEGEND = (
    "I whole  R whole, gradient a sum  S(d) split along dim d  P a sum to be taken",
    "AG all-gather  RS reduce-scatter  AR all-reduce  A2A all-to-all; there/back",
    "plan.report() has all of it",
)


def overview(plan: Plan) -> str:
    """The most important of a plan as plain text, the same for the same plan."""
    return plain(screen(plan), SCREEN)


def screen(plan: Plan) -> RenderableType:
    """The most important of a plan for a rich console."""
    above, below = list(head(plan)), list(_below(plan))
    degrees = [Text(), sweep_table(plan.degrees, "Degrees")] if plan.degrees else []
    room = MOST - len(above) - len(below) - 1 - (len(plan.degrees) + 4 if degrees else 0)
    table = [Text(), *_table(plan, max(room, LEAST))]
    return Group(Lines(lambda _: [*above, *table]), *degrees, Lines(lambda _: below))


def _below(plan: Plan) -> Iterator[Text]:
    whole = [p for p in plan.parameters if p.role == "whole"]
    if whole and plan.tp > 1 and plan.totals.local_parameters:
        share = sum(math.prod(p.local) for p in whole) / plan.totals.local_parameters
        yield Text(f"whole on every rank: {len(whole)} of {len(plan.parameters)} weights, {share:.2%} of what it holds")
    for note in plan.notes[:NOTES]:
        yield from wrapped(f"note: {note}", SCREEN, "", "  ", "dim")
    if len(plan.notes) > NOTES:
        yield Text(f"and {len(plan.notes) - NOTES} more notes", style="dim")
    yield from (Text(line, style="dim") for line in LEGEND)


def _table(plan: Plan, room: int) -> Iterator[Text]:
    """The blocks in their order; where they are too many, those that hold or send the most."""
    least = FEW * (plan.totals.forward_bytes + plan.totals.backward_bytes)
    parts = [p for p in rows.parts(plan) if p.parameters or max(map(_bytes, p.collectives), default=-1.0) >= least]
    part_lines = [list(_part(part, plan, least)) for part in parts]
    weight = [_weight(part, plan) for part in parts]
    places: set[int] = set()
    for i in sorted(range(len(parts)), key=lambda i: (-weight[i], i)):
        line_count = sum(len(part_lines[j]) for j in places)
        if line_count + len(part_lines[i]) <= room - (len(places) + 1 < len(parts)) or not places:
            places.add(i)
    for i in sorted(places):
        yield from part_lines[i]
    if len(places) < len(parts):
        yield Text(f"and {len(parts) - len(places)} smaller parts", style="dim")


def _weight(part: EqualBlocks, plan: Plan) -> float:
    """The share of all parameters and bytes sent that a part and its equals have."""
    t = plan.totals
    parameters = sum(math.prod(p.shape) for p in part.parameters) * part.count / max(t.parameters, 1)
    sent_bytes = sum(map(_bytes, part.collectives))
    return parameters + sent_bytes / max(t.forward_bytes + t.backward_bytes, 1.0)


def _bytes(equal: Sequence[Collective]) -> float:
    return sum(c.forward_bytes + c.backward_bytes for c in equal)


def _part(part: EqualBlocks, plan: Plan, least: float) -> Iterator[Text]:
    """A heading, a line for each weight and for each place that sends `least` bytes; one line where all is whole."""
    whole = part.parameters and all(p.role == "whole" for p in part.parameters)
    detail = "whole" if whole else part.detail
    if len(part.title) + 2 + len(detail) > SCREEN:
        yield Text(part.title, style="bold")
        yield from wrapped(detail, SCREEN, "  ")
    else:
        yield Text.assemble((part.title, "bold"), f"  {detail}" if detail else "")
    if part.limit:
        yield from wrapped(f"limit: {part.limit}", SCREEN, "  ", style="yellow")
    if not whole:
        yield from columns(part.weights, (22, 26, 13, 13), "llrr", SCREEN)
    sends = [_cells(equal, part.count, plan) for equal in part.collectives if _bytes(equal) >= least]
    yield from columns(sends, (10, 12, 34, 18), "llll", SCREEN, style="cyan")


def _cells(equal: Sequence[Collective], members: int, plan: Plan) -> tuple[str, ...]:
    """Megatron's name, layouts, operator, and what one rank sends: `AG/RS 224.0 MiB`, each way."""
    c, trains = equal[0], plan.objective == "training"
    size = amount(max(c.forward_bytes, c.backward_bytes))
    return (
        rows.MARKS.get(c.name, c.name),
        c.change,
        rows.maker(equal, members),
        f"{ways(c.forward, c.backward, trains)} {size}",
    )
