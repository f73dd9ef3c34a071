"""Steps of optimizers, each compared with those of the other ranks before it begins, and which optimizers are known.

A step of an optimizer begins with a turn in which ranks say its options, which parameters have gradients, and a few
values of gradients of parameters that are whole on every tp rank, where these are on the CPU. So another learning
rate, a `zero_grad` left out or a loss that is scaled on one rank is one error on all, and nothing was changed.

An optimizer computes with what it is given, a DTensor of each parameter. Where it updates elements one by one, or
leaves sums and products to DTensor, a step is that of the model. Where it reads `.to_local()`, keeps plain tensors
beside parameters, or takes a part for the whole, the numbers are others, and nothing says so. The classes below were
held against the model's own steps (`tests/runtime/interop/optimizers`).
"""

from __future__ import annotations

import functools
import inspect
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
from autotp.comm.ranks import Facts, agree, from_all, together
from autotp.comm.turn import Turn
from autotp.errors import RankError, StateError
from autotp.runtime.checkpoint.optimizers import updated_by
from autotp.runtime.interop.ownership import INSTEAD, begin_step, end_step, of_another_rank, outside_of_steps

from .call_message import NOTHING, SAMPLES, differ, refuse_samples, sampled, short
from .calls import Calls
from .data_parallel import refuse_unsummed
from .storage import ShardState

UNCHANGED = (
    "Nothing was changed. Usual causes: zero_grad() that is left out, a loss that is scaled, or gradients that are "
    "changed, on one rank only."
)
MAX_GRADIENTS = SAMPLES  # of which values are read

_watched: weakref.WeakKeyDictionary[Calls, None] = weakref.WeakKeyDictionary()  # in the order in which they were made
_updated: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # optimizer -> results of `_of`


def watch(calls: Calls) -> None:
    """Compare from now on steps of optimizers over the parameters of this module with those of the other ranks."""
    _watched[calls] = None
    compat.around_steps(_before, _after)


def unwatch(calls: Calls) -> None:
    """Stop watching a module whose parameters are another's from here on."""
    _watched.pop(calls, None)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Compare a step with those of the other ranks; return new arguments where its closure is to be compared too."""
    if torch.compiler.is_compiling():
        return None
    channels = []
    for calls in list(_watched):
        # Not the other way round: a group of a module that this optimizer has nothing of may have been destroyed.
        updated, first = _of(optimizer, calls)
        if updated and first and calls.shards.host is not None:
            refuse_sums(optimizer)
        if updated and calls.channel is not None:
            with Turn(f"a step of {type(optimizer).__name__}", calls.channel):  # other stages hear of an error too
                refuse_unsummed(calls.shards, "a step of an optimizer")
                _compare(optimizer, calls, updated)
                # After what is compared: all ranks have this class and these options, and refuse it together.
                if first:
                    refuse_unknown(optimizer, calls.shards)
                    refuse_states(optimizer, calls.shards)
            channels.append(calls.channel)
    # From here on a number of which each rank holds a part may be asked for, but in a closure, which runs forwards.
    begin_step()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # beside the optimizer itself
    if not channels or not callable(closure):
        return None
    shared = _shared(type(optimizer).__name__, channels, closure)
    return (args, {**kwargs, "closure": shared}) if "closure" in kwargs else ((args[0], shared, *args[2:]), kwargs)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        end_step()


def _shared(name: str, channels: Sequence[Channel], closure: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a closure so that all ranks hear where it fails on one: what the optimizer does next may be a collective."""

    @functools.wraps(closure)
    def run() -> Any:
        with outside_of_steps(), Turn(f"the closure of a step of {name}", *channels):
            result = closure()
            for channel in channels:
                meet(channel, f"end of the closure of a step of {name}")
            return result

    return run


def _of(optimizer: Optimizer, calls: Calls) -> tuple[list[tuple[Tensor, bool]], bool]:
    """Return the module's parameters that the optimizer updates, each with whether it is whole on every tp rank.

    Returns: these, and whether the optimizer has others, or other states, than at its step before.
    """
    kind = id(optimizer.state), *(len(group["params"]) for group in optimizer.param_groups)  # other states when loaded
    entries = _updated.setdefault(optimizer, weakref.WeakKeyDictionary())
    kind_before, updated = entries.get(calls, ((), []))
    if kind_before == kind:
        return updated, False
    ids = set(map(id, updated_by(optimizer)))
    have = {id(p): (p, whole) for _, p, whole in (*calls.before_gathering, *calls.shards.pieces())}
    updated = [x for i, x in have.items() if i in ids]
    if updated or not isinstance(calls.shards.root, FSDPModule):  # others stand there while weights are gathered
        entries[calls] = kind, updated
    return updated, True


def _compare(optimizer: Optimizer, calls: Calls, updated: list[tuple[Tensor, bool]]) -> None:
    """Refuse a step that differs between ranks. A collective call."""
    # A gradient scaler sees the gradients of one rank's stages; a fused step then does nothing.
    overflow = getattr(optimizer, "found_inf", None)
    doing = "step" if overflow is None or not overflow.item() else "step, of which a scaler has found an overflow,"
    what = f"{doing} of {type(optimizer).__name__} on {calls.name}, after call {calls.number}"
    options, absent = _options(optimizer), bytes(p.grad is None for p, _ in updated)
    grads = [compat.part_of(p.grad) for p, whole in updated if whole and p.grad is not None]
    grads = grads[:: max(1, len(updated) // MAX_GRADIENTS)]
    near = sampled(grads[:MAX_GRADIENTS])[1] if calls.values else NOTHING[1]
    everyone = from_all(calls.ranks, (short(options), zlib.crc32(absent), near), what)
    tp = calls.shards.tp
    # A stage may have groups of its own.
    if differ([one[0] for one in everyone], calls.groups.places):
        agree(calls.shards.planners, f"the options of the {what}", options)
        raise RankError(f"The ranks do not agree on the options of the {what}.\n{CAUSES}")
    for i in range(0, len(everyone), tp):
        head = f"The tp ranks do not agree on the gradients of the {what} (which parameters have one, and some values)"
        refuse_samples([one[1:] for one in everyone[i : i + tp]], head, UNCHANGED)


def _options(optimizer: Optimizer) -> Facts:
    """Return the options of every group in words."""
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


TOLD = "right_for_shards"  # the attribute, of an optimizer or its class, by which a user says that it is right
RIGHT = {
    "torch": "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD",
    "lion_pytorch": "Lion",
    "prodigyopt": "Prodigy",
    "schedulefree": "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree "
    "SGDScheduleFree SGDScheduleFreeReference",
    "pytorch_optimizer": "APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod AdaPNM AdaShift AdaSmooth "
    "AdaTAM Adai AdamC AdamG AdamS AdamWSN Adan AggMo Amos Ano AvaGrad BCOS Conda DiffGrad DualAdam EXAdam EmoLynx "
    "EmoNavi FOCUS FTRL Fira FlashAdamW Fromage GaLore Grams GrokFastAdamW Kate LARS LaProp Lion MARS MSVAG Nero PAdam "
    "PID PNM QHAdam QHM RAdam Ranger SCION SCIONLight SGDSaI SGDW SRMM ScalableShampoo ScheduleFreeAdamW "
    "ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix TAM Tiger VSGD Yogi ADOPT MADGRAD",
}
WITHOUT_FOREACH = ("ADOPT", "MADGRAD")  # right with foreach=False alone
# Computing with a whole parameter: of one that is held in pieces each piece would be taken for the whole.
BY_PARAMETER = (
    "Adafactor", "Muon", "AdaShift", "AdaTAM", "Amos", "Conda", "FlashAdamW", "Fromage", "LARS", "SCION", "SCIONLight",
    "SGDSaI", "TAM",
)  # fmt: skip
ACROSS = ("LBFGS", "Prodigy")  # summing over all parameters, of which a rank of stages has some
BY_ELEMENT = (  # of torch
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
FREE = ("lr", "weight_decay", "warmup_steps", "maximize")  # options that change no step's kind, whatever they are


def refuse_unknown(optimizer: Optimizer, shards: ShardState) -> None:
    """Refuse an optimizer of which nobody knows, or says, that it steps on parts as on whole parameters.

    Raises:
        StateError: on every rank, for all have the same optimizer; it says what is right, and how to say so.
    """
    library, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    if (shards.tp == 1 and not shards.staged) or getattr(optimizer, TOLD, False):
        return
    if name not in RIGHT.get(library, "").split():
        fault = "is not among the optimizers that are known to"
    elif library != "torch" and (switches := _switches(optimizer, name)):
        fault = f"is known to with other options than {switches}, and with those it is not known to"
    elif shards.staged and name in ACROSS:
        fault = "sums over all parameters, of which a rank has those of its stages: it does not"
    elif name in BY_PARAMETER and (split := _in_pieces(optimizer, shards)):
        fault = f"computes with a whole parameter, and {split} is held in pieces: it does not"
    else:
        return
    raise StateError(
        f"{name} {fault} step on this module's parameters as on the model's. Nothing was changed. Right are "
        f"{RIGHT['torch'].replace(' ', ', ')} of torch.optim, and those of other libraries in docs/integrations.md. "
        "One that updates each element by itself, or computes with DTensors throughout and keeps no plain tensors, is "
        f"right too: say so by optimizer.{TOLD} = True, or in its class."
    )


def refuse_sums(optimizer: Optimizer) -> None:
    """Refuse an optimizer that may sum over elements, whose bits then depend on who holds them.

    Raises:
        StateError: it names those that do not.
    """
    name = type(optimizer).__name__
    by_element = type(optimizer).__module__.partition(".")[0] == "torch" and name in BY_ELEMENT
    if not by_element and not getattr(optimizer, TOLD, False):
        raise StateError(
            f"{name} is not among the optimizers that update each element by itself, as tp_invariant asks for: "
            f"{', '.join(BY_ELEMENT)} of torch.optim. Nothing was changed. One that does says so by "
            f"optimizer.{TOLD} = True."
        )


def refuse_states(optimizer: Optimizer, shards: ShardState) -> None:
    """Refuse an optimizer that was loaded with the states of another rank. A collective call.

    Raises:
        StateError: that is so here, or a `RankError` where it is so on another rank.
    """

    def look() -> None:
        for entries in optimizer.state.values():
            values = entries if isinstance(entries, dict) else {}
            other = next((key for key, value in values.items() if of_another_rank(value)), None)
            if other is not None:
                raise StateError(
                    f"the state {other} of this {type(optimizer).__name__} is another rank's part: it was loaded from "
                    f"what one rank had pickled. {INSTEAD}"
                )

    together(shards.ranks, "looking at the optimizer's state", look)


def _switches(optimizer: Optimizer, name: str) -> str:
    """Return options with which an optimizer was not tried: those beside rates that are not its class's defaults."""
    defaults = {n: p.default for n, p in inspect.signature(type(optimizer)).parameters.items() if n not in FREE}
    if name in WITHOUT_FOREACH:
        defaults["foreach"] = False
    options = vars(optimizer)
    for group in optimizer.param_groups:
        options = {**options, **group}
    others = {n: options[n] for n in sorted(defaults.keys() & options.keys()) if options[n] != defaults[n]}
    return ", ".join(f"{n}={value!r}" for n, value in others.items() if isinstance(value, bool | int | str | None))


def _in_pieces(optimizer: Optimizer, shards: ShardState) -> str:
    """Return a parameter of the optimizer's that is held in several pieces; "" where there is none."""
    updated = set(map(id, updated_by(optimizer)))
    for name in shards.storages:
        part, leaves = shards.place_of(name)
        if len(leaves) > 1 and any(id(part._parameters.get(leaf)) in updated for leaf in leaves):
            return name
    return ""
