"""Fused operators: Triton kernels for CUDA devices, with twins in plain PyTorch for every other one.

Each file holds one kernel: Triton functions for the forward and the backward (`@jit`), what launches them, their twins,
and the entries in torch's operator library, made by `common.register`:

    register("name(Tensor x, ...) -> Tensor", twin=..., launch=..., fake=..., check=...)
    differentiable("name", backward, setup)

`torch.ops.autotp.<name>` runs `launch` on CUDA and `twin` elsewhere. Triton is optional: without it the twin runs on
CUDA too. A rank's program calls those that were measured to be faster on its device. What holds for every kernel:

- It takes float32, bfloat16 and float16 of any size, contiguous or not, without rows too; `check` refuses the rest.
- It computes in float32 and rounds once, to the dtype of its input.
- Gradients of weights are sums over rows: each program writes its own sum in float32, and those are added up. No
  atomics, so the result is the same in every run.
- `launch` allocates what it returns with `torch.empty`, so that a test can see an element that was never written.
- Twins are written for any floating dtype and compute in float32 at least, so that they can be checked in float64.
"""

from . import bias_gelu, cross_entropy, dropout, embedding, norm

__all__ = ["bias_gelu", "cross_entropy", "dropout", "embedding", "norm"]
