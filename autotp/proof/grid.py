"""A program over two mesh axes against the model's own, on one machine: outputs and gradients, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.errors import InputError
from autotp.ir.graph import Capture, draws
from autotp.ir.layouts import I, Layout, R
from autotp.ir.program import Planned, Sharded
from autotp.ir.specs import Spec

from .expected import expect
from .numerics import grad_or_zeros, has_grad, layout_error, loss, own_leaf, relative, weighted, weights
from .report import TOLERANCE, Difference, Report
from .simulate import StepError, Values, promoted, run


@dataclass
class GridProof:
    """Simulated ranks of an axis of sequences (cp) and of tp, beside the whole program.

    Attributes:
        whole: the program of whole sequences, and `values` of its leaves.
        planned, sharded: the program of one cp rank, decided over tp, and that of its ranks.
        cp: ranks of the axis.
        inputs: how inputs that come in parts are dealt over it, by name; `outputs`: and all tensors that come out.
    """

    whole: Capture
    values: Values
    planned: Planned
    sharded: Sharded
    cp: int
    inputs: Mapping[str, Layout]
    outputs: Sequence[Layout]

    def run(self) -> Report:
        """Compare outputs and gradients of parameters and inputs.

        Raises:
            InputError: the model draws random numbers: the ranks draw others than one device.
        """
        if any(draws(n) for n in self.whole.graph.nodes):
            raise InputError("the model draws random numbers, which every cp rank does for itself: prove it in eval().")
        with promoted(self.whole.graph, self.sharded.graph):
            return self._compared()

    def _compared(self) -> Report:
        tp = self.planned.tp
        leaf_values = self.values.doubled()
        graded = {n for n, leaf in self._pairs() if self._graded(leaf)}
        leaves = {n: own_leaf(v, n in graded) for n, v in leaf_values.items()}
        original = expect(self.whole.graph, leaves, self.whole.mutations)
        expected = _tensors(original.outputs)
        rank_leaves = self.leaves()
        try:
            rank_outputs = [_tensors(o) for o in run(self.sharded, tp, rank_leaves, outer=self.cp)]
        except StepError as error:
            return self._report(0.0, 0.0, 0, _difference("forward", str(error).splitlines()[0], float("inf")))
        off = max((self._output_error(rank_outputs, x, i) for i, x in enumerate(expected)), default=0.0)
        if not off <= TOLERANCE:
            return self._report(off, 0.0, len(expected), _difference("forward", "an output", off))
        torch.stack([self._loss(values, r // tp, expected) for r, values in enumerate(rank_outputs)]).sum().backward()
        pairs = [pair for pair in self._pairs() if pair[0] in graded]
        errors = {n.name: self._gradient_error(n, rank_leaves[new], leaves[n], original.largest) for n, new in pairs}
        name = max(errors, key=lambda n: errors[n], default="")
        worst = errors.get(name, 0.0)
        bad = None if worst <= TOLERANCE else _difference("backward", f"the gradient of {name}", worst)
        return self._report(off, worst, len(expected) + len(errors), bad, original.failed)

    def _report(self, out: float, grad: float, count: int, difference: Difference | None, failed: str = "") -> Report:
        return Report(self.planned.tp, None, out, grad, 0.0, count, difference, forward_only=failed, cp=self.cp)

    def leaves(self) -> dict[fx.Node, list[Any]]:
        """For every placeholder of the ranks' program its value on each rank, in float64."""
        leaf_values = self.values.doubled()
        return {new: self._dealt(n, new, leaf_values[n], self._graded(new)) for n, new in self._pairs()}

    def _pairs(self) -> list[tuple[fx.Node, fx.Node]]:
        """Every leaf of the whole program with that of the ranks'."""
        wholes = [leaf.node for leaf in self.whole.leaves]
        return list(zip(wholes, [n for n in self.sharded.graph.nodes if n.op == "placeholder"], strict=True))

    def _graded(self, node: fx.Node) -> bool:
        return node in self.sharded.origin and self.sharded.origin[node][0] in self.planned.grads

    def _spec(self, layout: Layout) -> Spec:
        bound = {str(s): self.values.leaves[n].shape[d] for s, (n, d) in self.whole.symbols.items()}

        def number(size: Any) -> int:
            if isinstance(size, int):
                return size
            return int(size.subs({s: bound[str(s)] for s in size.free_symbols}))

        return layout.to_runtime(number)

    def _over(self, node: fx.Node) -> Layout | None:
        """How an input is dealt over cp; None where every rank has it whole."""
        leaf = next(x for x in self.whole.leaves if x.node is node)
        return self.inputs.get(leaf.name) if leaf.kind.passed else None

    def _dealt(self, node: fx.Node, new: fx.Node, value: Any, wanted: bool) -> list[Any]:
        """A leaf's value on every rank of both axes."""
        if not isinstance(value, Tensor):
            return [value] * (self.cp * self.planned.tp)
        over = self._over(node)
        parts = [value] * self.cp if over is None else self._spec(over).split(value, self.cp)
        spec = self._spec(self.sharded.layouts.get(new, R))
        return [own_leaf(v, wanted) for part in parts for v in spec.split(part, self.planned.tp)]

    def _output_error(self, rank_outputs: list[list[Tensor]], whole: Tensor, i: int) -> float:
        """Of an output: whole on the tp ranks, and over cp as it was decided."""
        tp = self.planned.tp
        ranks = [outputs[i] for outputs in rank_outputs]
        spec = self._spec(self.outputs[i])
        return max(layout_error(ranks[t::tp], spec, whole.detach()) for t in range(tp))

    def _loss(self, outputs: list[Tensor], c: int, expected: list[Tensor]) -> Tensor:
        """What a rank differentiates: gradients are the mean over cp of what each has for its part."""
        total = torch.zeros((), dtype=torch.float64)
        for value, whole, layout in zip(outputs, expected, self.outputs, strict=True):
            if not whole.is_floating_point():
                continue
            if layout.sharded_dim is None:
                total = total + (loss([value]) if layout == I else 0 * value.sum())
            else:
                own = self._spec(layout).split(weights(whole), self.cp)[c]
                total = total + self.cp * weighted(value, own)
        return total

    def _gradient_error(self, node: fx.Node, ranks: list[Tensor], whole: Tensor, top: float) -> float:
        """Of a leaf: put together over tp as it lies there, and over cp as a mean, or part by part."""
        if not has_grad(whole):
            return 0.0
        tp, over = self.planned.tp, self._over(node)
        dual = self._spec(self.sharded.layouts[dict(self._pairs())[node]].dual)
        grads = [grad_or_zeros(x) for x in ranks]
        parts = [dual.recombine(grads[c * tp : c * tp + tp]) for c in range(self.cp)]
        expected: Any = whole.grad
        grad = torch.stack(parts).mean(0) if over is None else self._spec(over).recombine(parts) / self.cp
        return relative(grad, expected, top)


def _difference(direction: str, what: str, error: float) -> Difference:
    return Difference(direction, what, "", "", error, f"over cp x tp {what} is off by {error:.2e}")


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in compat.tree_leaves(outputs) if isinstance(x, Tensor)]
