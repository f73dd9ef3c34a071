"""What a capture is made for beside its inputs: the mode that the modules, gradients and autocast are in."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autotp.capture.grad_mode import GRAD, grad_mode

TRAINING, PARAMETERS = attrgetter("training"), attrgetter("_parameters")
DTYPE, REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
Mode = tuple[Any, ...]  # (training flags, parameter dtypes, grad mode, trained parameters, autocast dtype)


def mode_of(modules: Iterable[nn.Module], device: torch.device) -> Mode:
    """What a capture is made for: the modules' training flags, the parameters' dtypes, the grad mode and, with
    gradients, which parameters are trained, and the autocast dtype."""
    modules = list(modules)
    return mode_with(shortened(list(map(TRAINING, modules))), modules, parameters_of(modules), device)


def mode_with(
    training: Any, modules: Iterable[nn.Module], parameters: list[nn.Parameter], device: torch.device
) -> Mode:  # fmt: skip
    """Likewise, of modules whose training flags and parameters are known."""
    dtypes = set(map(DTYPE, parameters))  # mostly one, found fast
    kinds = shortened([*filter(None, map(_dtypes, modules))]) if len(dtypes) > 1 else tuple(dtypes)
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    grad = grad_mode()
    trained = shortened(list(map(REQUIRES_GRAD, parameters))) if grad == GRAD else ()
    return training, kinds, grad, trained, autocast


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Those that the modules themselves hold: asked for before every call, so by loops of the interpreter's own."""
    tables = map(dict.values, map(PARAMETERS, modules))
    return [p for p in chain.from_iterable(tables) if p is not None]


def _dtypes(module: nn.Module) -> tuple[torch.dtype, ...]:
    return tuple({p.dtype: None for p in module._parameters.values() if p is not None})


def serves(state: Mode, mode: Mode) -> bool:
    """Whether what was captured in a state is for this mode; a forward that never asks serves all grad modes."""
    grad_modes = all(a is None or a == b for a, b in zip(state[2:4], mode[2:4], strict=True))
    return state[:2] == mode[:2] and grad_modes and state[4] == mode[4]


def shortened(values: list[Any]) -> Any:
    """A short form of what is mostly the same everywhere."""
    return values[0] if values and values.count(values[0]) == len(values) else tuple(values)
