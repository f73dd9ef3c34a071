"""What the whole program computes: the values and gradients that simulated ranks are compared with."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import Value

from .numerics import backward, has_grad, largest, loss
from .simulate import reference


@dataclass
class Expected:
    """What a captured graph computes; gradients are in the tensors' `grad`."""

    values: dict[Value, Tensor]
    outputs: list[Any]
    largest: float  # of all gradients: one that is small beside it may be zero but for rounding
    failed: str  # why there are no gradients
    final_values: dict[int, Tensor]  # position of an output -> what a buffer or input has after the backward


def expect(graph: fx.Graph, leaves: Mapping[fx.Node, Any], mutations: Container[int]) -> Expected:
    """Run a captured graph, and the backward of the loss of its outputs.

    Args:
        graph: of whole values. leaves: a value for each placeholder, of which those with gradients are `own_leaf`s.
        mutations: positions of outputs that buffers or inputs become.
    """
    values: dict[Value, Tensor] = {}

    def keep(node: fx.Node, value: Any) -> None:
        for i, v in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(v, Tensor):
                values[node, i] = watched(v)

    outputs = compat.tree_leaves(reference(graph, leaves, keep))
    final_values = {i: v for i, v in enumerate(outputs) if i in mutations and isinstance(v, Tensor)}
    before = {id(v): v.clone() for v in final_values.values() if not v.requires_grad}  # a backward may write to it too
    values = {key: before.get(id(v), v) for key, v in values.items()}
    outputs = [before.get(id(v), v) for v in outputs]
    failed = backward(loss(outputs))
    graded: list[Any] = [v.grad for v in (*leaves.values(), *values.values()) if has_grad(v)]
    return Expected(values, outputs, max(map(largest, graded), default=0.0), failed, final_values)


def watched(value: Any) -> Any:
    """A value that keeps its gradient; anything that has none as it is."""
    if isinstance(value, Tensor) and value.requires_grad:
        value.retain_grad()
    return value
