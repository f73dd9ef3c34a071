"""What the parts found, as the section of docs/performance.md, and as a table of what ran."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.helpers.performance import table

from .parts import PARTS, State, module

HEADING = "On a GPU"


def summary(states: Mapping[str, State]) -> str:
    """A row for each part: how many of its items ran, and why others did not."""
    rows = []
    for part, name in PARTS.items():
        state = states.get(part, State({}))
        of = f"{len(state.results)} of {len(state.names)}" if state.names else "not run"
        seconds = f"{sum(state.seconds.values()):.0f}" if state.seconds else "-"
        rows.append([f"{part} {name}", of, str(len(state.faults)), seconds])
    return table(["part", "items", "failed", "seconds"], rows)


def page(states: Mapping[str, State], about: str, date: str) -> str:
    """The section: every part's tables, and every item that failed.

    Args:
        states: by part. about: the device and versions, in words. date: of today.
    """
    parts = [f"`make gpu`, in parts. {about}; {date}.\n", summary(states)]
    for part in PARTS:
        state = states.get(part)
        if state is None:
            continue
        text = [f"### {module(part).TITLE}\n"] if state.results else []
        text += [module(part).section(state.results)] if state.results else []
        text += [f"\nFailed: {name}: {' '.join(why.split())}.\n" for name, why in state.faults.items()]
        parts.append("\n".join(text))
    return "\n".join(parts)
