"""Helpers of the kernels: Triton where it is installed, the operator library, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autotp.errors import InputError
from autotp.ir.op import dtype_name

try:
    import triton
    import triton.language as tl
except ImportError:  # optional: every operator then runs its twin
    triton = tl = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = torch.float32
LIBRARY = torch.library.Library("autotp", "FRAGMENT")
OPS: Any = torch.ops.autotp
Function = Callable[..., Any]


def available() -> bool:
    """Say whether Triton is installed."""
    return triton is not None


def jit(function: Function) -> Any:
    """Apply `triton.jit`; without Triton the function stays as it is, and nothing calls it."""
    return triton.jit(function) if triton is not None else function


def register(
    schema: str, *, twin: Function, launch: Function, fake: Function | None = None, check: Function | None = None
) -> None:
    """Enter an operator into torch's library as `autotp::<name>`.

    Args:
        schema: as for `torch.library.define`, without the namespace: "name(Tensor x) -> Tensor".
        twin: computes it in plain PyTorch; it returns new, contiguous tensors.
        launch: computes it by Triton; runs with the tensors' device as the current one.
        fake: makes empty results for fake arguments; where it is left out the twin does.
        check: called with the same arguments before each of them; raises InputError.
    """

    def checked(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if check is not None:
                check(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
            return launch(*args, **kwargs)

    enter(schema, checked(twin), fake and checked(fake))
    if available():
        LIBRARY.impl(schema.partition("(")[0], checked(on_cuda), "CUDA")


def enter(schema: str, function: Function, fake: Function | None = None) -> None:
    """Enter an operator that has no kernel of ours; arguments as of `register`, with the result in the schema."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autotp::{name}", fake or function, lib=LIBRARY)


def differentiable(name: str, backward: Function, setup: Function) -> None:
    """Give the operator a gradient: see `torch.library.register_autograd`."""
    torch.library.register_autograd(f"autotp::{name}", backward, setup_context=setup, lib=LIBRARY)


def derived(name: str, backward: str, keep: Sequence[int], options: Sequence[int] = ()) -> None:
    """Give the operator a gradient that is another operator of the gradients, the saved tensors, and options.

    Args:
        name, backward: the operator, and that of its gradient, which returns those of its first arguments.
        keep: indices of the arguments that are tensors to save. options: of the others that the backward takes.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*[inputs[i] for i in keep])
        ctx.options, ctx.count = [inputs[i] for i in options], len(inputs)

    def gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = getattr(OPS, backward)(*grads, *ctx.saved_tensors, *ctx.options)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return *gradients, *[None] * (ctx.count - len(gradients))

    differentiable(name, gradient, setup)


def refuse(name: str, reason: str) -> None:
    """Raise the error of a kernel that cannot take its arguments."""
    raise InputError(f"autotp::{name} {reason}. Call the operators that it stands for, or switch 'kernels' off.")


def check_floats(name: str, **tensors: Tensor | None) -> None:
    """Refuse tensors of dtypes that the kernels do not know, or on several devices."""
    present = {k: x for k, x in tensors.items() if x is not None}
    for key, x in present.items():
        if x.dtype not in DTYPES:
            refuse(name, f"takes float32, bfloat16 and float16, and {key} is {dtype_name(x.dtype)}")
    if len(devices := {str(x.device) for x in present.values()}) > 1:
        refuse(name, f"takes tensors on one device, and these are on {' and '.join(sorted(devices))}")


def check_same(name: str, a: Tensor, b: Tensor, of: str) -> None:
    """Refuse two tensors of different shapes or dtypes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        shapes = " and ".join(f"{list(x.shape)} in {dtype_name(x.dtype)}" for x in (a, b))
        refuse(name, f"takes {of} of one shape and dtype, and these are {shapes}")


def check_vector(name: str, what: str, vector: Tensor | None, x: Tensor) -> None:
    """Refuse a weight or bias that is no vector as long as x's last dimension."""
    if not x.ndim or (vector is not None and list(vector.shape) != [x.shape[-1]]):
        shape = None if vector is None else list(vector.shape)
        refuse(name, f"takes a {what} as long as x's last dimension; x is {list(x.shape)}, {what} is {shape}")
