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
from autotp.inputs import Args
from autotp.ir.graph import Function

aten: Any = torch.ops.aten

# Overloads of which torch, or torch.nn.functional, has a function of that name that takes the same, in the same order.
QUICK = (
    "add.Tensor cat.default cos.default div.Tensor exp.default layer_norm.default linear.default matmul.default "
    "mean.dim mul.Tensor neg.default pow.Tensor_Scalar reshape.default rsqrt.default "
    "scaled_dot_product_attention.default silu.default sin.default split_with_sizes.default sub.Tensor tanh.default "
    "transpose.int unsqueeze.default"
)
FUNCTIONS: dict[Any, Function] = {
    getattr(getattr(aten, name), overload): getattr(torch, name, None) or getattr(nn.functional, name)
    for name, overload in (x.split(".") for x in QUICK.split())
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
    args: Args = node.args
    floating = args[0].meta["val"].dtype.is_floating_point
    return summing(args[1].reduction, str(node.kwargs["group"])) if floating else None


def submodule(module: nn.Module, steps: Iterable[str], otherwise: nn.Module) -> nn.Module:
    """The module under these names, through whatever was put there; `otherwise` where a name is missing."""
    for step in steps:
        child = module._modules.get(step)
        module = getattr(module, step, otherwise) if child is None else child
    return module
