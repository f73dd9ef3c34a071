"""Forwards that take objects which hold their state between calls, and return them changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.inputs import Inputs, mapped
from autotp.ir.carried import Carried, Returned, Same, carried_in, describe, rebuilt, replaced
from autotp.log import log

from .copies import tensors_of

StateSizes = Mapping[tuple[str, int], int | None]  # (name of a state, dimension) -> its size; None where it varies

KEY = re.compile(r"\['(\w+)'\]")  # the place of an output under a name


@contextmanager
def forwarding(bare: nn.Module, function: Callable[..., Any], signature: inspect.Signature) -> Iterator[None]:
    """Context in which a skeleton is called through another function.

    Args:
        bare: the skeleton. function: called in place of its forward. signature: that the exporter sees.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    with mock.patch.object(bare, "forward", forward):  # which puts back a forward that it has of its own
        yield


def carries(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call takes such objects, or asks for one."""
    return kwargs.get("use_cache") is True or bool(carried_in(args, kwargs))


NONE: StateSizes = MappingProxyType({})
_NUMBERS: ContextVar[StateSizes] = ContextVar("numbers", default=NONE)


@contextmanager
def sizes_of_states(numbers: StateSizes) -> Iterator[None]:
    """Context in which a trace takes these sizes of states for numbers: a forward may never ask for them.

    Args:
        numbers: (name of a state, dimension) -> its size; None where it varies.
    """
    token = _NUMBERS.set(numbers)
    try:
        yield
    finally:
        _NUMBERS.reset(token)


def is_number(name: str, dim: int, size: int) -> bool:
    """Say whether this size of a state is one of those."""
    return _NUMBERS.get().get((name, dim)) == size


@contextmanager
def carrying(bare: nn.Module) -> Iterator[None]:
    """Context in which the module takes and returns such objects as their tensors."""
    original = bare.forward

    def forward(*args: Any, **kwargs: Any) -> Returned:
        states = carried_in(args, kwargs)
        objects = [rebuilt(x) for x in states]
        object_of = {id(x): obj for x, obj in zip(states, objects, strict=True)}
        keywords = {k: object_of.get(id(x), x) for k, x in kwargs.items()}
        outputs = original(*(object_of.get(id(x), x) for x in args), **keywords)
        numbers = {id(obj): i for i, obj in enumerate(objects)}

        def described(obj: Any, name: str) -> Any:
            if id(obj) in numbers:
                return Same(numbers[id(obj)])
            # An object that the forward made itself is passed in the next call, there by the name of an argument.
            key = KEY.fullmatch(name)
            return describe(obj, key.group(1) if key else name)

        after = [describe(obj, x.shape.name, (), x.tensors) for x, obj in zip(states, objects, strict=True)]
        return Returned(replaced(outputs, described), after)

    with forwarding(bare, forward, inspect.signature(original)):
        yield


def on_fakes(bare: nn.Module, inputs: Inputs, device: torch.device) -> Sequence[Carried] | None:
    """Find the states of the objects among a call's arguments after it, by the call on fake tensors; None if it fails.

    Args:
        bare: the skeleton. inputs: of the call. device: that the skeleton's tensors are on.
    """
    mode = compat.mode_of([*tensors_of(bare).values()])
    if not isinstance(mode, compat.FakeTensorMode):
        return None

    def fake(tensor: Tensor) -> Tensor:
        return compat.fake(mode, tensor.detach(), tensor.dtype, device)

    fakes = mapped(inputs, fake)
    try:
        with restored(bare), carrying(bare), mode, torch.no_grad():
            return bare(*fakes.args, **fakes.kwargs).after
    except Exception as error:  # whatever a user's forward may raise, such as a branch on values
        log.debug("a call on fake tensors: %s", error)
        return None


@contextmanager
def restored(bare: nn.Module) -> Iterator[None]:
    """Context after which attributes of modules are as before a trace: the next attempt is to meet the model as it is.

    Torch puts back those that an object has itself, and not those that its class had for it.
    """
    before = [(module, dict(vars(module))) for module in bare.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


@contextmanager
def entering(bare: nn.Module, path: str) -> Iterator[None]:
    """Context in which the module's forward is that of its module at this path."""
    if not path:
        yield
        return
    part = bare.get_submodule(path)
    with forwarding(bare, part, inspect.signature(part.forward)):
        yield
