"""What torch lacks for a sharded module's tensors: `numpy()` and `tolist()`, which loggers and plotters call, and
`share_memory_()`, which would end the process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp import compat
from autotp.errors import StateError

from .operators import in_parts
from .ours import ours


@functools.cache
def install() -> None:
    """Give what is whole on every rank, and refuse what is in parts, in this process."""
    for name in ("numpy", "tolist"):
        setattr(DTensor, name, _reading(name, getattr(Tensor, name)))
    DTensor.share_memory_ = _shared(Tensor.share_memory_)  # type: ignore[method-assign]


def _shared(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def of(tensor: Any) -> Any:
        if not ours(tensor):
            return share(tensor)
        share(compat.local_of(tensor))
        return tensor

    return of


def _reading(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours(tensor):
            return function(tensor, *args, **kwargs)
        if in_parts(tensor):
            raise StateError(
                f"{name}() of a tensor that lies over the ranks as {tensor.placements}: each holds its own part. Call "
                ".full_tensor() first, on every rank; for all parameters sharded.full_state_dict(), for gradients "
                "sharded.full_grad_dict(). Then log on one rank."
            )
        return function(compat.local_of(tensor), *args, **kwargs)

    return of
