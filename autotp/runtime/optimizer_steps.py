"""Updates of weights, each held against those of the other ranks before it begins.

A step of an optimizer begins with a turn in which ranks say its options, which parameters have gradients, and a few
values of gradients of parameters that are whole on every tp rank, where these are on the CPU. So another learning
rate, a `zero_grad` left out or a loss that is scaled on one rank is one error on all, and nothing was changed.
"""

from __future__ import annotations

import functools
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from autotp import compat
from autotp.comm.channel import Channel
from autotp.comm.lockstep import CAUSES, meet
from autotp.comm.ranks import Facts, agree
from autotp.comm.turn import Turn
from autotp.errors import RankError
from autotp.runtime.interop.optimizer_classes import refuse_states, refuse_sums, refuse_unknown
from autotp.runtime.interop.ownership import begin_step, end_step, outside_of_steps

from .call_message import NOTHING, SAMPLES, differ, refuse_samples, sampled
from .calls import Calls

BODY = struct.Struct(f"!II{SAMPLES}d")
UNCHANGED = (
    "Nothing was changed. Usual causes: zero_grad() that is left out, a loss that is scaled, or gradients that are "
    "changed, on one rank only."
)
MAX_GRADIENTS = SAMPLES  # of which values are read

_calls_by_id: weakref.WeakValueDictionary[int, Calls] = (
    weakref.WeakValueDictionary()
)  # in the order in which they were made
_updated: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # optimizer -> what `_of` found


def watch(calls: Calls) -> None:
    """Steps of optimizers over the parameters of this module are held against those of the other ranks."""
    for entries in _updated.values():  # the number may have been another module's, which is gone
        entries.pop(id(calls), None)
    _calls_by_id[id(calls)] = calls
    compat.around_steps(_before, _after)


def unwatch(calls: Calls) -> None:
    """Let go of a module whose parameters are another's from here on."""
    _calls_by_id.pop(id(calls), None)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Hold a step against those of the other ranks; give its arguments, where its closure is to be held too."""
    if torch.compiler.is_compiling():
        return None
    channels: list[Channel] = []
    for calls in list(_calls_by_id.values()):
        # Not the other way round: a group of a module that this optimizer has nothing of may have been destroyed.
        updated, first = _of(optimizer, calls)
        if updated and first and calls.shards.host is not None:
            refuse_sums(optimizer)
        if updated and calls.channel is not None:
            with Turn(f"a step of {type(optimizer).__name__}", calls.channel):  # other stages hear of an error too
                _compare(optimizer, calls, updated)
                # After what is compared: all ranks have this class and these options, and refuse it together.
                if first:
                    refuse_unknown(optimizer, calls.shards)
                    refuse_states(optimizer, calls.shards)
            channels.append(calls.channel)
    # From here on collectives of torch are not compared one by one, but those of a closure, which runs forwards.
    begin_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # beside the optimizer itself
    if not channels or not callable(closure):
        return None
    shared = _shared(type(optimizer).__name__, channels, closure)
    return (args, {**kwargs, "closure": shared}) if "closure" in kwargs else ((args[0], shared, *args[2:]), kwargs)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        end_step()


def _shared(name: str, channels: Sequence[Channel], closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure that all ranks hear of where it fails on one: what the optimizer does next may be a collective."""

    @functools.wraps(closure)
    def run() -> Any:
        with outside_of_steps(), Turn(f"the closure of a step of {name}", *channels):
            result = closure()
            for channel in channels:
                meet(channel, f"end of the closure of a step of {name}")
            return result

    return run


def _of(optimizer: Optimizer, calls: Calls) -> tuple[list[tuple[Tensor, bool]], bool]:
    """The module's parameters that the optimizer updates, each with whether it is whole on every tp rank.

    Returns: these, and whether the optimizer has others, or other states, than at its step before.
    """
    kind = id(optimizer.state), *(len(group["params"]) for group in optimizer.param_groups)  # other states when loaded
    entries = _updated.setdefault(optimizer, {})
    kind_before, updated = entries.get(id(calls), ((), []))
    if kind_before == kind:
        return updated, False
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    have = {id(p): (p, whole) for _, p, whole in (*calls.before_gathering, *calls.shards.pieces())}
    updated = [x for i, x in have.items() if i in ids]
    if updated or not isinstance(calls.shards.root, FSDPModule):  # others stand there while weights are gathered
        entries[id(calls)] = kind, updated
    return updated, True


def _compare(optimizer: Optimizer, calls: Calls, updated: list[tuple[Tensor, bool]]) -> None:
    """Refuse a step that is another on some ranks. A collective call."""
    channel = calls.channel
    assert channel is not None
    # A gradient scaler sees the gradients of one rank's stages; a fused step then does nothing.
    overflow = getattr(optimizer, "found_inf", None)
    doing = "step" if overflow is None or not overflow.item() else "step, of which a scaler has found an overflow,"
    what = f"{doing} of {type(optimizer).__name__} on {calls.copy}{calls.name}, after call {calls.number}"
    options, absent = _options(optimizer), bytes(p.grad is None for p, _ in updated)
    grads = [compat.part_of(p.grad) for p, whole in updated if whole and p.grad is not None]
    grads = grads[:: max(1, len(updated) // MAX_GRADIENTS)]
    near = sampled(grads[:MAX_GRADIENTS])[1] if calls.values else NOTHING[1]
    mine = BODY.pack(zlib.crc32(repr(options).encode()), zlib.crc32(absent), *near)
    everyone = [BODY.unpack(one) for one in meet(channel, what, mine)]
    tp = calls.shards.tp
    # A stage may have groups of its own.
    if differ([one[0] for one in everyone], calls.groups.places):
        agree(calls.shards.planners, f"the options of the {what}", options)
        raise RankError(f"The ranks do not agree on the options of the {what}.\n{CAUSES}")
    for i in range(0, len(everyone), tp):
        head = f"The tp ranks do not agree on the gradients of the {what} (which parameters have one, and some values)"
        refuse_samples([(one[1], one[2:]) for one in everyone[i : i + tp]], head, UNCHANGED)


def _options(optimizer: Optimizer) -> Facts:
    """The options of every group in words."""
    return {
        f"{name} of group {i}": _text_of(value)
        for i, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and isinstance(value, Tensor | int | float | str | tuple | None)
    }


def _text_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 and value.device.type == "cpu" else "a tensor"
    return str(value)
