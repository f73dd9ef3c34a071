"""An optimizer's state under the original parameters' names, so that it fits any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autotp.errors import StateError
from autotp.inputs import Leaves
from autotp.runtime import state
from autotp.runtime.storage import Box, ShardState
from autotp.text import indented, message_of

from .archives import Archive, Tensors

PREFIX = "optimizer.state."


def updated_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, group after group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def collect(shards: ShardState, optimizer: Optimizer) -> tuple[Tensors, Any]:
    """Return the states and options of an optimizer.

    Returns: stored name -> (the whole's shape, this rank's boxes), for what has a value for each element of its
        parameter; and the rest, numbers and options, as data for JSON.
    """
    tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    elements: dict[str, list[str]] = {}
    for name, storage, parameters in state.parameters_of(shards):
        states = [optimizer.state.get(p, {}) for p in parameters]
        if not any(states):
            continue
        numbers[name], elements[name] = {}, []
        for key in states[0]:
            values = [s[key] for s in states]
            if all(map(_by_element, parameters, values)):
                tensors[f"{PREFIX}{name}.{key}"] = storage.shape, storage.boxes(values)
                elements[name].append(key)
            else:
                numbers[name][key] = _number(f"{key} of {name}", values)
    return tensors, {"groups": _groups(shards, optimizer), "numbers": numbers, "elements": elements}


def joined(notes: Sequence[Any]) -> Any:
    """Join the notes of ranks' optimizers, each over the parameters of its stage, to those of one; None without any.

    Raises:
        StateError: some have none, or other groups.
    """
    if all(one is None for one in notes):
        return None
    if None in notes or len({len(one["groups"]) for one in notes}) > 1:
        raise StateError(
            "the stages' optimizers have other groups on some ranks. Give each rank's parameters the same."
        )
    # The n-th group of each stage is a part of the n-th of the whole: their options must be one, for one is written.
    groups = []
    for nth in zip(*(one["groups"] for one in notes), strict=True):
        options = [group | {"params": []} for group in nth]
        if any(other != options[0] for other in options):
            raise StateError(f"the stages' optimizers have other options on some ranks: {options[0]} on the first.")
        groups.append({**options[0], "params": list(dict.fromkeys(name for group in nth for name in group["params"]))})
    # Stages have parameters of their own, and a tied one has the same states on each: whichever comes last is right.
    whole: dict[str, Any] = {"groups": groups}
    for key in ("numbers", "elements"):
        whole[key] = {name: value for one in notes for name, value in one[key].items()}
    return whole


def _by_element(parameter: Tensor, value: Any) -> bool:
    """Return whether a state has one value for each element of its parameter, rather than one number."""
    alike = isinstance(value, DTensor) == isinstance(parameter, DTensor)
    return isinstance(value, Tensor) and alike and value.shape == parameter.shape


def _number(what: str, values: Leaves) -> Any:
    """Return one number that all pieces of a parameter agree on, as data for JSON."""
    plain: list[Any] = []
    for v in values:
        one = isinstance(v, Tensor) and v.numel() == 1
        plain.append({"value": v.item(), "dtype": str(v.dtype)[6:]} if one else v)
    if any(not isinstance(v, int | float | str | dict | None) or v != plain[0] for v in plain):
        kinds = [f"{type(v).__name__} {list(getattr(v, 'shape', ()))}" for v in values]
        raise StateError(
            f"the optimizer's state {what} is {kinds}: states are saved that are of their parameter's shape, or one "
            "plain number."
        )
    return plain[0]


def _names(shards: ShardState, optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the original's name of every tensor that the optimizer updates."""
    names = {p: name for name, _, parameters in state.parameters_of(shards) for p in parameters}
    strange = [p for p in updated_by(optimizer) if p not in names]
    if strange:
        raise StateError(
            f"the optimizer updates {len(strange)} tensors that are not this module's parameters, the first of shape "
            f"{tuple(strange[0].shape)}. Make it from sharded.parameters(), after the weights are loaded where the "
            "model was built on the meta device."
        )
    return names


def _groups(shards: ShardState, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups' options and the original names in each, as data for JSON."""
    names = _names(shards, optimizer)
    out = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k != "params"}
        options |= {k: v.item() for k, v in options.items() if isinstance(v, Tensor)}
        wrong = [k for k, v in options.items() if not isinstance(v, int | float | str | list | tuple | None)]
        if wrong:
            raise StateError(
                f"the optimizer's option {wrong[0]} is a {type(options[wrong[0]]).__name__}, no number or text."
            )
        out.append({**options, "params": list(dict.fromkeys(names[p] for p in group["params"]))})
    return out


def load(shards: ShardState, optimizer: Optimizer, archive: Archive, saved: Any) -> None:
    """Read this rank's part of an optimizer's states, and give all to the optimizer.

    Args:
        shards: of the module whose parameters it steps. optimizer: takes the states.
        archive: holds the elements. saved: as `matching` gave it.

    Raises:
        StateError: one cannot be read.
    """
    boxes, give = begin(shards, optimizer, saved)
    archive.fill(boxes)
    give()


def begin(shards: ShardState, optimizer: Optimizer, saved: Any) -> tuple[dict[str, list[Box]], Callable[[], None]]:
    """Make memory for this rank's part of an optimizer's states.

    Args:
        shards, optimizer, saved: see `load`.

    Returns: stored name -> the boxes to fill, and what gives all to the optimizer once they are.
    """
    boxes = {}
    filled: dict[Tensor, dict[str, Any]] = {}
    for name, storage, parameters in state.parameters_of(shards):
        if name not in saved["numbers"]:
            continue
        # A fused weight may be held in several pieces here and in one there: numbers, such as steps, are of all.
        for p in parameters:
            filled[p] = {k: _value(v) for k, v in saved["numbers"][name].items()}
        # Read into memory beside what the optimizer has: where a file is damaged it keeps its state.
        for key in saved["elements"].get(name, ()):
            new = [torch.zeros_like(p, requires_grad=False) for p in parameters]
            boxes[f"{PREFIX}{name}.{key}"] = storage.boxes(new)
            for p, t in zip(parameters, new, strict=True):
                filled[p][key] = t
    # torch's state dict names parameters by their place in the optimizer's own order, which is not that of the file.
    places = {p: i for i, p in enumerate(updated_by(optimizer))}
    groups = []
    for group, other in zip(optimizer.param_groups, saved["groups"], strict=True):
        options = {k: _like(group.get(k), v) for k, v in other.items() if k != "params"}
        groups.append({**options, "params": [places[p] for p in group["params"]]})
    states = {i: filled[p] for p, i in places.items() if p in filled}
    return boxes, lambda: optimizer.load_state_dict({"state": states, "param_groups": groups})


def matching(shards: ShardState, optimizer: Optimizer, archive: Archive) -> Any:
    """Return an archive's notes of this optimizer; none of its states is read yet.

    Args:
        shards: of the module whose parameters it steps. optimizer: that takes the states. archive: the checkpoint.

    Raises:
        StateError: there is none, its groups are others, or a state has another shape or type than its parameter.
    """
    saved = archive.extra.get("optimizer")
    if saved is None:
        raise StateError(f"{archive.path} holds no optimizer that save(..., optimizer=...) wrote. Load without one.")
    # States are made like their parameters: on the meta device they would have no memory, and loading the weights after
    # makes new parameters, which the optimizer does not have.
    if any(p.is_meta for p in shards.root.parameters()):
        raise StateError(
            "the model is on the meta device, and its weights get new memory when they are loaded: load them, make the "
            "optimizer, then load both."
        )
    try:
        faults = _faults(shards, optimizer, archive, saved)
    except (AttributeError, KeyError, TypeError) as error:
        raise StateError(
            f"what {archive.path} says of its optimizer was changed or damaged: {message_of(error)}. Load "
            "without optimizer=, or save again."
        ) from error
    if faults:
        raise StateError(f"{archive.path} does not fit the optimizer:\n{indented(faults)}")
    return saved


def _faults(shards: ShardState, optimizer: Optimizer, archive: Archive, saved: Any) -> list[str]:
    """Return all that does not fit: a user who has saved with other code wants the list."""
    # Groups are compared by names: their options are given back by position, and a parameter in another group would
    # train with another learning rate. A stage of a pipeline steps its own parameters alone of those of all stages.
    names = [set(g["params"]) for g in _groups(shards, optimizer)]
    if names != [set(g["params"]) - shards.elsewhere for g in saved["groups"]]:
        counts = [len(g["params"]) for g in saved["groups"]]
        return [
            f"the optimizer's groups hold other parameters than this one's: {counts} of them there, "
            f"{list(map(len, names))} here. Make it with the same groups."
        ]
    faults = []
    for name, storage, (parameter, *_) in state.parameters_of(shards):
        # A parameter without a gradient so far has no states, as has one that is frozen.
        for key in saved["elements"].get(name, ()) if name in saved["numbers"] else ():
            stored = f"{PREFIX}{name}.{key}"
            entry = archive.entries.get(stored)
            if entry is None:
                faults.append(f"missing: {stored}")
            elif (entry.shape, entry.dtype) != (storage.shape, parameter.dtype) and math.prod(storage.shape):
                faults.append(
                    f"{stored} is {entry.dtype} {list(entry.shape)}, its parameter {parameter.dtype} "
                    f"{list(storage.shape)}"
                )
        for number in saved["numbers"].get(name, {}).values():
            _value(number)  # fails here rather than after the weights are loaded
    return faults


def _value(saved: Any) -> Any:
    return torch.tensor(saved["value"], dtype=getattr(torch, saved["dtype"])) if isinstance(saved, dict) else saved


def _like(present: Any, saved: Any) -> Any:
    """Return an option as it was before JSON."""
    if isinstance(present, Tensor):
        return torch.full_like(present, saved)
    return tuple(saved) if isinstance(present, tuple) else saved
