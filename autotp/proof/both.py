"""A captured graph and its program of the ranks, run on the same values in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import Capture
from autotp.ir.layouts import Groups, I, Layout, R, Size
from autotp.ir.program import Sharded
from autotp.ir.sizes import substitute
from autotp.ir.specs import Spec

from .simulate import double, promoted, reference, run


@dataclass
class Both:
    """A program before the rank is known, with what it was made from, and the values of one call.

    Attributes:
        captured, sharded: the program, unsharded and for all ranks.
        values: of the leaves, in their order, whole. Tensors become float64.
    """

    captured: Capture
    sharded: Sharded
    values: Sequence[Any]

    def __post_init__(self) -> None:
        self.values = [double(v) for v in self.values]
        self.leaf_values = {x.node: v for x, v in zip(self.captured.leaves, self.values, strict=True)}
        self.sizes = {s: self.leaf_values[node].shape[d] for s, (node, d) in self.captured.symbols.items()}

    def spec(self, layout: Layout) -> Spec:
        """A layout with the sizes of this call."""

        def number(size: Size | Groups) -> Any:
            return size if isinstance(size, int | Groups) else int(substitute(size, self.sizes))

        return layout.to_runtime(number)

    def left_as(self, position: int) -> Spec:
        """How the output at this position lies: whole, but where it becomes a state."""
        name = self.captured.becomes(position)
        return self.spec(I if name is None else self.sharded.states.get(name, I))

    def whole(self) -> list[Any]:
        """The outputs of the captured graph."""
        with promoted(self.captured.graph):
            return compat.tree_leaves(reference(self.captured.graph, self.leaf_values, lambda node, value: None))

    def ranks(self, tp: int, parts: Mapping[str, Sequence[Tensor]]) -> list[list[Any]]:
        """The outputs of each of `tp` ranks; `parts` are of states, by name, what each rank has from before."""
        inputs: dict[fx.Node, list[Any]] = {}
        placeholders = [n for n in self.sharded.graph.nodes if n.op == "placeholder"]
        for node, leaf, value in zip(placeholders, self.captured.leaves, self.values, strict=True):
            if leaf.kind.carried and leaf.name in parts:
                inputs[node] = list(parts[leaf.name])
            elif isinstance(value, Tensor):
                inputs[node] = self.spec(self.sharded.layouts.get(node, R)).split(value, tp)
            else:
                inputs[node] = [value] * tp
        with promoted(self.sharded.graph):
            return [compat.tree_leaves(outputs) for outputs in run(self.sharded, tp, inputs)]
