"""Values for buffers that no state dict holds, of a model built on the meta device."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


def fresh_buffer(model: nn.Module, path: str, name: str) -> Tensor:
    """The value of a non-persistent meta buffer (rotary frequencies, position ids), by the model's own initialiser.

    That is what building with `torch.device("meta")` relies on everywhere: `_init_weights(module)` of the innermost
    transformers model around the buffer's module, or the module's `reset_parameters()`. It runs on a copy of the
    module without its parameters, whose buffers are filled with a mark first: a buffer that still holds the mark was
    not initialised.

    Args:
        model: the model on the meta device.
        path: of the buffer's module.
        name: of the buffer in that module.

    Returns:
        The buffer on the CPU; the meta tensor itself where nothing initialises it.
    """
    module = model.get_submodule(path)
    buffer = module._buffers[name]
    assert buffer is not None
    if name not in module._non_persistent_buffers_set or buffer.dtype == torch.bool:
        return buffer
    steps = path.split(".") if path else []
    around = [model.get_submodule(".".join(steps[:n])) for n in range(len(steps), -1, -1)]
    owner = next((m for m in around if hasattr(m, "_init_weights")), None)
    alone = copy.copy(module)
    alone._modules, alone._parameters = {}, dict.fromkeys(module._parameters)
    alone._buffers = dict.fromkeys(module._buffers)  # those that are not there, and masks, are not asked for
    alone._buffers |= {n: _marked(b) for n, b in module._buffers.items() if b is not None and b.dtype != torch.bool}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if owner is not None:
                owner._init_weights(alone)  # type: ignore[operator]
            else:
                alone.reset_parameters()  # type: ignore[operator]
    except Exception:  # a foreign initialiser that needs more than the module's buffers
        return buffer
    value = alone._buffers[name]
    assert value is not None
    return buffer if bool(_is_mark(value).any()) else value


def _marked(buffer: Tensor) -> Tensor:
    return torch.full_like(buffer, _mark(buffer), device="cpu")


def _mark(buffer: Tensor) -> float:
    return math.nan if buffer.is_floating_point() or buffer.is_complex() else torch.iinfo(buffer.dtype).min


def _is_mark(buffer: Tensor) -> Tensor:
    mark = _mark(buffer)
    return buffer.isnan() if math.isnan(mark) else buffer == mark
