"""Plans as text to read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autotp.plans.estimates import OUTSIDE
from autotp.text import amount

from . import rows
from .lines import Lines, columns, fitted, wrapped
from .rows import EqualBlocks
from .table import WIDTH, Columns

if TYPE_CHECKING:
    from autotp.plans.estimates import Degree
    from autotp.plans.plan import Plan


def render(plan: Plan) -> str:
    """The whole plan as plain text, `WIDTH` columns wide, the same for the same plan."""
    return plain(renderable(plan))


def plain(content: RenderableType, width: int = WIDTH) -> str:
    """What rich draws, without colours and trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(
        content, crop=False
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def renderable(plan: Plan) -> RenderableType:
    """All of the plan for a rich console: a headline, the blocks, the totals, what was left whole, and the notes."""
    degrees = [Text(), sweep_table(plan.degrees, "Degrees")] if plan.degrees else []
    return Group(Lines(lambda width: _body(plan, width)), *degrees, Lines(lambda width: _remarks(plan, width)))


def _body(plan: Plan, width: int) -> Iterator[Text]:
    head = f"{plan.model} over {rows.over(plan)} ({plan.cluster}, {plan.objective})"
    yield from wrapped(head, width, style="bold")
    if text := rows.all_whole(plan):
        yield from wrapped(text, width, style="bold red")
    for shape in plan.inputs:
        yield Text(f"captured with {shape}", style="dim")
    for part in rows.parts(plan):
        yield from _part(part, width)
    yield Text()
    yield from _labelled(rows.totals(plan), width)
    yield from _layer(plan, width)
    yield from _left_whole(plan, width)


def _remarks(plan: Plan, width: int) -> Iterator[Text]:
    for heading, lines in (("Runs with", plan.fired), ("Notes", plan.notes)):
        if lines:
            yield from (Text(), Text(heading, style="bold"))
            for line in lines:
                yield from wrapped(line, width, "  ")


def _part(part: EqualBlocks, width: int) -> Iterator[Text]:
    yield Text()
    if part.detail and len(part.title) + 2 + len(part.detail) > width:
        yield Text(part.title, style="bold")
        yield from wrapped(part.detail, width, "  ")
    else:
        yield Text.assemble((part.title, "bold"), f"  {part.detail}" if part.detail else "")
    if part.limit:
        yield from wrapped(f"limit: {part.limit}", width, "  ", style="yellow")
    yield from columns(part.weights, fitted((42, 36, 13, 13), (22, 26, 13, 13), width), "llrr", width)
    widths = fitted((10, 12, 32, 25, 25), (10, 12, 24, 20, 20), width)
    yield from columns(part.send_rows, widths, "lllll", width, style="cyan")


def _labelled(pairs: Iterable[tuple[str, str]], width: int) -> Iterator[Text]:
    """A name and a value in each line, the value wrapped."""
    for name, value in pairs:
        yield from wrapped(value, width, f"{name:24} ", " " * 25)


def _layer(plan: Plan, width: int) -> Iterator[Text]:
    """What the sublayers of one of the repeated blocks take, and everything outside of those."""
    if sublayers := rows.sublayers(plan):
        assert plan.layer is not None
        pairs = [(f"one of {plan.layer.count} blocks", plan.layer.module)]
        for name, compute, communication, share in sublayers:
            label = "outside of these blocks" if name == OUTSIDE else f"  {name}"
            pairs.append(
                (label, f"compute {compute}" + (f", communication {communication} ({share})" if communication else ""))
            )
        yield Text()
        yield from _labelled(pairs, width)


def sweep_table(degrees: Sequence[Degree], heading: str) -> RenderableType:
    """The degrees of a sweep: a heading, and a line for each."""
    unit = degrees[0].unit if degrees else "samples"
    names = ("tp", "step", "exposed", "sent", "memory", "", "largest batch", f"{unit}/s/device")
    short = (*names[:-2], "largest\nbatch", f"{unit}/s\n/device")
    table = Columns("rrrrrlrr", names, short)
    for r in degrees:
        batch = "fixed" if r.largest_batch is None else str(r.largest_batch)
        share = f"{rows.seconds(r.exposed)} ({r.exposed / r.seconds:.0%})" if r.seconds else "-"
        fit = "" if r.fits else "too much"
        row = (str(r.tp), rows.seconds(r.seconds), share, amount(r.sent), amount(r.memory), fit, batch)
        table.add_row(*row, rows.number(r.throughput))
    return Group(Text(heading, style="bold"), Padding(table, (0, 0, 0, 2)))


def precisions_table(degrees: Sequence[Degree], own: Sequence[Degree], heading: str) -> RenderableType:
    """The degrees of a sweep in another precision, beside the same in the model's own.

    Args:
        degrees: in the other precision. own: the same degrees in the model's own. heading: of the table.
    """
    names = ("tp", "step", "own", "", "sent", "own", "memory", "own", "")
    table = Columns("rrrlrrrrl", names, names)
    for r, other in zip(degrees, own, strict=True):
        ratio = f"{r.seconds / other.seconds:.2f}" if other.seconds else "-"
        fit = "" if r.fits else "too much"
        fit += "" if other.fits else " (own: too much)"
        pairs = amount(r.sent), amount(other.sent), amount(r.memory), amount(other.memory)
        table.add_row(str(r.tp), rows.seconds(r.seconds), rows.seconds(other.seconds), ratio, *pairs, fit.strip())
    return Group(Text(heading, style="bold"), Padding(table, (0, 0, 0, 2)))


def _left_whole(plan: Plan, width: int) -> Iterator[Text]:
    """Every parameter that is whole, folded over equal blocks, under the operator to blame."""
    reasons = rows.left_whole(plan)
    if reasons:
        yield from (Text(), Text("Left whole, and why", style="bold"))
    for reason, names in reasons.items():
        yield from wrapped(reason, width, "  ")
        yield from columns(names, fitted((90, 13), (61, 13), width), "lr", width, "    ")
