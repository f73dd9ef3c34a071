"""Optimizers whose step on shards is known to be the step on whole parameters: any other is refused until told.

An optimizer computes with what it is given, a DTensor of each parameter. Where it updates elements one by one, or
leaves sums and products to DTensor, a step is that of the model. Where it reads `.to_local()`, keeps plain tensors
beside parameters, or takes a part for the whole, the numbers are others, and nothing says so. The classes below were
held against the model's own steps (`tests/runtime/interop/optimizers`).
"""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from autotp.comm.ranks import together
from autotp.errors import StateError
from autotp.inputs import Kwargs
from autotp.runtime.storage import ShardState

from .ownership import INSTEAD, of_another_rank

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
    """Options with which an optimizer was not tried: those beside rates that are not its class's defaults."""
    defaults = {n: p.default for n, p in inspect.signature(type(optimizer)).parameters.items() if n not in FREE}
    if name in WITHOUT_FOREACH:
        defaults["foreach"] = False
    options: Kwargs = vars(optimizer)
    for group in optimizer.param_groups:
        options = {**options, **group}
    others = {n: options[n] for n in sorted(defaults.keys() & options.keys()) if options[n] != defaults[n]}
    return ", ".join(f"{n}={value!r}" for n, value in others.items() if isinstance(value, bool | int | str | None))


def _in_pieces(optimizer: Optimizer, shards: ShardState) -> str:
    """A parameter of the optimizer's that is held in several pieces; "" where there is none."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name in shards.storages:
        part, leaves = shards.place_of(name)
        if len(leaves) > 1 and any(id(part._parameters.get(leaf)) in own for leaf in leaves):
            return name
    return ""
