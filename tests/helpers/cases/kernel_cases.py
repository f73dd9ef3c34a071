"""Calls of every kernel of one value at a time: by Triton, by its twin, and as a reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.kernels import bias_gelu, norm
from autotp.kernels.common import DTYPES

EPS = 1e-5
Tensors = Sequence[Tensor]
# The interpreter cuts bfloat16 off where a device rounds it, which may be a whole unit in the last place.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Case:
    """A kernel with its options.

    Attributes:
        name: as shown by the test.
        shapes: of its inputs, from [rows, columns] of the first.
        reference: outputs of inputs in float64; the last argument are the outputs in question, for those that the
            kernel rounds on the way.
        triton, twin: outputs and gradients of inputs and of the outputs' gradients.
    """

    name: str
    shapes: Callable[[int, int], list[tuple[int, ...]]]
    reference: Callable[[Tensors, Tensors], Tensors]
    triton: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
    twin: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]


def _both(forward: Any, backward: Any, *options: Any) -> Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]:
    """One output, whose gradients come from the inputs."""

    def run(inputs: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
        back = backward(grads[0], *inputs, *options)
        return [forward(*inputs, *options)], [back] if isinstance(back, Tensor) else list(back)

    return run


def _pointwise(name: str, forward: Any, backward: Any, twins: Any, shapes: Any, reference: Any, *options: Any) -> Case:
    return Case(
        " ".join([name, *map(str, options)]),
        shapes,
        lambda inputs, _: [reference(*inputs)],
        _both(forward, backward, *options),
        _both(*twins, *options),
    )


POINTWISE = [
    _pointwise(
        "bias_gelu", bias_gelu._launch, bias_gelu._launch_backward,
        (bias_gelu.bias_gelu, bias_gelu.bias_gelu_backward), lambda n, m: [(n, m), (m,)],
        lambda x, b, way=way: F.gelu(x + b, approximate=way), tanh,
    )
    for tanh, way in ((False, "none"), (True, "tanh"))
]  # fmt: skip


def _norm(centred: bool, vectors: int, added: bool) -> Case:
    """`vectors`: weight and bias, weight, or neither."""

    def shapes(n: int, m: int) -> list[tuple[int, ...]]:
        return [(n, m)] * (2 if added else 1) + [(m,)] * vectors

    def reference(inputs: Tensors, outputs: Tensors) -> Tensors:
        total = inputs[0] + inputs[1] if added else inputs[0]
        held = total + (outputs[1].double() - total).detach() if added else total  # as it was rounded
        options = [*inputs[-vectors:], *[None] * (2 - vectors)] if vectors else [None, None]
        if centred:
            y = F.layer_norm(held, held.shape[-1:], *options, eps=EPS)
        else:
            y = F.rms_norm(held, held.shape[-1:], options[0], EPS)
        return [y, total] if added else [y]

    def split(inputs: Tensors) -> tuple[Any, ...]:
        rest = inputs[2:] if added else inputs[1:]
        return inputs[0], inputs[1] if added else None, *[*rest, None, None][:2]

    def run(forward: Any, backward: Any) -> Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]:
        def call(inputs: Tensors, grads: Tensors) -> tuple[Tensors, Tensors]:
            x, residual, weight, bias = split(inputs)
            y, total, stats = forward(x, residual, weight, bias, EPS, centred)
            extra = grads[1] if added else None
            to_x, *more = backward(grads[0], extra, total, stats, weight, bias, centred)
            to_total = [to_x, to_x] if added else [to_x]
            return ([y, total] if added else [y]), [*to_total, *more[:vectors]]

        return call

    def twin(x: Tensor, residual: Any, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
        if residual is not None:
            return norm.add_norm(x, residual, *options)
        y, stats = norm.norm(x, *options)
        return y, x, stats

    kind = "layer" if centred else "rms"
    triton = run(norm.launch_forward, norm._launch_backward)
    return Case(
        f"{kind} norm, {vectors} vectors{', added' * added}", shapes, reference, triton,
        run(twin, norm.norm_backward),
    )  # fmt: skip


NORMS = [_norm(True, 2, False), _norm(True, 2, True), _norm(True, 0, False), _norm(False, 1, False),
         _norm(False, 1, True), _norm(False, 0, False)]  # fmt: skip
CASES = {case.name: case for case in [*POINTWISE, *NORMS]}
MEMORY = ("contiguous", "transposed", "strided", "expanded")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, memory: str, draw: torch.Generator) -> Tensor:
    """Random values, laid out in some way; those that lie in no rows get a dimension more, as of a batch."""

    def values(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(dtype)

    if len(shape) == 1:
        return values(shape[0], 2)[:, 0] if memory == "strided" else values(*shape)
    n, m = shape
    if memory == "transposed":
        return values(m, n).t()
    if memory == "strided":
        return values(n, 2 * m)[:, ::2]
    return values(1, m).expand(n, m) if memory == "expanded" else values(1, n, m)


def error(
    name: str,
    way: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    memory: str,
    reference: str = "",
    device: str = "cpu",
) -> float:
    """Largest error of an output or gradient of a case, in units of what rounding excuses.

    Args:
        way: "triton" or "twin". reference: the case whose reference it is, if not its own.
    """
    case, draw = CASES[name], torch.Generator().manual_seed(0)
    inputs = [drawn(s, dtype, memory, draw).to(device) for s in case.shapes(*shape)]
    exact = [x.double().requires_grad_() for x in inputs]
    wanted = CASES[reference or name].reference(exact, [torch.zeros_like(exact[0])] * 2)
    grads = [drawn((x.shape[:-1].numel(), x.shape[-1]), dtype, memory, draw).reshape(x.shape) for x in wanted]
    grads = [g.to(device) for g in grads]
    outputs, gradients = getattr(case, way)(inputs, grads)
    wanted = CASES[reference or name].reference(exact, outputs)
    back = torch.autograd.grad(wanted, exact, [g.double() for g in grads])
    pairs = zip([*outputs, *gradients], [*wanted, *back], strict=True)
    return max(apart(got, want.detach(), dtype) for got, want in pairs)


def apart(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """Largest difference over what rounding excuses: a part of the value, and a little of the largest one."""
    assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous(), (got.shape, want.shape, got.dtype)
    if not got.numel():
        return 0.0
    excused = CLOSE[dtype] * want.abs() + 2e-6 * want.abs().max() + 1e-30
    return float(((got.double() - want).abs() / excused).nan_to_num(torch.inf).max())


def errors(name: str, way: str, shapes: Sequence[tuple[int, int]], device: str = "cpu") -> dict[Any, float]:
    """`error` for every dtype, and in the first shape for every memory."""
    return {
        (dtype, shape, memory): error(name, way, dtype, shape, memory, device=device)
        for dtype in DTYPES
        for shape in shapes
        for memory in (MEMORY if shape == shapes[0] else MEMORY[:1])
    }
