"""Operators as Python calls them at least cost, for programs that run eagerly.

An operator's overload (`torch.ops.aten.mul.Tensor`) goes through a frame of Python and a parser of schemas at every
call; torch's own functions do not. Both run the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.comm.collectives import summing
from autotp.comm.conversions import SUMS
from autotp.errors import InputError
from autotp.inputs import Args
from autotp.ir.graph import Capture, Function
from autotp.ir.op import aten

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
    """Return the module under these names, through whatever was put there; `otherwise` where a name is missing."""
    for step in steps:
        child = module._modules.get(step)
        module = getattr(module, step, otherwise) if child is None else child
    return module


# ---- writes in place -------------------------------------------------------------------------------------------------


FULL = (
    "a state of shape {shape} on this rank has no room for what this call adds ({error}): a static cache is full. Make "
    "one with a larger max_cache_len, or ask for fewer tokens."
)
Writes = Callable[..., Tensor]


def _writing(name: str, twin: str) -> Writes:
    functional, in_place = getattr(aten, name), getattr(aten, twin)

    def write(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if recorded or state.requires_grad:  # the caller's tensor stays out of autograd's graph
            return functional(state, *args, **kwargs)
        try:
            in_place(state, *args, **kwargs)
            return state  # the very tensor: a compiler then gives it back, and nothing is copied
        except IndexError as error:
            raise InputError(FULL.format(shape=tuple(state.shape), error=str(error).splitlines()[0])) from None

    write.__name__ = twin
    return write


def worded(function: Writes) -> Writes:
    """Wrap a function that writes, with an error of ours where an index is out of bounds.

    Args:
        function: Inductor's kernels raise a RuntimeError, torch's operators an IndexError.
    """

    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except (IndexError, RuntimeError) as error:
            if "out of bounds" not in str(error):
                raise
            shapes = "or".join(f" {tuple(x.shape)} " for x in args if isinstance(x, Tensor) and x.ndim > 2).strip()
            raise InputError(FULL.format(shape=shapes, error=str(error).splitlines()[0])) from None

    return run


# A functional operator, whose first operand it is -> the same as a write.
WRITES: dict[Any, Writes] = {
    aten.index_copy.default: _writing("index_copy", "index_copy_"),
    aten.index_put.default: _writing("index_put", "index_put_"),
    aten.add.Tensor: _writing("add", "add_"),
    aten.copy.default: _writing("copy", "copy_"),
}


# A write -> torch's own method, which does the same where no gradients are recorded.
METHODS: dict[Any, Writes] = {
    WRITES[aten.index_copy.default]: Tensor.index_copy_,
    WRITES[aten.add.Tensor]: Tensor.add_,
    WRITES[aten.copy.default]: Tensor.copy_,
}


def write_in_place(captured: Capture, graph: fx.Graph) -> int:
    """Turn what a rank's program computes of a state that the original writes to into a write, where nothing reads the
    old value afterwards.

    Args:
        captured: what the program was made from. graph: the rank's program, changed in place.

    Returns: how many writes are in place now.
    """
    placeholders = graph.find_nodes(op="placeholder")
    placeholder_of = dict(zip((x.node for x in captured.leaves), placeholders, strict=True))
    tensors = captured.tensor_inputs
    outputs, order = compat.tree_leaves(graph.output_node().args[0]), {n: i for i, n in enumerate(graph.nodes)}
    count = 0
    for position, taker in captured.mutations.items():
        if not isinstance(taker, int) or not tensors[taker].kind.carried:
            continue
        state, value = placeholder_of[tensors[taker].node], outputs[position]
        if not isinstance(value, fx.Node) or value.target not in WRITES or value.args[0] is not state:
            continue
        others = [user for user in state.users if user is not value]
        if all(order[user] < order[value] and not _shares(user) for user in others):
            value.target, count = WRITES[value.target], count + 1
    return count


def _shares(node: fx.Node) -> bool:
    """Return whether an operator may give its operand's memory on."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and any(r.alias_info is not None for r in schema.returns)
