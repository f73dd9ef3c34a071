"""Writes to a state that the original makes in place are made in place: nothing copies a cache for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.errors import InputError
from autotp.ir.graph import Capture
from autotp.ir.op import aten

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
    """A function that writes, with our words where an index is out of bounds.

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
