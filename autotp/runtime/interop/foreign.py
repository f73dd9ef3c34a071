"""What one rank has written for all: a pickled DTensor holds that rank's part, whichever rank reads it.

Its mesh comes with it, and in that the place of the rank that wrote it: so it can be told.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autotp.comm.ranks import Ranks, together
from autotp.errors import StateError

from .operators import in_parts
from .ours import ours

# Functions that ask every rank for a state, and write what the first one gives: module, name.
WRITERS = (("accelerate.checkpointing", "save_accelerator_state"),)
INSTEAD = (
    "Save it with sharded.save_checkpoint(folder, optimizer=optimizer), or with torch.distributed.checkpoint, and load "
    "it likewise; both are for any number of ranks."
)


def of_another_rank(value: Any) -> bool:
    """Whether a DTensor holds a part that is not this rank's: another one pickled it."""
    if not isinstance(value, DTensor) or not in_parts(value):
        return False
    mesh: Any = value.device_mesh
    return (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist() != list(mesh.get_coordinate() or ())


def refuse_states(optimizer: Optimizer, ranks: Ranks) -> None:
    """Refuse an optimizer that was loaded with the states of another rank. A collective call.

    Raises:
        StateError: that is so here, or a `RankError` where it is so on another rank.
    """

    def look() -> None:
        for state in optimizer.state.values():
            entries = state if isinstance(state, dict) else {}
            odd = [k for k, v in entries.items() if of_another_rank(v)]
            if odd:
                raise StateError(
                    f"the state {odd[0]} of this {type(optimizer).__name__} is another rank's part: it was loaded from "
                    f"what one rank had pickled. {INSTEAD}"
                )

    together(ranks, "looking at the optimizer's state", look)


def refuse_writers(optimizer: Optimizer) -> None:
    """A hook before `state_dict`: refuse those who would write one rank's part for all. Every rank is asked."""
    codes = {f.__code__: f"{module}.{name}" for module, name in WRITERS if (f := _function(module, name)) is not None}
    frame = inspect.currentframe() if codes and any(map(ours, _values(optimizer))) else None
    while frame is not None:
        if frame.f_code in codes:
            raise StateError(
                f"{codes[frame.f_code]} writes the optimizer's state of one rank, which holds its own part alone, and "
                f"gives that to every rank when it loads. {INSTEAD}"
            )
        frame = frame.f_back


def _values(optimizer: Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() if isinstance(s, dict) for v in s.values() if isinstance(v, Tensor)]


def _function(module: str, name: str) -> Callable[..., Any] | None:
    return inspect.unwrap(getattr(sys.modules[module], name)) if module in sys.modules else None
