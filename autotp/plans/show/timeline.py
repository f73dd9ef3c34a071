"""The predicted timeline of one layer of a plan, and as a trace for Perfetto."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotp.errors import PlanError
from autotp.plans.estimates import Layer, Timed
from autotp.plans.plan import Plan
from autotp.text import seconds

from .document import MARKS, last, operator, primitive

TRACKS = ("compute", "communication")


@dataclass(frozen=True)
class Event:
    """An operator or a collective at its time.

    Attributes:
        start, seconds: from the beginning of the layer, by the cost model.
        track: "compute" or "communication"; `direction`: "forward" or "backward".
        label: such as "linear (q_proj)" or "all-reduce (f*)"; `step`: the plan's own figures.
    """

    start: float
    seconds: float
    track: str
    direction: str
    label: str
    step: Timed

    @property
    def end(self) -> float:
        return self.start + self.seconds


def timeline(plan: Plan) -> tuple[Event, ...]:
    """Order the operators and collectives of one layer: its forward, then for training its backward in reverse.

    Nothing overlaps, as in `Totals.alone`: an operator waits for the collective before it. In a step the other layers
    run between forward and backward of this one.

    Args:
        plan: made here or loaded.

    Raises:
        PlanError: the plan holds no times.
    """
    layer = layer_of(plan)
    events, now = [], 0.0
    for i, (direction, steps) in enumerate((("forward", layer.steps), ("backward", layer.steps[::-1]))):
        for step in steps:
            took, sends = step.ways[i]
            if took:
                events.append(Event(now, took, TRACKS[sends is not None], direction, _label(step, sends), step))
                now += took
    return tuple(events)


def layer_of(plan: Plan) -> Layer:
    """Return the times that the plan holds of one layer.

    Raises:
        PlanError: it holds none.
    """
    if plan.layer is None:
        raise PlanError("the plan holds no times of a layer. Plan again.")
    return plan.layer


def heading(layer: Layer) -> str:
    """Name the part of the model that a timeline shows, and the number of its equals."""
    if layer.count == 1:
        return "the whole model, in which no block repeats"
    same = "all" if layer.alike == layer.count else f"{layer.alike} of them"
    return f"{layer.module}, one of {layer.count} blocks ({same} take these times)"


def _label(step: Timed, sends: str | None) -> str:
    if step.converts:
        return f"{primitive(sends) or 'local'} ({MARKS.get(step.name, step.name)})"
    return f"{operator(step.name)} ({last(step.module)})" if step.module else operator(step.name)


def write_trace(plan: Plan, path: str | Path) -> None:
    """Write the timeline of one layer as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    Args:
        plan: made here or loaded.
        path: of the JSON file.

    Raises:
        PlanError: the plan holds no times.
    """
    layer, events = layer_of(plan), timeline(plan)
    title = f"{plan.model}, tp={plan.tp}, {plan.cluster}, {plan.objective}: {heading(layer)}"
    rows = [_meta("process_name", 0, name=title)]
    for i, name in enumerate(("pass", *TRACKS)):
        rows += [_meta("thread_name", i, name=name), _meta("thread_sort_index", i, sort_index=i)]
    for direction in dict.fromkeys(e.direction for e in events):
        run = [e for e in events if e.direction == direction]
        rows.append(_span(direction, run[0].start, run[-1].end - run[0].start, 0, "pass", {}))
    for e in events:
        rows.append(_span(e.label, e.start, e.seconds, 1 + TRACKS.index(e.track), e.track, _arguments(e)))
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ns"}, indent=1))


def _meta(what: str, thread: int, **args: Any) -> dict[str, Any]:
    """Name or order a process or a thread."""
    return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": args}


def _span(name: str, start: float, took: float, thread: int, kind: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return a complete event; the format counts in microseconds."""
    times = {"ts": 1e6 * start, "dur": 1e6 * took}
    return {"name": name, "ph": "X", "cat": kind, "pid": 0, "tid": thread, **times, "args": args}


def _arguments(e: Event) -> dict[str, Any]:
    """Return the fields of an event that a trace viewer shows."""
    of, took = e.step, seconds(e.seconds)
    arguments = {"module": of.module, "sublayer": of.part, "direction": e.direction, "predicted": took}
    return {**arguments, "layouts": of.change, "bytes": of.bytes} if of.converts else arguments
