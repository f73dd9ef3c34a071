"""SwiGLU and GeGLU (Shazeer 2020): an activation of one half times the other; on two inputs, or halves of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import (
    as_rows,
    check_floats,
    check_same,
    differentiable,
    empty_like,
    jit,
    power_of_two,
    refuse,
    register,
    tiles,
    tl,
    wide,
)
from .pointwise import ACTIVATIONS, act, act_slope, activate, slope

TILE = 1024


@jit
def _forward(gate, up, out, columns, gate_row, up_row, KIND: tl.constexpr, TILE: tl.constexpr):
    per_row = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // per_row).to(tl.int64)
    column = tl.program_id(0) % per_row * TILE + tl.arange(0, TILE)
    inside = column < columns
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * columns + column, (act(g, KIND) * u).to(out.dtype.element_ty), mask=inside)


@jit
def _backward(
    grad, gate, up, grad_gate, grad_up, columns, grad_row, gate_row, up_row, out_row,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    per_row = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // per_row).to(tl.int64)
    column = tl.program_id(0) % per_row * TILE + tl.arange(0, TILE)
    inside = column < columns
    d = tl.load(grad + row * grad_row + column, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + row * gate_row + column, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside, other=0).to(tl.float32)
    to = row * out_row + column
    tl.store(grad_gate + to, (d * u * slope(g, KIND)).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + to, (d * act(g, KIND)).to(grad_up.dtype.element_ty), mask=inside)


def _grid(x: Tensor) -> tuple[tuple[int], int]:
    tile = power_of_two(x.shape[1], TILE)
    return (x.shape[0] * tiles(x.shape[1], tile),), tile


def _launch(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out, g, u = empty_like(gate), as_rows(gate), as_rows(up)
    grid, tile = _grid(g)
    if out.numel():
        _forward[grid](g, u, out, g.shape[1], g.stride(0), u.stride(0), KIND=ACTIVATIONS[activation], TILE=tile)
    return out


def _launch_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    outs = empty_like(gate), empty_like(up)
    to_gate, to_up = (as_rows(x) for x in outs)
    _into(grad, gate, up, to_gate, to_up, activation)
    return outs


def _into(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, activation: str) -> None:
    """Write both gradients into these rows, which may lie within one tensor."""
    d, g, u = as_rows(grad), as_rows(gate), as_rows(up)
    grid, tile = _grid(g)
    if g.numel():
        strides = d.stride(0), g.stride(0), u.stride(0), grad_gate.stride(0)
        _backward[grid](d, g, u, grad_gate, grad_up, g.shape[1], *strides, KIND=ACTIVATIONS[activation], TILE=tile)


def _halves(x: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Gate and other half, as views."""
    a, b = x.chunk(2, -1)
    return (a, b) if gate_first else (b, a)


def _launch_halves(x: Tensor, activation: str, gate_first: bool) -> Tensor:
    return _launch(*_halves(as_rows(x), gate_first), activation).view(*x.shape[:-1], x.shape[-1] // 2)


def _launch_halves_backward(grad: Tensor, x: Tensor, activation: str, gate_first: bool) -> Tensor:
    out = empty_like(x)
    gate, up = _halves(as_rows(x), gate_first)
    to_gate, to_up = _halves(as_rows(out), gate_first)
    _into(grad, gate, up, to_gate, to_up, activation)
    return out


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up`, computed in float32 at least and rounded once.

    Args:
        gate, up: of one shape and dtype, [..., columns].
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU, exact or by tanh).

    Returns:
        Of the same shape and dtype, contiguous.
    """
    return (activate(wide(gate), activation) * wide(up)).to(gate.dtype).contiguous()


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of `gated` for gate and up."""
    d, g = wide(grad), wide(gate)
    to_gate, to_up = d * wide(up) * act_slope(g, activation), d * activate(g, activation)
    return to_gate.to(gate.dtype).contiguous(), to_up.to(up.dtype).contiguous()


def gated_halves(x: Tensor, activation: str, gate_first: bool) -> Tensor:
    """`gated` of the halves of the last dimension, the gate being the first or the second: [..., 2n] to [..., n]."""
    return gated(*_halves(x, gate_first), activation)


def gated_halves_backward(grad: Tensor, x: Tensor, activation: str, gate_first: bool) -> Tensor:
    """The gradient of `gated_halves`, both halves in one tensor."""
    to_gate, to_up = gated_backward(grad, *_halves(x, gate_first), activation)
    return torch.cat((to_gate, to_up) if gate_first else (to_up, to_gate), -1)


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    check_floats("gated", gate=gate, up=up)
    check_same("gated", gate, up, "a gate and an input")
    _check_activation("gated", gate, activation)


def _check_halves(x: Tensor, activation: str, gate_first: bool) -> None:
    check_floats("gated_halves", x=x)
    _check_activation("gated_halves", x, activation)
    if x.shape[-1] % 2:
        refuse("gated_halves", f"takes a last dimension of even size, and x is {list(x.shape)}")


def _check_activation(name: str, x: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        refuse(name, f"knows {', '.join(ACTIVATIONS)}, not {activation!r}")
    if not x.ndim:
        refuse(name, "takes tensors of at least one dimension")


def _fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return empty_like(gate)


def _fake_halves(x: Tensor, activation: str, gate_first: bool) -> Tensor:
    return empty_like(x, [*x.shape[:-1], x.shape[-1] // 2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *OPS.gated_backward(grad, *ctx.saved_tensors, ctx.activation), None


def _setup_halves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _gradient_halves(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return OPS.gated_halves_backward(grad, *ctx.saved_tensors, *ctx.options), None, None


OPS: Any = torch.ops.autotp
register(
    "gated(Tensor gate, Tensor up, str activation) -> Tensor", twin=gated, launch=_launch, fake=_fake, check=_check
)
register(
    "gated_backward(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    twin=gated_backward, launch=_launch_backward,
    fake=lambda grad, gate, up, activation: (empty_like(gate), empty_like(up)),
)  # fmt: skip
register(
    "gated_halves(Tensor x, str activation, bool gate_first) -> Tensor",
    twin=gated_halves, launch=_launch_halves, fake=_fake_halves, check=_check_halves,
)  # fmt: skip
register(
    "gated_halves_backward(Tensor grad, Tensor x, str activation, bool gate_first) -> Tensor",
    twin=gated_halves_backward, launch=_launch_halves_backward,
    fake=lambda grad, x, activation, gate_first: empty_like(x),
)  # fmt: skip
differentiable("gated", _gradient, _setup)
differentiable("gated_halves", _gradient_halves, _setup_halves)
