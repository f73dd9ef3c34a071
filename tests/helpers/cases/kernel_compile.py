"""Compile the kernels that calls launch, for a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


def kind(value: Any) -> str:
    """An argument's type in a signature; what is 1 becomes a constant, as at a launch."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value is None or isinstance(value, bool) or value == 1 else "i32"


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Within this context launches compile for sm_90 and run nothing; gives what was compiled."""
    import triton  # noqa: PLC0415 - it is optional
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    made: list[Any] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {k: named.pop(k) for k in OPTIONS if k in named}
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
        signature = {name: "constexpr" if name in named else kind(given[name]) for name in kernel.arg_names}
        constants = {(i,): given[n] for i, n in enumerate(kernel.arg_names) if signature[n] == "constexpr"}
        source, target = ASTSource(kernel, signature, constants), GPUTarget("cuda", 90, 32)
        made.append(triton.compile(source, target=target, options={**options, "enable_fp_fusion": True}))

    with patch.object(triton.JITFunction, "run", run):
        yield made
