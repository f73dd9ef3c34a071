"""Two panels of curves as SVG: by how much the losses of each number of ranks are off those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Curves = Mapping[int, Sequence[float]]  # tp -> the loss of each step

WIDTH, HEIGHT, LEFT, TOP, PANEL, BETWEEN = 840, 300, 74, 92, 340, 66
DEEP = 150  # of a panel
INK = {1: "--one", 2: "--two", 4: "--four"}
STYLE = """
  svg { color-scheme: light dark; --sheet: #ffffff; --ink: #1c1b19; --soft: #5f5b55; --line: #dcd8d2;
    --one: #1c1b19; --two: #2a63a6; --four: #b04a0c; }
  @media (prefers-color-scheme: dark) {
    svg { --sheet: #1a1a18; --ink: #ecebe7; --soft: #a9a59d; --line: #3b3a36;
      --one: #ecebe7; --two: #6ba4e6; --four: #e8894c; }
  }
  text { fill: var(--ink); font: 13px system-ui, sans-serif; }
  .title { font-size: 16px; font-weight: 600; } .soft { fill: var(--soft); font-size: 12px; }
  path { stroke: var(--line); fill: none; } polyline { fill: none; stroke-width: 1.5; }"""


def off(curves: Curves) -> dict[int, list[float]]:
    """By how much each loss is off that of one rank, as a part of it."""
    return {tp: [(x - one) / one for x, one in zip(losses, curves[1], strict=True)] for tp, losses in curves.items()}


def picture(screens: Mapping[str, Curves], about: str) -> str:
    """Draw both on one scale.

    Args:
        screens: the two sets of curves, by their titles. about: a line beneath the picture's title.
    """
    largest = max(abs(x) for curves in screens.values() for xs in off(curves).values() for x in xs) or 1e-7
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Losses off those of one rank, ordinary and with equal bits">',
        f"<style>{STYLE}\n</style>",
        '<rect width="100%" height="100%" style="fill: var(--sheet)"/>',
        '<text class="title" x="14" y="26">Losses at tp=1, 2 and 4, less that at tp=1, as a part of it</text>',
        f'<text class="soft" x="14" y="43">{about}</text>',
    ]
    for i, (title, curves) in enumerate(screens.items()):
        parts += _panel(title, off(curves), LEFT + i * (PANEL + BETWEEN), largest)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, curves: Mapping[int, Sequence[float]], left: float, largest: float) -> list[str]:
    """One panel: its frame with three marks, and a line for each number of ranks, that of one rank above the others."""
    parts = [f'<text x="{left}" y="{TOP - 14}">{title}</text>']
    for y, mark in ((0, largest), (DEEP / 2, 0.0), (DEEP, -largest)):
        parts.append(f'<path d="M{left} {TOP + y}h{PANEL}"/>')
        parts.append(f'<text class="soft" x="{left - 8}" y="{TOP + y + 4}" text-anchor="end">{mark:+.0e}</text>')
    for tp, values in sorted(curves.items(), reverse=True):
        step = PANEL / max(len(values) - 1, 1)
        points = " ".join(
            f"{left + i * step:.1f},{TOP + DEEP / 2 * (1 - x / largest):.1f}" for i, x in enumerate(values)
        )
        parts.append(f'<polyline style="stroke: var({INK[tp]})" points="{points}"><title>tp={tp}</title></polyline>')
    for i, tp in enumerate(sorted(curves)):
        x = left + 90 * i
        parts.append(
            f'<polyline style="stroke: var({INK[tp]})" points="{x},{TOP + DEEP + 34} {x + 24},{TOP + DEEP + 34}"/>'
        )
        parts.append(f'<text class="soft" x="{x + 30}" y="{TOP + DEEP + 38}">tp={tp}</text>')
    steps = len(next(iter(curves.values())))
    parts.append(f'<text class="soft" x="{left + PANEL}" y="{TOP + DEEP + 18}" text-anchor="end">step {steps}</text>')
    return parts
