"""Methods that `generate()` of transformers calls on a model, for sharded modules and for those without weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autotp import compat
from autotp.comm.ranks import Ranks, broadcast
from autotp.ir.graph import Function

LEFT_ON_MODELS = ("_previous_max_cache_length",)  # attributes that transformers' `generate` leaves for its next call
_drawing: list[str] = []  # groups whose ranks draw from rank 0's random numbers now


def while_generating(original: type[nn.Module]) -> dict[str, Function]:
    """Return the methods of parts that replace those which their class's `generate` calls; none where it has none."""
    if not callable(getattr(original, "generate", None)):
        return {}
    extract: Any = getattr(original, "_extract_generation_mode_kwargs", None)

    def options_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Note arguments of `generate` itself, such as a tokenizer: its loop passes them to the forward too."""
        options = extract(self, *args, **kwargs)
        generation = _whole(self)._generation
        if generation is not None:
            generation.update(set(options) - set(inspect.signature(self.forward).parameters))
        return options

    def goes_on(self: Any, this_peer_finished: Any, synced_gpus: bool, device: torch.device) -> bool:
        """Go on with `synced_gpus` as long as a rank of any axis does: by a turn, which ranks can leave."""
        unfinished = not bool(this_peer_finished)
        return _whole(self)._calls.any(unfinished, "next token of generate()") if synced_gpus else unfinished

    methods = {**UNCOMPILED, "_has_unfinished_sequences": goes_on}
    return methods if extract is None else methods | {"_extract_generation_mode_kwargs": options_of}


# What runs is compiled by autotp or not at all.
UNCOMPILED: dict[str, Function] = {
    "get_compiled_call": lambda self, compile_config=None: self.__call__,
    "_valid_auto_compile_criteria": lambda self, *args, **kwargs: False,
}


def _whole(part: Any) -> Any:
    return part._watched.changes.whole


def calling(bare: nn.Module, call: Function) -> Any:
    """Copy a skeleton, which keeps its tensors, with modules whose forward is a function of (path, args, kwargs)."""
    copies: dict[int, Any] = {}
    for path, module in bare.named_modules():
        copies[id(module)] = new = object.__new__(type(module))
        new.__dict__.update(module.__dict__, forward=_by_path(type(module), call, path))
    for module in bare.modules():
        children = {name: child and copies[id(child)] for name, child in module._modules.items()}
        copies[id(module)].__dict__["_modules"] = children
    root = copies[id(bare)]
    root.__dict__.update({name: functools.partial(method, root) for name, method in UNCOMPILED.items()})
    return root


def _by_path(kind: type[nn.Module], call: Function, path: str) -> Function:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(path, args, kwargs)

    signature = inspect.signature(kind.forward)
    forward.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return forward


@contextlib.contextmanager
def one_generator(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Let every rank draw from rank 0's random numbers; those of the others go on as they were.

    Numbers drawn in an inner context, such as that of a drafting assistant, count in the outer one.
    """
    cp = ranks.along("cp")
    if ranks.tp == cp.tp == 1 or ranks.group_name in _drawing:
        yield
        return
    before = compat.random_states(device)
    common: Any = broadcast(cp, broadcast(ranks, before))  # the tp groups of a slice of the batch compute the same
    _drawing.append(ranks.group_name)
    try:
        compat.draw_from(common, device)
        yield
    finally:
        _drawing.remove(ranks.group_name)
        if (ranks.rank or cp.rank) and not _drawing:
            compat.draw_from(before, device)
