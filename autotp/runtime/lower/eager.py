"""Operators as Python calls them at least cost, for programs that run eagerly.

An operator's overload (`torch.ops.aten.mul.Tensor`) goes through a frame of Python and a parser of schemas at every
call; torch's own functions do not. Both run the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.comm.collectives import summing
from autotp.comm.conversions import SUMS

aten: Any = torch.ops.aten

# Functions that take what the overload takes, in its order and by its names.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.cos.default: torch.cos,
    aten.div.Tensor: torch.div,
    aten.exp.default: torch.exp,
    aten.layer_norm.default: torch.layer_norm,
    aten.linear.default: nn.functional.linear,
    aten.matmul.default: torch.matmul,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: nn.functional.scaled_dot_product_attention,
    aten.silu.default: nn.functional.silu,
    aten.sin.default: torch.sin,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sub.Tensor: torch.sub,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}


def quick(node: fx.Node) -> Any:
    """Return what to call for a call of a graph: the function that does the same at less cost, where one is known."""
    first = node.args[0] if node.args else None
    if isinstance(first, fx.Node) and not isinstance(first.meta.get("val"), Tensor):
        return node.target  # torch's functions take no number in a tensor's place, which overloads do
    return FUNCTIONS.get(node.target, node.target) if isinstance(first, fx.Node | list) else node.target


def summed(node: fx.Node) -> Callable[[Tensor], Tensor] | None:
    """Return what a conversion does to its value without gradients, where that is to add it up and nothing more."""
    if node.target not in SUMS or node.kwargs.get("wire") is not None or node.kwargs["tp"] == 1:
        return None
    args: tuple[Any, ...] = node.args
    floating = args[0].meta["val"].dtype.is_floating_point
    return summing(args[1].reduction, str(node.kwargs["group"])) if floating else None


def submodule(module: nn.Module, steps: Iterable[str], otherwise: nn.Module) -> nn.Module:
    """The module under these names, through whatever was put there; `otherwise` where a name is missing."""
    for step in steps:
        child = module._modules.get(step)
        module = getattr(module, step, otherwise) if child is None else child
    return module
