"""The changes of torch that last for the whole process: the five rows of `LASTING`, and no others.

Each is made once, by the function that stands beside its row, when the first sharded module is made over several ranks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

LASTING = {  # of torch -> the function that changes it, and why
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers": "operator_handlers: DTensor draws random "
    "numbers part by part, gives a number of a part for the whole's, and has no rule for lists of an optimizer's",
    "torch.distributed.tensor.DTensor.data": "replace_data: assignments leave the local tensor as it is, and writes "
    "are counted in no version",
    "torch.distributed.tensor._redistribute.redistribute_local_tensor": "around_redistribution: a collective that one "
    "rank alone begins, as full_tensor() under `if rank == 0`, hangs",
    "torch.autograd.graph._engine_run_backward": "around_backward: torch calls nobody where a backward fails, of "
    "which the other ranks must hear",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "around_steps: a step that is another on one rank, or takes "
    "parts for wholes, makes wrong weights in silence",
}


def operator_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the table of handlers that compute an operator on DTensors, called with (operator, args, kwargs)."""
    return DTensor._op_dispatcher._custom_op_handlers


def by_default(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operator on DTensors as torch does, from within its handler."""
    handlers = operator_handlers()
    handler = handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler


def replace_data(make: Callable[[Any], property]) -> None:
    """Replace the property `.data` of DTensors by `make` of torch's own."""
    DTensor.data = make(Tensor.data)  # type: ignore[assignment]


@functools.cache
def around_steps(before: Callable[..., Any], after: Callable[..., None]) -> None:
    """Call a function before every step of every optimizer, whose arguments it may replace, and another after it."""
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def around_redistribution(around: Callable[..., Any]) -> None:
    """Let DTensor turn a rank's part into another by `around(run, local, source spec, target spec)`, where
    `run()` does as torch does."""
    name, plain = "redistribute_local_tensor", sys.modules["torch.distributed.tensor._redistribute"]
    torchs = getattr(plain, name)

    @functools.wraps(torchs)
    def redistribute(local: Any, source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            # Gloo knows no floats of one byte; what is moved and not summed may go as integers.
            summed = any(p.is_partial() for p in (*source.placements, *target.placements))
            if local.is_floating_point() and local.dtype.itemsize == 1 and local.device.type == "cpu" and not summed:
                return torchs(local.view(torch.uint8), source, target, *args, **kwargs).view(local.dtype)
            return torchs(local, source, target, *args, **kwargs)

        return around(run, local, source, target)

    for module in [m for n, m in sys.modules.items() if n.startswith("torch.distributed.tensor.")]:
        if getattr(module, name, None) is torchs:
            setattr(module, name, redistribute)


def around_backward(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run every backward within such a context, which may replace the error that it raises."""
    torchs: Any = torch.autograd.graph._engine_run_backward

    @functools.wraps(torchs)
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return torchs(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        vars(module)["_engine_run_backward"] = run
