"""Curves of several runs as SVG: panels beside each other, with a legend beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PANEL, DEEP, LEFT, TOP, BETWEEN, LEGEND = 340, 150, 74, 92, 66, 22
POINTS = 400  # of a line at most
INK = ("#1c1b19", "#2a63a6", "#b04a0c", "#2f7d4f", "#8a3ea8", "#a08a00", "#c2306b", "#2d8f9c", "#6b6b6b", "#8f5a33")
LIGHT = ("#ecebe7", "#6ba4e6", "#e8894c", "#67bd88", "#c58be0", "#d8c44a", "#ee7aa8", "#6cc9d6", "#a9a9a9", "#c99a74")
STYLE = """
  svg { color-scheme: light dark; --sheet: #ffffff; --ink: #1c1b19; --soft: #5f5b55; --line: #dcd8d2; %s }
  @media (prefers-color-scheme: dark) {
    svg { --sheet: #1a1a18; --ink: #ecebe7; --soft: #a9a59d; --line: #3b3a36; %s }
  }
  text { fill: var(--ink); font: 13px system-ui, sans-serif; }
  .title { font-size: 16px; font-weight: 600; } .soft { fill: var(--soft); font-size: 12px; }
  path { stroke: var(--line); fill: none; } polyline { fill: none; stroke-width: 1.5; }"""


@dataclass(frozen=True)
class Panel:
    """A title, curves by the name of their run, and the values with a line across, from the lowest to the highest."""

    title: str
    curves: Mapping[str, Sequence[float]]
    marks: Mapping[float, str]


def drawing(title: str, about: str, panels: Sequence[Panel]) -> str:
    """Draw panels beside each other.

    Args:
        title: of the picture. about: a line beneath it. panels: a run has one colour in all, and the first run of the
            first panel lies above the others.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    across = LEFT + len(panels) * (PANEL + BETWEEN)
    height = TOP + DEEP + 44 + LEGEND * -(-len(names) // 4)
    inks = ("; ".join(f"--run{i}: {ink}" for i, ink in enumerate(row)) for row in (INK, LIGHT))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {height}" role="img" aria-label="{title}">',
        f"<style>{STYLE % tuple(inks)}\n</style>",
        '<rect width="100%" height="100%" style="fill: var(--sheet)"/>',
        f'<text class="title" x="14" y="26">{title}</text>',
        f'<text class="soft" x="14" y="43">{about}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += _panel(panel, LEFT + i * (PANEL + BETWEEN), names)
    for i, name in enumerate(names):
        x, y = LEFT + i % 4 * (across - LEFT) // 4, TOP + DEEP + 44 + i // 4 * LEGEND
        parts.append(f'<polyline style="stroke: var(--run{i})" points="{x},{y - 4} {x + 24},{y - 4}"/>')
        parts.append(f'<text class="soft" x="{x + 30}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float, names: Sequence[str]) -> list[str]:
    """One panel: its marks, and a line for each run."""
    low, high = min(panel.marks), max(panel.marks)
    parts = [f'<text x="{left}" y="{TOP - 14}">{panel.title}</text>']

    def down(value: float) -> float:
        return TOP + DEEP * (1 - (min(max(value, low), high) - low) / ((high - low) or 1))

    for value, mark in panel.marks.items():
        parts.append(f'<path d="M{left} {down(value):.1f}h{PANEL}"/>')
        parts.append(f'<text class="soft" x="{left - 8}" y="{down(value) + 4:.1f}" text-anchor="end">{mark}</text>')
    for name, values in reversed([*panel.curves.items()]):
        across, every = PANEL / max(len(values) - 1, 1), -(-len(values) // POINTS)
        points = " ".join(f"{left + i * across:.1f},{down(values[i]):.1f}" for i in range(0, len(values), every))
        style = f"stroke: var(--run{names.index(name)})"
        parts.append(f'<polyline style="{style}" points="{points}"><title>{name}</title></polyline>')
    steps = max(map(len, panel.curves.values()))
    parts.append(f'<text class="soft" x="{left + PANEL}" y="{TOP + DEEP + 18}" text-anchor="end">step {steps}</text>')
    return parts
