"""Profile of a step on all ranks by torch's profiler, by blocks and collectives: `ShardedModule.profile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile as torch_profile
from torch.profiler import record_function

from autotp import compat
from autotp.comm.ranks import from_all
from autotp.cost.collective_costs import COLLECTIVES
from autotp.errors import InputError
from autotp.inputs import normalise
from autotp.ir.scopes import generic
from autotp.passes.shard.travel import MEASURED
from autotp.plans.plan import Plan
from autotp.plans.show.timeline import layer_of
from autotp.text import seconds

OURS, TORCHS = "autotp ", "_c10d_functional::"  # what names of blocks, and of collectives, begin with in a trace
HEAD = "                                           predicted     fastest     slowest"
ROW = "{:40}{:>12}{:>12}{:>12} (rank {})"


@dataclass(frozen=True)
class Profile:
    """Measurement of a step on every rank. `print` shows it as a table.

    Attributes:
        plan: of the module; its figures are of `plan.cluster`.
        rows: seconds by rank, under "step", a direction and the path of equal blocks (with * for their numbers), and
            the kind of a collective; of all equal blocks, or of all collectives of the kind, together.
        predicted: seconds by the plan of those rows that it has a figure for.
        trace: torch's own profile of the step, of this rank alone; `trace.export_chrome_trace(path)` writes it for
            ui.perfetto.dev, and blocks have their names in it.
        loads: where rows travel to their experts, how many each expert of each mixture has, from all ranks.
    """

    plan: Plan
    rows: Mapping[str, tuple[float, ...]]
    predicted: Mapping[str, float]
    trace: torch_profile = field(repr=False, compare=False)
    loads: tuple[tuple[int, ...], ...] = ()

    @property
    def imbalance(self) -> float:
        """Rows of the rank that gets most for its experts, over the mean of ranks: `imbalance=` of `autotp.plan`."""
        ratios = []
        for rows in self.loads:
            sums = torch.tensor(rows, dtype=torch.float64).view(self.plan.batch.ep, -1).sum(1)
            ratios.append(float(sums.max() / sums.mean()))
        return sum(ratios) / len(ratios) if ratios else 1.0

    def __str__(self) -> str:
        lines = [f"{self.plan.model}, tp={self.plan.tp}, as measured, and as planned for {self.plan.cluster}", HEAD]
        for name, ranks in self.rows.items():
            planned, slowest = self.predicted.get(name), max(ranks)
            cells = seconds(planned) if planned else "", seconds(min(ranks)), seconds(slowest), ranks.index(slowest)
            lines.append(ROW.format(name, *cells))
        lines += [f"rows of the rank with most, over the mean: {self.imbalance:.2f}"] if self.loads else []
        return "\n".join(lines)


class Marks(dict[str, Any]):
    """Names that profilers show of the blocks that run now, by direction."""

    def switch(self, direction: str, path: str, *_: Any) -> None:
        """End the pass in this direction, and begin that of the block at `path`, if any."""
        if direction in self:
            self.pop(direction).__exit__(None, None, None)
        if path:
            self[direction] = record_function(f"{OURS}{direction} {path}").__enter__()

    def leave(self, path: str, _part: Any, _args: Any, outputs: Any) -> None:
        """End a forward; the backward lasts from the gradient's arrival here to that at the block before."""
        self.switch("forward", "")
        for value in _graded(outputs)[:1]:
            value.register_hook(partial(self.switch, "backward", path))


def profile(self: Any, batch: Any) -> Profile:
    """Measure a step on all ranks by torch's profiler, beside what the plan predicts. A collective call.

    In training mode a step is a forward, and a backward from the sum of the first tensor in the outputs that has a
    gradient, which is the loss where the model gives one; else a forward. A step before it is not measured.
    Gradients, buffers and random numbers are afterwards what they were.

    Args:
        batch: the inputs of one call, as for `autotp.compile`; the same on every tp rank.

    Returns: a table, when printed, with torch's own profile of this rank as its `trace`.

    Raises:
        InputError: the batch does not fit `forward`, or nothing that the module returns has a gradient.
        RankError: the ranks' batches differ.
    """
    inputs, plan, layer, marks = normalise(batch), self._plan, layer_of(self._plan), Marks()
    trace, counts = torch_profile(acc_events=True), []
    with ExitStack() as undo:
        MEASURED.append(counts)
        undo.callback(MEASURED.pop)
        # Blocks get their names in the trace by hooks, and all that the steps change is put back at the end.
        for path, part in self._shards.parts.items():
            undo.callback(part._buffers.update, dict(part._buffers))
            if generic(path) == generic(layer.module):
                undo.callback(part.register_forward_pre_hook(partial(marks.switch, "forward", path)).remove)
                undo.callback(part.register_forward_hook(partial(marks.leave, path)).remove)
        # What an optimizer will step by is not what this backward leaves.
        for p in self.parameters():
            undo.callback(setattr, p, "grad", p.grad)
        self.zero_grad()
        undo.enter_context(torch.random.fork_rng())
        # A step that is not measured comes first: it captures and compiles what is new.
        for context in (nullcontext(), trace):
            with context, record_function(f"{OURS}step"):
                outputs = self(*inputs.args, **inputs.kwargs)
                if self.training:
                    # The gradients that a pass leaves are not the user's, so any scalar will do.
                    if not (graded := _graded(outputs)):
                        raise InputError(
                            "nothing that the module returns has a gradient. Call eval() first to measure a forward "
                            "alone."
                        )
                    graded[0].sum().backward()
                    marks.switch("backward", "")
    ranks = from_all(self._calls.ranks, _seconds(trace.events() or []), "profile")
    rows = {}
    for name in dict.fromkeys(chain.from_iterable(ranks)):  # stages have blocks and collectives of their own
        rows[name] = tuple(other.get(name, 0.0) for other in ranks)
    loads = tuple(tuple(rows.sum(0).tolist()) for rows in counts)
    # The plan's figures are of one block, the rows of all equal ones together.
    predicted = {"step": plan.totals.passes}
    for direction in ("forward", "backward"):
        took = sum(getattr(step, direction) for step in layer.steps)
        predicted[f"{direction} {generic(layer.module)}"] = layer.count * took
    return Profile(plan, rows, predicted if self.training == (plan.objective == "training") else {}, trace, loads)


def _graded(values: Any) -> list[Tensor]:
    """Return tensors that have a gradient; in transformers' outputs the loss is the first."""
    return [x for x in compat.tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]


def _seconds(events: Sequence[Any]) -> dict[str, float]:
    """Add up what the events of a step took, by row; on a GPU that is the kernels that they started."""
    rows = defaultdict(float)
    kind = ""
    for e in sorted(events, key=lambda e: e.time_range.start):
        name = generic(e.name.removeprefix(OURS))
        if e.name.startswith(TORCHS):  # a wait counts to the kind that was begun last
            name = kind = next((kind for kind in COLLECTIVES if e.name.startswith(TORCHS + kind)), kind)
        elif not e.name.startswith(OURS):
            continue
        rows[name] += 1e-6 * (e.device_time_total or e.time_range.elapsed_us())
    return rows
