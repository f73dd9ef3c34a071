"""A step measured on all ranks, by torch's profiler: `ShardedModule.profile`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from autotp import compat
from autotp.comm.lockstep import meet
from autotp.comm.ranks import together
from autotp.errors import InputError
from autotp.inputs import Inputs, normalise
from autotp.ir.scopes import generic
from autotp.plans.plan import Plan
from autotp.plans.show.measured import Profile, Span

from .profile_rows import STEP, profile_of

OURS, TURN = "autotp measured ", "turn"
DIRECTIONS = ("forward", "backward")
# What a collective is called by torch -> by the plan.
COLLECTIVES = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
WAIT = "_c10d_functional::wait_tensor"


class Profiled:
    """For a sharded module."""

    _shards: Any
    _calls: Any
    _plan: Any
    _source: Any
    training: bool

    def profile(self, batch: Any, *, loss: Callable[[Any], Tensor] | None = None, repeats: int = 5) -> Profile:
        """Measure a step on all ranks, beside what the plan predicts. A collective call.

        In training mode a step is a forward and a backward, else a forward alone. One call goes before that is not
        measured. Gradients, buffers and the state of random numbers are afterwards what they were.

        Times are those that torch's profiler sees: of a block from its begin to its end, with the collectives in it;
        of a collective the call and the wait for it, and so also for a rank that is late. On a GPU they are what the
        kernels took that were started there.

        Args:
            batch: the inputs of one call, as for `autotp.compile`; the same on every tp rank.
            loss: from what the module returns a tensor of one element, for the backward; by default its `loss`, and
                where it has none the sum of its first tensor that has a gradient.
            repeats: how many steps are measured; figures are medians.

        Returns: a table, when printed; `to_trace(path)` writes it for Perfetto.

        Raises:
            InputError: the batch does not fit `forward`, `repeats` is less than 1, or nothing that the module returns
                has a gradient.
            RankError: that is so on another rank, or the ranks' batches differ.
        """
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            raise InputError(f"repeats={repeats!r}: give a whole number of steps, at least 1.")
        inputs, plan = normalise(batch), self._plan
        blocks = _blocks(plan, self._shards.parts)
        with self._as_before(), Marks(self._shards.parts, blocks) as marks:
            self._step(inputs, loss, marks)
            mine = [self._measured(inputs, loss, marks) for _ in range(repeats)]
        wire = json.dumps([list(map(astuple, step)) for step in mine]).encode()
        steps = [_steps(one) for one in meet(self._calls.channel, "profile", wire)]
        return profile_of(plan, repeats, steps, self.training == (plan.objective == "training"))

    def _step(self, inputs: Inputs, loss: Callable[[Any], Tensor] | None, marks: Marks) -> None:
        with record_function(f"{OURS}{STEP}"), torch.set_grad_enabled(self.training):
            out = self(*inputs.args, **inputs.kwargs)  # type: ignore[operator]
            if self.training:
                ranks = self._source.ranks
                of = together(ranks, "reading the loss", lambda: _loss(out, loss))
                with record_function(f"{OURS}{TURN}"):
                    of.backward()
                    marks.close()
            if self._shards.device.type == "cuda":
                torch.cuda.synchronize(self._shards.device)

    def _measured(self, inputs: Inputs, loss: Callable[[Any], Tensor] | None, marks: Marks) -> list[Span]:
        cuda = self._shards.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            self._step(inputs, loss, marks)
        return _spans(profiler.events() or [], cuda)

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Gradients, buffers and random numbers are afterwards what they were."""
        module: Any = self
        grads = [(p, p.grad) for p in module.parameters()]
        buffers = [(part, dict(part._buffers)) for part in module.modules()]
        for p, _ in grads:
            p.grad = None
        try:
            with torch.random.fork_rng():
                yield
        finally:
            for p, grad in grads:
                p.grad = grad
            for part, tensors in buffers:
                part._buffers.update(tensors)


def _steps(wire: bytes) -> list[list[Span]]:
    """The steps that a rank sent, each its spans."""
    return [list(starmap(Span, step)) for step in json.loads(wire)]


def _loss(out: Any, function: Callable[[Any], Tensor] | None) -> Tensor:
    if function is not None:
        value = function(out)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InputError("loss= gave no tensor of one element that has a gradient.")
        return value
    own = out.get("loss") if hasattr(out, "get") else getattr(out, "loss", None)
    values = [own] if isinstance(own, Tensor) else compat.tree_leaves(out)
    graded = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
    if not graded:
        raise InputError(
            "nothing that the module returns has a gradient. Call eval() first to measure a forward alone."
        )
    return graded[0].sum()


def _blocks(plan: Plan, parts: dict[str, nn.Module]) -> list[str]:
    """Paths of the blocks that the plan's times of a layer stand for."""
    of = plan.layer.module if plan.layer is not None else ""
    return [path for path in parts if path and generic(path) == generic(of)]


class Marks:
    """What shows the profiler the blocks' passes by name; within its context, from the first call on."""

    def __init__(self, parts: Mapping[str, nn.Module], blocks: Sequence[str]) -> None:
        self.blocks = {path: parts[path] for path in blocks}
        self.open: dict[tuple[str, str], Any] = {}
        self.handles: list[Any] = []
        self.back: set[str] = set()  # blocks whose backward ends with the gradient of what they are given

    def __enter__(self) -> Marks:
        for path, part in self.blocks.items():
            self.handles.append(part.register_forward_pre_hook(partial(self._begins, path)))
            self.handles.append(part.register_forward_hook(partial(self._ends, path)))
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        for handle in self.handles:
            handle.remove()

    def close(self) -> None:
        """End the passes that nothing ends: the backward of a block whose inputs have no gradient is the last one."""
        for key in list(self.open):
            self.end(*key)

    def begin(self, path: str, direction: str, *args: Any) -> None:
        """A pass begins."""
        self.open[path, direction] = record_function(f"{OURS}{direction} {path}").__enter__()

    def end(self, path: str, direction: str, *args: Any) -> None:
        """And ends."""
        if (mark := self.open.pop((path, direction), None)) is not None:
            mark.__exit__(None, None, None)

    def _begins(self, path: str, part: nn.Module, args: tuple[Any, ...]) -> None:
        self.begin(path, "forward")

    def _ends(self, path: str, part: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.end(path, "forward")
        graded = [x for x in compat.tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        if path in self.back or not graded:
            return
        if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            graded[0].register_hook(partial(self._arrives, path))
            return
        self.back.add(path)  # from the next call on
        self.handles.append(part.register_full_backward_pre_hook(partial(self.begin, path, "backward")))
        self.handles.append(part.register_full_backward_hook(partial(self.end, path, "backward")))

    def _arrives(self, path: str, grad: Tensor) -> None:
        self.begin(path, "backward")


def _spans(events: Sequence[Any], cuda: bool) -> list[Span]:
    """The step, the blocks and the collectives of one step, in the order of their begins."""
    events = sorted(events, key=lambda e: e.time_range.start)
    zero = next(e for e in events if e.name == f"{OURS}{STEP}").time_range.start
    turn = min((e.time_range.start for e in events if e.name == f"{OURS}{TURN}"), default=math.inf)
    spans: list[Span] = []
    waiting: list[int] = []
    for e in events:
        start, took = 1e-6 * (e.time_range.start - zero), 1e-6 * (e.device_time_total if cuda else _length(e))
        direction, _, path = e.name.removeprefix(OURS).partition(" ")
        if direction == STEP and path == "":
            spans.append(Span(STEP, "", start, 1e-6 * _length(e), False))
        elif e.name.startswith(OURS) and direction in DIRECTIONS:
            spans.append(Span(path, direction, start, took, False))
        elif e.name in COLLECTIVES:
            waiting.append(len(spans))
            spans.append(Span(COLLECTIVES[e.name], DIRECTIONS[e.time_range.start >= turn], start, took, True))
        elif e.name == WAIT and waiting:  # for the first that was begun
            at = waiting.pop(0)
            spans[at] = replace(spans[at], seconds=spans[at].seconds + took)
    return spans


def _length(event: Any) -> float:
    return event.time_range.end - event.time_range.start
