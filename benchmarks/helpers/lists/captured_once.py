"""Graphs captured once for several shardings of one model: those in this process, and in what is forked from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from autotp import compat
from autotp.driver import compile as pipeline
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.runtime import program_search as runtime


@contextmanager
def captured_once() -> Iterator[None]:
    """Within this context all models that are sharded are the same one, and each kind of call of it is captured once.

    An error of capture is raised again where the same call is captured again.
    """
    known: dict[Any, Capture | Exception] = {}
    prepare, entering, entered = pipeline.prepare, runtime.entering, [""]

    @contextmanager
    def entry(bare: nn.Module, path: str) -> Iterator[None]:
        entered.append(path)
        try:
            with entering(bare, path):
                yield
        finally:
            entered.pop()

    def once(
        bare: nn.Module, inputs: Inputs, device: Any, mode: Any, trial: Any = None, request: Any = None
    ) -> Capture:
        request = pipeline.DEFAULT_CAPTURE if request is None else request
        key = (entered[-1], _like(inputs), mode, repr(request))
        if key not in known:
            known[key] = _tried(lambda: prepare(bare, inputs, device, mode, trial, request))
        found = known[key]
        if isinstance(found, Exception):
            raise found
        leaves = [replace(leaf) for leaf in found.leaves]  # each sharding orders its own
        return replace(found, leaves=leaves, notes=list(found.notes), symbols=dict(found.symbols))

    with (
        patch.object(pipeline, "prepare", once),
        patch.object(runtime, "entering", entry),
    ):
        yield


def _tried(make: Callable[[], Capture]) -> Capture | Exception:
    try:
        return make()
    except Exception as error:
        return error


def _like(inputs: Inputs) -> Any:
    """What a call is like: its structure, and of tensors all but the numbers."""
    leaves, spec = compat.tree_flatten((inputs.args, inputs.kwargs))
    said = [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), repr(x)) for x in leaves]
    return spec, tuple(said)
