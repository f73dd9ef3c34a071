"""A copy of an optimizer over other parameters, which shares nothing with it that a step could change."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PLAIN = (
    Tensor,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    Enum,
    type,
    BuiltinFunctionType,
    type(None),
)
AWKWARD = (nn.Module, Optimizer)  # too large to copy; steps on parameters of its own


def can_copy(optimizer: Optimizer) -> bool:
    """Whether all that an optimizer holds can be copied: plain values, and optimizers of the same parameters."""
    attributes = [v for k, v in vars(optimizer).items() if not _kept_out(optimizer, k)]
    return all(_can_copy_value(v, optimizer) for v in attributes)


def _can_copy_value(value: Any, optimizer: Optimizer) -> bool:
    if isinstance(value, Optimizer):
        return can_copy(value) and _of(value) == _of(optimizer)
    return _plain(value)


def copied(optimizer: Optimizer, groups: list[dict[str, Any]], memo: dict[int, Any]) -> Optimizer:
    """A copy of an optimizer, without state, and of those that it holds.

    Args:
        optimizer: one that `can_copy` allows.
        groups: the copy's own param_groups.
        memo: id of a parameter -> what the copy holds in its place.
    """
    clone = object.__new__(type(optimizer))
    rest = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    rest = {k: v for k, v in rest.items() if not _kept_out(optimizer, k)}
    memo = {**memo, **{id(v): copied(v, groups, memo) for v in rest.values() if isinstance(v, Optimizer)}}
    others = {id(p): nn.Parameter(torch.zeros(0)) for g in optimizer.param_groups for p in g["params"]}
    attributes = {k: copy.deepcopy(v, {**others, **memo}) for k, v in rest.items()}
    vars(clone).update({k: _once(v) for k, v in attributes.items()})
    clone.__setstate__({"state": defaultdict(dict), "param_groups": groups})
    return clone


def _once(value: Any) -> Any:
    """A list of parameters with each stand-in once, of parameters that are rehearsed; anything else as it is."""
    if not isinstance(value, list) or not value or not all(isinstance(v, nn.Parameter) for v in value):
        return value
    return list({id(v): v for v in value if v.numel()}.values())


def _kept_out(optimizer: Optimizer, key: str) -> bool:
    """What a copy has none of: hooks, a method that a schedule replaced to count steps, what a scaler left there."""
    hooks = key.startswith("_optimizer_") and key.endswith("hooks")
    replaced = callable(vars(optimizer)[key]) and hasattr(type(optimizer), key)
    return hooks or replaced or key in ("state", "grad_scale", "found_inf")


def _of(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _plain(value: Any) -> bool:
    """Whether something consists of numbers, text, tensors and functions of these, so that its copy shares nothing."""
    return all(isinstance(v, PLAIN) for v in _leaves(value, set()))


def _leaves(value: Any, visited: set[int]) -> Iterator[Any]:
    """What a value consists of, as far as that is known."""
    # An object may hold itself, through a list or another object.
    if id(value) in visited:
        return
    visited.add(id(value))
    inside: Any = ()
    # Keys as well as values: either may hold what no copy can have.
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        inside = value
    elif isinstance(value, FunctionType):  # which no copy copies: it may hold what cannot change alone
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        if not all(isinstance(v, int | float | str | FunctionType) for v in inside):
            yield value
    # A lock has no attributes to look at: it is given out as it is, and `_plain` does not know it.
    elif isinstance(value, PLAIN + AWKWARD) or not hasattr(value, "__dict__"):
        yield value
    else:
        inside = [*vars(value).values()]
    for v in inside:
        yield from _leaves(v, visited)
