"""Values for tensors that have none: weights, buffers and inputs on the meta device, so that a model can be run.

They are small random numbers, the same in every process; what they are does not matter to a comparison, but they keep a
deep network's numbers finite.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

PATTERN = 65521  # a prime: larger tensors repeat so many numbers, and no two rows of one are alike


def made_real(tensor: Tensor, device: torch.device, name: str = "") -> Tensor:
    """A tensor of the same shape, strides and type that has values; a parameter where this is one.

    Weights are scaled to keep the size of what passes through them; buffers and vectors are positive, whole numbers
    zero, truth values a lower triangle, which masks some positions and not all.

    Args:
        tensor: on the meta device.
        device: where the values are to be.
        name: of a parameter or buffer; those of other names get other numbers.
    """
    weight = isinstance(tensor, nn.Parameter)
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    with torch.no_grad():
        real.copy_(_values(tensor, name, weight))
    return nn.Parameter(real, tensor.requires_grad) if weight else real.requires_grad_(tensor.requires_grad)


def _values(tensor: Tensor, name: str, weight: bool) -> Tensor:
    shape = tensor.shape
    if tensor.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool).tril() if len(shape) > 1 else torch.ones(shape, dtype=torch.bool)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros(shape, dtype=tensor.dtype)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {tuple(shape)}".encode()))
    count, draw_count = tensor.numel(), min(tensor.numel(), PATTERN)
    if weight and len(shape) > 1:
        numbers = torch.randn(draw_count, generator=draw) / math.sqrt(max(shape[1:]))
    else:
        numbers = 0.5 + torch.rand(draw_count, generator=draw)
    numbers = numbers.to(tensor.dtype)
    repeats = -(-count // PATTERN)
    return (numbers.repeat(repeats)[:count] if repeats > 1 else numbers).reshape(shape)
