"""Hooks on a module, and the values that they see: whole ones, where a rank has a slice or a summand of them.

A hook is shown what flows into the module and out of it as tensors that are whole on every rank, and whose gradients
are; what it returns in their place is split again. Parameters, which flow into modules too, are not shown. Hooks of
torch itself, as those of `fully_shard`, take what flows as it is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotp.comm.channel import by_value
from autotp.comm.conversions import function_for
from autotp.comm.lockstep import CAUSES
from autotp.comm.ranks import Ranks, from_all
from autotp.comm.turn import call_hook
from autotp.comm.virtual import Hosts, values_of
from autotp.errors import RankError, StateError
from autotp.inputs import Args, Kwargs, Leaves
from autotp.ir.graph import Function
from autotp.ir.layouts import I, Shard
from autotp.ir.specs import INVARIANT, ShardSpec, Spec
from autotp.passes.analysis.flows import Flow
from autotp.runtime.lower.hosted import convert

from .call_message import differ

# The last one's, of its switch for checkpointing, lets the embedding's output need a gradient, whatever part that is.
OWN = ("torch.", "autotp.", "transformers.modeling_utils.")


@dataclass(frozen=True)
class Boundary:
    """Values that flow into one call of a module and out of it.

    Attributes:
        path: of the module. ranks: over which the values are distributed.
        hosts: of virtual ranks, those of this process.
    """

    path: str
    takes: Sequence[Flow]
    gives: Sequence[Flow]
    ranks: Ranks
    hosts: Hosts = ()

    @property
    def ways(self) -> Any:
        """Layouts of all that flows, to be compared."""
        return tuple(self.takes), tuple(self.gives)

    @property
    def communicates(self) -> bool:
        """Flag that says whether showing the whole of what flows forward takes all ranks."""
        return any(flow.shown and not flow.whole for flow in (*self.takes, *self.gives))

    @property
    def split(self) -> bool:
        """Flag that says whether a hook would see something else than the whole."""
        return any(not flow.shown or flow.layout != I for flow in (*self.takes, *self.gives))

    def whole_values(self, values: Leaves, flows: Sequence[Flow], graded: bool = False) -> tuple[Any, ...]:
        """Return what a hook sees of these values.

        Args:
            values, flows: those at the boundary, this rank's part of each. graded: whether these are gradients.
        """
        # One value may flow in several layouts (sharded for one reader, whole for another), and is shown once.
        wholes = {flow.place: [] for flow in flows if flow.shown}
        for value, flow in zip(values, flows, strict=True):
            if flow.place in wholes and (flow.shown or graded):
                wholes[flow.place].append(self._whole(value, self._spec(value, flow, graded)))
        return tuple(map(_total, wholes.values()))

    def with_replaced(
        self, values: Leaves, flows: Sequence[Flow], before: Sequence[Any], new: Any, graded: bool = False
    ) -> tuple[Any, ...]:
        """Return the values, with what a hook put in the place of those that it saw.

        Args:
            values, flows: those at the boundary. graded: whether these are gradients.
            before: what the hook saw, nothing where it wrote to that; new: what it gave.

        Raises:
            StateError: it gave another number of values.
        """
        gives = tuple(new) if isinstance(new, tuple | list) else (new,)
        places = dict.fromkeys(flow.place for flow in flows if flow.shown)
        if len(gives) != len(places):
            raise StateError(
                f"a hook on {self.path} returned {len(gives)} values in the place of {len(places)}: those that flow "
                "there in the captured graph. Return as many."
            )
        # What the hook handed back as it saw it stays as it is: converting it would cost a collective, and rounding.
        unchanged_ids = set(map(id, before))
        new_at = {place: value for place, value in zip(places, gives, strict=True) if id(value) not in unchanged_ids}
        out = []
        for value, flow in zip(values, flows, strict=True):
            if flow.place not in new_at:
                out.append(value)
            elif graded and not flow.shown:  # all of the gradient goes through the one that is shown
                out.append(None if value is None else torch.zeros_like(value))
            else:
                out.append(self._part(new_at[flow.place], self._spec(value, flow, graded)))
        return tuple(out)

    def _whole(self, value: Any, spec: Spec) -> Any:
        if value is None or spec == INVARIANT:
            return value
        whole = self._convert(value, spec, INVARIANT)
        return whole.clone() if spec.mark == "R" else whole  # not the same memory: a hook may write to it

    def _part(self, value: Any, spec: Spec) -> Any:
        return value if value is None or spec == INVARIANT else self._convert(value, INVARIANT, spec)

    def _convert(self, value: Tensor, source: Spec, target: Spec) -> Tensor:
        r = self.ranks
        if self.hosts:
            return convert(value, source, target, self.hosts)
        return function_for(source, target)(value, source, target, rank=r.rank, tp=r.tp, group=r.group_name)

    def _spec(self, value: Any, flow: Flow, graded: bool) -> Spec:
        """Return the present layout of a flow's value, or of its gradient."""
        first = values_of(value, 1)[0]
        if not isinstance(first, Tensor) or flow.layout == I or (self.ranks.mesh is None and not self.hosts):
            return INVARIANT
        if flow.layout.mark not in "RPS":
            raise StateError(
                f"a hook on {self.path}: its values are placed on the ranks as {flow.layout}, of which no rank has the "
                "whole. Hook the module around it."
            )
        spec = flow.layout.to_runtime()
        if isinstance(flow.layout, Shard) and not _plain(spec):
            spec = self._measured(value, flow.layout)
        return spec.dual if graded else spec

    def _measured(self, value: Tensor, layout: Shard) -> Spec:
        """Return the layout of a slice whose length only the ranks' tensors tell. A collective call."""
        _, repeat, segments = layout.to_runtime()[:3]  # type: ignore[index]
        _, unit, *deal = segments[0] if len(segments) == 1 and repeat == 1 else (None, None)
        if not isinstance(unit, int):
            raise StateError(
                f"a hook on {self.path}: its values are split in pieces whose sizes change. Hook the module around it."
            )
        length = sum(x.shape[layout.dim] for x in values_of(value, 1))
        total = sum(from_all(self.ranks, length, f"hook on {self.path}"))
        return ShardSpec(layout.dim, 1, ((total // unit, unit, *deal),))


def _total(values: Sequence[Any]) -> Any:
    """Add up the gradients of a value, of which each of its layouts carries a summand; None where there is none."""
    summands = [value for value in values if value is not None]
    return functools.reduce(operator.add, summands) if summands else None


def _plain(spec: Any) -> bool:
    """Return whether a slice is told in numbers."""
    return isinstance(spec.repeat, int) and all(isinstance(n, int) for segment in spec.segments for n in segment[:2])


def _at(module: Any, kwargs: Kwargs) -> tuple[Boundary | None, Kwargs, Kwargs]:
    """Return the boundary at which a hook is called, where it would see parts, the arguments that it sees, and ours."""
    others = {**kwargs}
    ours = {"program": others.pop("program")} if "program" in kwargs else {}
    boundary = module._boundaries.get(ours.get("program"))
    return boundary if boundary is not None and boundary.split else None, others, ours


def is_own(hook: Any) -> bool:
    """Return whether a hook is one of torch's own, or of autotp's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{name}.".startswith(OWN)


def _shows_whole(run: Any) -> Any:
    run.shows_whole = True
    return run


def hooked(*tables: Mapping[int, Any]) -> bool:
    """Return whether these hooks of a module have one of the user's among them."""
    return any(getattr(hook, "shows_whole", False) for table in tables for hook in table.values())


def compare_hooks(ranks: Ranks, what: str, modules: Sequence[Any], places: Sequence[Sequence[int]]) -> None:
    """Refuse hooks that are shown values that all ranks gather for them, but are on some ranks only. Collective.

    Args:
        ranks: that keep in step. what: the call in words. modules: all of a sharded one.
        places: ranks that have the same weights, and so gather the same.

    Raises:
        RankError: with the modules that have such hooks.
    """
    paths = set()
    for module in modules:
        if hooked(module._forward_pre_hooks, module._forward_hooks):
            paths |= {b.path for b in getattr(module, "_boundaries", {}).values() if b.communicates}
    everyone = from_all(ranks, ", ".join(sorted(paths)) or "none", f"forward, {what}")
    if differ(everyone, places):
        differences = by_value(everyone)
        raise RankError(f"In {what} the ranks have parted: hooks that see whole values: {differences}.\n{CAUSES}")


def _call(hook: Function, module: Any, wholes: Sequence[Any], *args: Any) -> tuple[Any, bool]:
    """Call a hook with these arguments, among which are the whole values that it is shown.

    Returns: what it gave, and whether it may have written to what it saw: tensors of inference do not count writes.
    """
    tensors = [x for x in wholes if isinstance(x, Tensor)]
    if any(x.is_inference() for x in tensors):
        return call_hook(hook, module, *args), True
    before = [x._version for x in tensors]
    return call_hook(hook, module, *args), [x._version for x in tensors] != before


def _grade(values: Leaves, flows: Sequence[Flow], wholes: Sequence[Any]) -> None:
    """Let values need gradients where a hook said so of what it saw."""
    locals_ = [v for v, flow in zip(values, flows, strict=True) if flow.shown]
    for value, whole in zip(locals_, wholes, strict=True):
        for x in values_of(value, 1) if isinstance(whole, Tensor) and whole.requires_grad else ():
            if not x.requires_grad:
                x.requires_grad_()


def before_forward(hook: Function, with_kwargs: bool) -> Function:
    """Make a pre-forward hook that is shown whole values; to be registered with `with_kwargs`."""

    @_shows_whole
    def run(module: Any, args: Args, kwargs: Kwargs) -> Any:
        boundary, rest, ours = _at(module, kwargs)
        wholes = args if boundary is None else boundary.whole_values(args, boundary.takes)
        new, wrote = _call(hook, module, wholes, wholes, *((rest,) if with_kwargs else ()))
        if new is None and (boundary is None or not wrote):
            return None
        if new is None:
            new = wholes
        elif with_kwargs:
            new, rest = new
        new = new if isinstance(new, tuple) else (new,)
        if boundary is not None:
            new = boundary.with_replaced(args, boundary.takes, () if wrote else wholes, new)
        return new, rest | ours

    return run


def after_forward(hook: Function, with_kwargs: bool) -> Function:
    """Make a forward hook that is shown whole values; to be registered with `with_kwargs`."""

    @_shows_whole
    def run(module: Any, args: Args, kwargs: Kwargs, output: Any) -> Any:
        boundary, rest, _ = _at(module, kwargs)
        options = (rest,) if with_kwargs else ()
        if boundary is None:
            return call_hook(hook, module, args, *options, output)
        several = len(boundary.gives) > 1
        values = output if several else (output,)
        wholes = boundary.whole_values(values, boundary.gives)
        arguments = boundary.whole_values(args, boundary.takes)
        new, wrote = _call(hook, module, wholes, arguments, *options, wholes[0] if len(wholes) == 1 else wholes)
        if new is None and not wrote:
            _grade(values, boundary.gives, wholes)
            return None
        if new is None:
            new = wholes
        elif len(wholes) <= 1:
            new = (new,)
        results = boundary.with_replaced(values, boundary.gives, () if wrote else wholes, new)
        return results if several else results[0]

    return run


def on_backward(hook: Function) -> Function:
    """Make a hook before or after a backward that is shown gradients of whole values: of outputs, after it of inputs
    too. What it returns stands for the first of them."""

    @_shows_whole
    def run(module: Any, *gradients: tuple[Any, ...]) -> Any:
        boundary = _one_call(module)
        if boundary is None:
            return call_hook(hook, module, *gradients)
        flows = (boundary.takes, boundary.gives)[-len(gradients) :]
        wholes = [boundary.whole_values(*pair, graded=True) for pair in zip(gradients, flows, strict=True)]
        new = call_hook(hook, module, *wholes)
        return None if new is None else boundary.with_replaced(gradients[0], flows[0], wholes[0], new, graded=True)

    return run


def note(module: Any, program: Any) -> None:
    """Remember which call of a module is made, for hooks on its backward."""
    if module._backward_ran:
        module._calls_made.clear()
        module._backward_ran = False
    boundary = module._boundaries.get(program)
    if boundary is not None:
        module._calls_made[boundary.ways] = boundary


def _one_call(module: Any) -> Boundary | None:
    """Return the boundary of the calls that a backward may be of, for it does not say of which it is."""
    module._backward_ran = True
    calls = [*module._calls_made.values()]
    if len(calls) > 1:
        raise StateError(
            f"a backward hook on {calls[0].path}: before this backward it was called in several ways, of which the "
            "layouts differ. Hook the module around it, or a tensor in a forward hook."
        )
    return calls[0] if calls and calls[0].split else None
