"""Products in float8 with dynamic scales, as operators: casts, products, and largest values of gradients.

The recipes are those of torchao.float8. A cast value is a tensor of the original's dtype that holds numbers of float8:
so autograd gives it gradients of that dtype, and a conversion sends it in a byte an element without any loss. The
largest value of a product's gradient comes to its backward as the gradient of a further result, a zero, which goes with
the product to the operator that sees the gradient: between the two a conversion makes it the largest over all ranks.

Operands in float64 are a proof's: the casts are the same, and the products are those of float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .common import derived, differentiable, enter
from .operators import OPS

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12  # a smaller largest value counts as this one, as torchao's EPS
_scaled_mm = torch.ops.aten._scaled_mm.default
ALIGNED = 16  # elements, of every dimension that a kernel for CUDA multiplies along


def scale_of(amax: Tensor, dtype: torch.dtype, power: bool = False) -> Tensor:
    """Return the scale of numbers before the cast, in float32, which maps the largest to the largest of the dtype.

    Args:
        amax: largest absolute values, of any shape. dtype: of float8.
        power: round down to a power of two.
    """
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()
    scale = torch.where(amax > 0, scale, 1)  # of zeros, or where nothing is known of an operand yet
    return torch.exp2(torch.log2(scale).floor()) if power else scale


def raised(amax: Tensor) -> Tensor:
    """Raise largest values until their scales are powers of two, of INPUT and of GRADIENT alike; 0 stays."""
    return torch.where(amax > 0, torch.finfo(INPUT).max / scale_of(amax, INPUT, power=True), amax)


def cast(x: Tensor, amax: Tensor, dtype: torch.dtype, power: bool = False) -> Tensor:
    """Scale, clamp and round numbers to float8; arguments as of `scale_of`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = torch.finfo(dtype).max
    return (x.to(wide) * scale_of(amax, dtype, power).to(wide)).clamp(-largest, largest).to(dtype)


def scaled(a: Tensor, a_amax: Tensor, b: Tensor, b_amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `a @ b.T` of [m, k] and [n, k] in float8, with a power of two as the scale of each row."""
    first, second = cast(a, a_amax, INPUT, power=True), cast(b, b_amax, INPUT, power=True)
    return product(first, second, inverse(a_amax, INPUT, True), inverse(b_amax, INPUT, True).t(), dtype)


def inverse(amax: Tensor, dtype: torch.dtype, power: bool = False) -> Tensor:
    """Return the factor that undoes the scale in a product; arguments as of `scale_of`."""
    return scale_of(amax, dtype, power).reciprocal()


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `a @ b.T` of float8 matrices, scaled back.

    Args:
        a, b: [m, k] and [n, k]. a_scale, b_scale: factors of the product, [], or [m, 1] and [1, n].
        dtype: of the result; in float64 it is a proof's, and computed so.
    """
    if not a.is_cuda or dtype == torch.float64:  # torch's own on a CPU is a loop that takes hundreds of times as long
        wide = torch.promote_types(dtype, torch.float32)
        return ((a.to(wide) @ b.to(wide).t()) * a_scale.to(wide) * b_scale.to(wide)).to(dtype)
    m, n = a.shape[0], b.shape[0]
    if not m * n * a.shape[1]:
        return a.new_zeros((m, n), dtype=dtype)
    a, b, b_scale = _aligned(a, b, b_scale)
    if b_scale.ndim:
        a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
        if dtype != torch.bfloat16:  # all that kernel gives
            return _scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16)[:m, :n].to(dtype)
    return _scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype)[:m, :n]


def _aligned(a: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the columns of both and the rows of `b` with zeros to multiples of 16, as CUDA's kernels require."""
    pad_k, pad_n = -a.shape[1] % ALIGNED, -b.shape[0] % ALIGNED
    if pad_k or pad_n:
        pad = torch.nn.functional.pad
        a = pad(a.view(torch.uint8), (0, pad_k)).view(a.dtype)
        b = pad(b.view(torch.uint8), (0, pad_k, 0, pad_n)).view(b.dtype)
        b_scale = pad(b_scale, (0, pad_n), value=1.0) if b_scale.ndim else b_scale
    return a.contiguous(), b.contiguous(), b_scale


def float8_amax(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Return the largest absolute values over these dimensions; 0 where a rank has no elements."""
    size, dims = x.abs(), list(dim)
    return size.amax(dims, keepdim) if x.numel() else size.sum(dims, keepdim)


def float8_cast(x: Tensor, amax: Tensor) -> Tensor:
    """Round to numbers of float8_e4m3fn, not scaled back, in the dtype of `x`; the gradient passes unchanged."""
    return cast(x, amax, INPUT).to(x.dtype)


def float8_linear(x: Tensor, weight: Tensor, x_amax: Tensor, weight_amax: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `x @ weight.T` in float8 with one scale for each operand; its gradients with one for the gradient too.

    Args:
        x: the result of `float8_cast`, [..., k]. weight: [n, k], not cast yet.
        x_amax, weight_amax: largest absolute values, [].

    Returns: the product, [..., n], and a zero, [], whose gradient is to be the largest absolute value of the
    product's gradient.
    """
    a, scale = x.flatten(0, -2).to(INPUT), inverse(x_amax, INPUT)
    b = cast(weight, weight_amax, INPUT)
    y = product(a, b, scale, inverse(weight_amax, INPUT), x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0]), x.new_zeros(())


def float8_linear_backward(
    grad: Tensor, amax: Tensor, x: Tensor, weight: Tensor, x_amax: Tensor, weight_amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `float8_linear` for `x`, as if it were not scaled, and for `weight`.

    Args:
        grad: of the product, [..., n]. amax: its largest absolute value over all ranks, [].
        x, weight, x_amax, weight_amax: as of `float8_linear`.
    """
    g, scale = cast(grad.flatten(0, -2), amax, GRADIENT), inverse(amax, GRADIENT)
    a, b = x.flatten(0, -2).to(INPUT), cast(weight, weight_amax, INPUT)
    to_x = product(g, b.t(), scale, inverse(weight_amax, INPUT), x.dtype)
    to_weight = product(g.t(), a.t(), scale, inverse(x_amax, INPUT), weight.dtype)
    return to_x.view(x.shape), to_weight


def float8_delayed(x: Tensor, weight: Tensor, x_amax: Tensor, amaxes: Tensor, latest: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `float8_linear` with the scales of earlier calls, so that none waits for its operand.

    Args:
        x: the result of `float8_cast` by `x_amax`. weight: not cast yet.
        amaxes: largest values in earlier calls of the input, the weight and the product's gradient, [3], raised: their
            last bits depend on the order of sums, and such scales do not.
        latest: [], zero; becomes the largest value of the gradient in the backward, for the next call to record.
    """
    return float8_linear(x, weight, x_amax, amaxes[1])


def float8_before(history: Tensor, latest: Tensor) -> Tensor:
    """Return the largest values in earlier calls, [3], raised; the gradient's of the last call is still in `latest`."""
    gradient = torch.maximum(history[2, 1:].amax(), latest) if history.shape[1] > 1 else latest
    return raised(torch.stack([*history[:2].amax(1), gradient]))


def float8_record(history: Tensor, latest: Tensor, x_amax: Tensor, weight_amax: Tensor) -> Tensor:
    """Replace the oldest entries of a history [3, length] by the largest values of this call: see `float8_delayed`."""
    newest = torch.stack([a.to(history.dtype) for a in (x_amax, weight_amax, latest)])
    newest = torch.where(newest.isfinite(), newest, 0)  # an overflow is no size that later calls can use
    return torch.cat([history[:, 1:], newest.unsqueeze(1)], 1)


def float8_seen(y: Tensor, *zeros: Tensor) -> Tensor:
    """Return the product unchanged; in the backward the largest absolute values of its gradient go to the zeros."""
    return y.clone()


def float8_rows(
    x: Tensor, weight: Tensor, x_rows: Tensor, weight_rows: Tensor, x_columns: Tensor, weight_columns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `x @ weight.T` in float8 with a scale for each row that is summed over, in forward and backward.

    Args:
        x, weight: [..., k] and [n, k], not cast yet.
        x_rows, weight_rows: largest absolute values over k, [..., 1] and [n, 1].
        x_columns, weight_columns: over the rest, which the backward sums over, [k].

    Returns: the product, [..., n], and zeros, [..., 1] and [n], whose gradients are to be the largest absolute values
    of the gradient's rows and columns.
    """
    a, rows = x.flatten(0, -2), x_rows.flatten(0, -2)
    y = scaled(a, rows, weight, weight_rows, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0]), torch.zeros_like(x_rows), x.new_zeros(weight.shape[0])


def float8_rows_backward(
    grad: Tensor, rows: Tensor, columns: Tensor, x: Tensor, weight: Tensor, x_columns: Tensor, weight_columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `float8_rows` for `x` and `weight`.

    Args:
        grad: of the product, [..., n]. rows, columns: its largest absolute values, [..., 1] and [n].
        x, weight, x_columns, weight_columns: as of `float8_rows`.
    """
    g, a = grad.flatten(0, -2), x.flatten(0, -2)
    to_x = scaled(g, rows.flatten(0, -2), weight.t(), weight_columns.unsqueeze(1), x.dtype)
    to_weight = scaled(g.t(), columns.unsqueeze(1), a.t(), x_columns.unsqueeze(1), weight.dtype)
    return to_x.view(x.shape), to_weight


def float8_rows_hp(
    x: Tensor, weight: Tensor, x_rows: Tensor, weight_rows: Tensor, weight_amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `float8_rows` with a backward in which the gradient of the weight is not in float8.

    Args:
        x, weight, x_rows, weight_rows: as there. weight_amax: the weight's largest absolute value, [].

    Returns: the product, and zeros [..., 1] for the largest values of the gradient's rows.
    """
    y = scaled(x.flatten(0, -2), x_rows.flatten(0, -2), weight, weight_rows, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0]), torch.zeros_like(x_rows)


def float8_rows_hp_backward(
    grad: Tensor, rows: Tensor, x: Tensor, weight: Tensor, weight_amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `float8_rows_hp`; arguments as there and of `float8_rows_backward`."""
    g = grad.flatten(0, -2)
    to_x = scaled(g, rows.flatten(0, -2), weight.t(), weight_amax.expand(weight.shape[1], 1), x.dtype)
    return to_x.view(x.shape), g.t() @ x.flatten(0, -2)


def _amax_fake(x: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    return torch.amax(x, list(dim), keepdim)


def _linear_fake(x: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), x.new_empty(())


def _gradients_fake(grad: Tensor, amax: Tensor, x: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _rows_fake(x: Tensor, weight: Tensor, x_rows: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = weight.shape[0]
    return x.new_empty((*x.shape[:-1], n)), x_rows.new_empty(x_rows.shape), x.new_empty((n,))


def _rows_hp_fake(*operands: Tensor) -> tuple[Tensor, Tensor]:
    return _rows_fake(*operands)[:2]


def _rows_gradients_fake(grad: Tensor, rows: Tensor, columns: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients_fake(grad, rows, *operands)


_PRODUCT = "Tensor x, Tensor weight, Tensor x_amax, Tensor weight_amax"
_ROWS = "Tensor x_columns, Tensor weight_columns"
_ENTRIES = (
    ("float8_amax(Tensor x, int[] dim, bool keepdim) -> Tensor", float8_amax, _amax_fake),
    ("float8_cast(Tensor x, Tensor amax) -> Tensor", float8_cast, None),
    (f"float8_linear({_PRODUCT}) -> (Tensor, Tensor)", float8_linear, _linear_fake),
    (f"float8_linear_backward(Tensor grad, Tensor amax, {_PRODUCT}) -> (Tensor, Tensor)", float8_linear_backward,
     _gradients_fake),
    ("float8_delayed(Tensor x, Tensor weight, Tensor x_amax, Tensor amaxes, Tensor latest) -> (Tensor, Tensor)",
     float8_delayed, _linear_fake),
    ("float8_before(Tensor history, Tensor latest) -> Tensor", float8_before, None),
    ("float8_record(Tensor history, Tensor latest, Tensor x_amax, Tensor weight_amax) -> Tensor", float8_record,
     None),
    ("float8_seen(Tensor y, Tensor zero) -> Tensor", float8_seen, None),
    (f"float8_rows(Tensor x, Tensor weight, Tensor x_rows, Tensor weight_rows, {_ROWS}) -> (Tensor, Tensor, Tensor)",
     float8_rows, _rows_fake),
    ("float8_rows_backward(Tensor grad, Tensor rows, Tensor columns, Tensor x, Tensor weight, "
     f"{_ROWS}) -> (Tensor, Tensor)", float8_rows_backward, _rows_gradients_fake),
    ("float8_rows_hp(Tensor x, Tensor weight, Tensor x_rows, Tensor weight_rows, Tensor weight_amax) "
     "-> (Tensor, Tensor)", float8_rows_hp, _rows_hp_fake),
    ("float8_rows_hp_backward(Tensor grad, Tensor rows, Tensor x, Tensor weight, Tensor weight_amax) "
     "-> (Tensor, Tensor)", float8_rows_hp_backward, _gradients_fake),
    ("float8_row_seen(Tensor y, Tensor rows) -> Tensor", float8_seen, None),
    ("float8_rows_seen(Tensor y, Tensor rows, Tensor columns) -> Tensor", float8_seen, None),
)  # fmt: skip
for _schema, _function, _fake in _ENTRIES:
    enter(_schema, _function, _fake)


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The backward reads nothing of the forward."""


def _same_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


def _keep_latest(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    *operands, ctx.latest = inputs  # it is written to, which autograd refuses of what is saved
    ctx.save_for_backward(*operands)


def _delayed_gradients(ctx: Any, grad: Tensor, amax: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, x_amax, amaxes = ctx.saved_tensors
    finite = amax.isfinite()
    with torch.no_grad():
        ctx.latest.copy_(torch.maximum(ctx.latest, torch.where(finite, amax, 0).to(ctx.latest.dtype)))
    # The first gradient's own largest value, which may be far from 1; and that of an overflow, which by an earlier
    # scale would be clamped to a number: a gradient scaler must see it.
    grad_amax = torch.where(finite & (amaxes[2] > 0), amaxes[2], raised(amax))
    return *OPS.float8_linear_backward(grad, grad_amax, x, weight, x_amax, amaxes[1]), None, None, None


def _gradient_and_amax(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, float8_amax(grad, range(grad.ndim), False)


def _row_seen(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, float8_amax(grad, [grad.ndim - 1], True)


def _rows_seen(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    last = grad.ndim - 1
    return grad, float8_amax(grad, [last], True), float8_amax(grad, range(last), False)


for _name, _backward, _setup in (
    ("cast", _same_gradient, _nothing),
    ("delayed", _delayed_gradients, _keep_latest),
    ("seen", _gradient_and_amax, _nothing),
    ("row_seen", _row_seen, _nothing),
    ("rows_seen", _rows_seen, _nothing),
):
    differentiable(f"float8_{_name}", _backward, _setup)
for _name, _operands in (("linear", (0, 1, 2, 3)), ("rows", (0, 1, 4, 5)), ("rows_hp", (0, 1, 4))):
    derived(f"float8_{_name}", f"float8_{_name}_backward", _operands)
