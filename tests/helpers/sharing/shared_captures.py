"""Captures shared by tests: exporting a tiny model takes longer than all that most tests do with its graph.

Nothing is named by a test: a capture is given again where everything that it is made from is equal. That is the tree
of modules (classes and their forwards, flags, plain attributes, config, shapes and dtypes of weights, which of them
are graded or tied, hooks: then there is no sharing), the inputs but for their values, the mode, what was requested,
and what a test patched in the files that capture, or in what float32 means. A capture with conditions, or with notes
of what helped the exporter, depends on more than these, and is not kept. The tests of capture itself (tests/capture)
take none. Processes share by way of files (`capture_files.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autotp.driver import compile as pipeline
from autotp.driver import schedule
from autotp.ir.graph import Capture

from .capture_files import once
from .patches import Patches, Same
from .shared_solutions import shared_solutions

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, Enum, slice)
CODE = (type, FunctionType, BuiltinFunctionType)
HELD = {"_parameters", "_buffers", "_modules"}
# Of a config: where it was read, who wrote it, and a hash that every process salts anew.
LABELS = {"_name_or_path", "architectures", "transformers_version", "_original_object_hash"}
MARKS = {"_is_hf_initialized", "name_or_path"}  # of a module, by who loaded it
MAKERS = ("autotp.capture.", "autotp.passes.canonicalise.", "autotp.passes.decompose.", "autotp.passes.shard.batch")
MAKERS += ("autotp.passes.shard.deal", "autotp.passes.shard.sequence", pipeline.__name__, schedule.__name__)
PATCHES = Patches(MAKERS)
KEPT: dict[Any, Capture] = {}
_on = False


class _Unlike(Exception):
    """Something whose equality cannot be told."""


def _patched() -> frozenset[Any]:
    """What the files that capture hold now and did not when this one was read; `prepare` is this file's own."""
    return frozenset((m, k, Same(v)) for m, k, v in PATCHES.now() if k != "prepare")


@contextmanager
def shared_captures(on: bool = True) -> Iterator[None]:
    """Within this context equal captures are made once in this process, and equal programs solved once."""
    global _on
    if not on:
        yield
        return
    sharing = _sharing(pipeline.prepare)
    with patch.object(pipeline, "prepare", sharing), shared_solutions():
        _on = True
        try:
            yield
        finally:
            _on = False


def sharing_captures() -> bool:
    """Whether this process is within the context: the pool's workers then are too."""
    return _on


def _sharing(prepare: Callable[..., Capture]) -> Callable[..., Capture]:
    def shared(bare: nn.Module, inputs: Any, device: Any, mode: Any, trial: Any = None, request: Any = None) -> Capture:
        request = pipeline.DEFAULT_CAPTURE if request is None else request
        try:
            given = told((inputs.args, inputs.kwargs))
            key = model_key(bare), given, device, mode, request, _patched(), (torch.float32, torch.get_default_dtype())
        except _Unlike:
            return prepare(bare, inputs, device, mode, trial, request)
        compared = trial is not None and not trial.skip  # before it runs: that may say why nothing could be
        helped: list[str] = []  # the exporter, by what these say; passes that were requested note what they do

        def make() -> Capture:
            with _noting(helped):
                return prepare(bare, inputs, device, mode, trial, request)

        def enough(found: Capture) -> bool:
            return not (compared and math.isnan(found.error))

        def alone(made: Capture) -> bool:
            return bool(helped) or made.conditions is not None or (trial is not None and bool(trial.remark))

        if key not in KEPT or not enough(KEPT[key]):
            made = once(key, make, enough, alone)
            if alone(made):
                return made
            KEPT[key] = made
        found = KEPT[key]
        error = found.error if compared else math.nan
        # Of its own: ranks that follow the first one's order change the leaves, and notes grow.
        leaves = [replace(leaf) for leaf in found.leaves]
        return replace(found, leaves=leaves, notes=[*found.notes], symbols=dict(found.symbols), error=error)

    return shared


@contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Within this context the notes of captures are added to these too, those of passes after them are not."""
    own = pipeline.capture

    def capture(*args: Any, **kwargs: Any) -> Capture:
        program = own(*args, **kwargs)
        notes.extend(program.notes)
        return program

    with patch.object(pipeline, "capture", capture):
        yield


def model_key(bare: nn.Module) -> Any:
    """What a capture of a model depends on, hashable: equal for models that differ in their numbers alone.

    Raises:
        _Unlike: the model holds what cannot be compared.
    """
    named = [*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    tensors = tuple((n, first.setdefault(id(t), n), type(t), *_tensor(t)) for n, t in named)
    return tensors, tuple((n, type(m), type(m).forward, _attributes(m)) for n, m in bare.named_modules())


def _attributes(module: nn.Module) -> Any:
    hooks = [k for k, v in vars(module).items() if k.endswith("hooks") and "state_dict" not in k and v]
    if hooks:
        raise _Unlike(hooks)
    return told({k: v for k, v in vars(module).items() if k not in HELD | MARKS and not k.endswith("hooks")})


def told(x: Any) -> Any:
    """A value as something that can be compared and hashed; of a tensor, what it is like and not its numbers."""
    if isinstance(x, CODE):
        if getattr(x, "__closure__", None):
            raise _Unlike(x)
        return x
    if isinstance(x, PLAIN):
        return type(x), repr(x)
    if isinstance(x, Tensor):
        return _tensor(x)
    if isinstance(x, partial):
        return told(x.func), told(x.args), told(x.keywords)
    if isinstance(x, Mapping):
        return type(x), tuple((told(k), told(v)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return type(x), tuple(map(told, x))
    if isinstance(x, set | frozenset):
        return type(x), frozenset(map(told, x))
    if hasattr(x, "to_dict"):  # a config of transformers
        return type(x), told({k: v for k, v in vars(x).items() if k not in LABELS})
    raise _Unlike(x)


def _tensor(t: Tensor) -> Any:
    return tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference(), t.is_meta
