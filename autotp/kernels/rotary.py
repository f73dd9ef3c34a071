"""Rotary position embedding (Su et al. 2021) of the heads that a rank has: pairs of each head's elements, rotated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import DTYPES, check_floats, differentiable, jit, power_of_two, refuse, register, tiles, tl, wide

TILE = 1024  # pairs that a program rotates
MOST_DIMS = 4


@jit
def _rotate(
    x, cos, sin, out, second, rows, half,
    x_0, x_1, x_2, x_3, cos_0, cos_1, cos_2, cos_3, sin_0, sin_1, sin_2, sin_3,
    INTERLEAVED: tl.constexpr, SHARED: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Of a [first, second, rows, 2 * half] value some rows of one [rows, 2 * half]; `out` is contiguous."""
    blocks = tl.cdiv(rows, ROWS)
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    a, b = outer // second, outer % second
    row = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (row < rows) & (pair < half)
    one = 2 * pair if INTERLEAVED else pair
    other = one + 1 if INTERLEAVED else pair + half
    angle = pair if SHARED else one  # both of a pair have one angle, or each its own
    angle_other = pair if SHARED else other
    x += a * x_0 + b * x_1 + row * x_2
    cos += a * cos_0 + b * cos_1 + row * cos_2
    sin += a * sin_0 + b * sin_1 + row * sin_2
    out += (outer * rows + row) * 2 * half
    x_one = tl.load(x + one * x_3, mask=inside, other=0).to(tl.float32)
    x_other = tl.load(x + other * x_3, mask=inside, other=0).to(tl.float32)
    cos_one = tl.load(cos + angle * cos_3, mask=inside, other=0).to(tl.float32)
    cos_other = tl.load(cos + angle_other * cos_3, mask=inside, other=0).to(tl.float32)
    sin_one = tl.load(sin + angle * sin_3, mask=inside, other=0).to(tl.float32)
    sin_other = tl.load(sin + angle_other * sin_3, mask=inside, other=0).to(tl.float32)
    if BACK:  # the transpose of the rotation: the other way round, each element by its partner's sine
        sin_one, sin_other = -sin_other, -sin_one
    kind = out.dtype.element_ty
    tl.store(out + one, (x_one * cos_one - x_other * sin_one).to(kind), mask=inside)
    tl.store(out + other, (x_other * cos_other + x_one * sin_other).to(kind), mask=inside)


Dtype = torch.dtype | None


def _run(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype, back: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    x = x.view(*[1] * (MOST_DIMS - x.ndim), *x.shape)
    first, second, rows, width = x.shape
    shared = _shared(x, cos)
    columns = width // 2 if shared else width
    cos, sin = (table.expand(first, second, rows, columns) for table in (cos, sin))
    pairs = power_of_two(width // 2, width)
    block = power_of_two(rows, max(TILE // pairs, 1))
    _rotate[(first * second * tiles(rows, block),)](
        x, cos, sin, out, second, rows, width // 2, *x.stride(), *cos.stride(), *sin.stride(),
        INTERLEAVED=interleaved, SHARED=shared, BACK=back, ROWS=block, PAIRS=pairs,
    )  # fmt: skip
    return out


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: Dtype = None) -> Tensor:
    return _run(x, cos, sin, interleaved, dtype or _result(x, cos, sin), False)


def _launch_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    return _run(grad, cos, sin, interleaved, dtype, True)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: Dtype = None) -> Tensor:
    """`x * cos + turned(x) * sin`, computed in float32 at least and rounded once.

    Args:
        x: of a whole number of pairs in the last dimension, [..., width]; four dimensions at most.
        cos, sin: that broadcast to it; or half as long in the last dimension, with a number for every pair.
        interleaved: pairs are neighbours, (0, 1), (2, 3) and so on; otherwise one is from either half.
        dtype: of the result; None for the one that torch gives the product.

    Returns:
        Of x's shape, contiguous.
    """
    cos_all, sin_all = (_of_elements(x, wide(table), interleaved) for table in (cos, sin))
    turned = wide(x) * cos_all + _turned(wide(x), interleaved) * sin_all
    return turned.to(dtype or _result(x, cos, sin)).contiguous()


def rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of `rotary` for x, in this dtype."""
    cos_all, sin_all = (_of_elements(grad, wide(table), interleaved) for table in (cos, sin))
    turned = wide(grad) * cos_all - _turned(wide(grad) * sin_all, interleaved)
    return turned.to(dtype).contiguous()


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    """Every pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    one, other = x.chunk(2, -1)
    return torch.cat((-other, one), -1)


def _shared(x: Tensor, table: Tensor) -> bool:
    """Whether the table has a number for every pair."""
    return x.shape[-1] > 2 and 2 * table.shape[-1] == x.shape[-1]


def _of_elements(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """The table with a number for every element."""
    if not _shared(x, table):
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def _result(x: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)


def _check(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: Dtype = None) -> None:
    check_floats("rotary", x=x, cos=cos, sin=sin)
    if dtype not in (None, *DTYPES):
        refuse("rotary", f"gives float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}")
    if not 1 <= x.ndim <= MOST_DIMS or x.shape[-1] % 2:
        refuse("rotary", f"takes one to {MOST_DIMS} dimensions, the last one of even size, and x is {list(x.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        sizes = [1] * (x.ndim - table.ndim) + list(table.shape)
        if table.ndim and _shared(x, cos):
            sizes[-1] *= 2
        if len(sizes) > x.ndim or any(n not in (1, m) for n, m in zip(sizes, x.shape, strict=True)):
            shapes = f"x is {list(x.shape)}, {name} is {list(table.shape)}"
            refuse("rotary", f"takes a {name} that broadcasts to x; {shapes}")


def _fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: Dtype = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or _result(x, cos, sin), device=x.device)


def _fake_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(grad.shape, dtype=dtype, device=grad.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.interleaved, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin, x if cos.requires_grad or sin.requires_grad else None)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin, x = ctx.saved_tensors
    to_x, to_cos, to_sin, *_ = ctx.needs_input_grad
    return (
        OPS.rotary_backward(grad, cos, sin, ctx.interleaved, ctx.dtype) if to_x else None,
        _summed(wide(grad) * wide(x), cos, ctx.interleaved) if to_cos else None,  # hardly ever learnt: by torch
        _summed(wide(grad) * _turned(wide(x), ctx.interleaved), sin, ctx.interleaved) if to_sin else None,
        None,
        None,
    )


def _summed(grad: Tensor, like: Tensor, interleaved: bool) -> Tensor:
    if _shared(grad, like):
        pairs, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)
        grad = grad.unflatten(-1, pairs).sum(dim)
    return grad.sum_to_size(like.shape).to(like.dtype)


OPS: Any = torch.ops.autotp
register(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, ScalarType? dtype=None) -> Tensor",
    twin=rotary, launch=_launch, fake=_fake, check=_check,
)  # fmt: skip
register(
    "rotary_backward(Tensor grad, Tensor cos, Tensor sin, bool interleaved, ScalarType dtype) -> Tensor",
    twin=rotary_backward, launch=_launch_backward, fake=_fake_backward,
)  # fmt: skip
differentiable("rotary", _gradient, _setup)
