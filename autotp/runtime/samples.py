"""A few values of a call's inputs, by which ranks notice that they were given different ones.

Of inputs on the CPU, which a loader makes: reading others would wait for the device. Whole numbers are compared
exactly, in 64 KiB of each tensor; floating ones, which may have been computed with other rounding on each rank, nearly.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 16  # floating values of all inputs together
RELATIVE_TOLERANCE = 1e-2  # of the largest sample
SAMPLE_BYTES = 2**16
SHORT_ELEMENTS = 64  # elements that are cheaper to read one by one, as the token of a step is
Sample = tuple[int, Sequence[float]]
NOTHING: Sample = (0, [0.0] * SAMPLES)


def sampled(flat: Sequence[Any], anywhere: bool = False) -> Sample:
    """A sum over the inputs' whole numbers, and `SAMPLES` of their floating ones; on any device only where asked."""
    tensors = [v for v in flat if type(v) in (Tensor, nn.Parameter) and v.numel() and not v.is_complex()]
    tensors = [v for v in tensors if v.is_cpu or (anywhere and not v.is_meta)]
    exact, floating, short, near = 0, [], [], []
    try:
        for v in tensors:
            if v.is_floating_point():
                floating.append(v)
            elif v.numel() <= SHORT_ELEMENTS:
                short.append(v.tolist())
            else:
                exact = _summed(v, exact)
        exact = zlib.crc32(repr(short).encode(), exact)
        for v in floating[:SAMPLES]:
            near += _spread(v.detach(), SAMPLES // min(len(floating), SAMPLES))
    except RuntimeError:  # under a transform, such as vmap, values cannot be read
        return NOTHING
    return exact, near + [0.0] * (SAMPLES - len(near))


def few(value: Tensor) -> str:
    """A sum over a few values of a tensor, to the bit; empty on the meta device, and of tensors that wrap others.

    Of all tensors of a model it is cheap, and of two that were drawn, trained or read differently it is another.
    """
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.is_meta or not value.numel():
        return ""
    line = _line(value.detach(), SAMPLE_BYTES)
    sample = line[:: max(1, line.numel() // SAMPLES)][:SAMPLES].cpu().contiguous()
    return f"{zlib.crc32(sample.view(torch.uint8).numpy().data):08x}"


def _line(x: Tensor, most: int) -> Tensor:
    """The elements in a line; of a large tensor that lies in pieces those of one part, of a sparse one all."""
    x = x if x.layout == torch.strided else x.to_dense()
    while x.ndim > 1 and x.numel() > most and not x.is_contiguous():
        x = x[x.shape[0] // 2]
    return x.reshape(-1)


def _summed(x: Tensor, start: int) -> int:
    most = SAMPLE_BYTES // x.element_size()
    line = _line(x, most)
    for part in (line,) if line.numel() <= most else (line[: most // 2], line[-(most // 2) :]):
        start = zlib.crc32(part.contiguous().view(torch.uint8).cpu().numpy().data, start)
    return start


def _spread(x: Tensor, count: int) -> list[float]:
    """So many elements of a tensor, evenly spread; zeros where it has fewer."""
    line = _line(x, SAMPLE_BYTES)
    elements = line[:: max(1, line.numel() // count)][:count].tolist()
    return elements + [0.0] * (count - len(elements))


def leading(near: Sequence[float]) -> str:
    """The first of the floating values as text."""
    return ", ".join(f"{x:g}" for x in near[:4])


def alike(samples: Sequence[Sample]) -> bool:
    """Return whether these may be samples of the same inputs."""
    return all(exact == samples[0][0] and _near(samples[0][1], near) for exact, near in samples)


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    scale = max((abs(x) for x in (*a, *b) if math.isfinite(x)), default=0.0)
    return all(
        x == y or (x != x and y != y) or abs(x - y) <= RELATIVE_TOLERANCE * scale for x, y in zip(a, b, strict=True)
    )
