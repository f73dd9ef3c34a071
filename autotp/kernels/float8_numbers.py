"""Numbers of float8 with their scales: scaled, cast, multiplied and scaled back."""

from __future__ import annotations

import torch
from torch import Tensor

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # a smaller largest value counts as this one, as torchao's EPS
_scaled_mm = torch.ops.aten._scaled_mm.default
ALIGNED = 16  # elements, of every dimension that a kernel for CUDA multiplies along


def scale_of(amax: Tensor, dtype: torch.dtype, power: bool = False) -> Tensor:
    """What numbers are multiplied by before the cast, in float32: the largest becomes the largest of the dtype.

    Args:
        amax: largest absolute values, of any shape. dtype: of float8.
        power: round down to a power of two.
    """
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=LEAST)).float()
    scale = torch.where(amax > 0, scale, 1)  # of zeros, or where nothing is known of an operand yet
    return torch.exp2(torch.log2(scale).floor()) if power else scale


def raised(amax: Tensor) -> Tensor:
    """Largest values raised until their scales are powers of two, of INPUT and of GRADIENT alike; 0 stays."""
    return torch.where(amax > 0, torch.finfo(INPUT).max / scale_of(amax, INPUT, power=True), amax)


def cast(x: Tensor, amax: Tensor, dtype: torch.dtype, power: bool = False) -> Tensor:
    """Numbers scaled, clamped and rounded to float8; arguments as of `scale_of`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = torch.finfo(dtype).max
    return (x.to(wide) * scale_of(amax, dtype, power).to(wide)).clamp(-largest, largest).to(dtype)


def scaled(a: Tensor, a_amax: Tensor, b: Tensor, b_amax: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b.T` of [m, k] and [n, k] in float8, with a scale for each row, [m, 1] and [n, 1], a power of two."""
    first, second = cast(a, a_amax, INPUT, power=True), cast(b, b_amax, INPUT, power=True)
    return product(first, second, inverse(a_amax, INPUT, True), inverse(b_amax, INPUT, True).t(), dtype)


def inverse(amax: Tensor, dtype: torch.dtype, power: bool = False) -> Tensor:
    """What a product of such numbers is multiplied by; arguments as of `scale_of`."""
    return scale_of(amax, dtype, power).reciprocal()


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b.T` of float8 matrices, scaled back.

    Args:
        a, b: [m, k] and [n, k]. a_scale, b_scale: what the product is multiplied by, [], or [m, 1] and [1, n].
        dtype: of the result; in float64 it is a proof's, and computed so.
    """
    if dtype == torch.float64:
        return (a.double() @ b.double().t()) * (a_scale.double() * b_scale.double())
    m, n = a.shape[0], b.shape[0]
    if not m * n * a.shape[1]:
        return a.new_zeros((m, n), dtype=dtype)
    if a.is_cuda:
        a, b, b_scale = _aligned(a, b, b_scale)
    if b_scale.ndim:
        a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
        if a.is_cuda and dtype != torch.bfloat16:  # all that kernel gives
            return _scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16)[:m, :n].to(dtype)
    return _scaled_mm(a.contiguous(), b.contiguous().t(), a_scale, b_scale, out_dtype=dtype)[:m, :n]


def _aligned(a: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros after the last columns of both and the last rows of `b`, as CUDA's kernels want whole sixteens."""
    more_k, more_n = -a.shape[1] % ALIGNED, -b.shape[0] % ALIGNED
    if more_k or more_n:
        pad = torch.nn.functional.pad
        a = pad(a.view(torch.uint8), (0, more_k)).view(a.dtype)
        b = pad(b.view(torch.uint8), (0, more_k, 0, more_n)).view(b.dtype)
        b_scale = pad(b_scale, (0, more_n), value=1.0) if b_scale.ndim else b_scale
    return a.contiguous(), b.contiguous(), b_scale
