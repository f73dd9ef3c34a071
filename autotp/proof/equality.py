"""Compare a per-rank program with the captured graph, value by value and gradient by gradient, in float64."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import Capture, reached, resolve
from autotp.ir.layouts import I, Layout
from autotp.ir.marks import mark
from autotp.ir.program import Planned, Sharded
from autotp.ir.specs import SUMMANDS, Spec
from autotp.passes.shard.deal import Dealt
from autotp.text import first_line

from .differences import (
    Parts,
    Rounding,
    backward,
    differences,
    grad_or_zeros,
    has_grad,
    largest,
    loss,
    own_leaf,
    weighted,
    weights,
)
from .report import TOLERANCE, Difference, Report
from .run import CallLayouts, Simulated, StepError, Values, promoted, run

Pairs = tuple[Mapping[fx.Node, Any], Mapping[fx.Node, Tensor]]  # what is judged, and what it should be


def compare(
    planned: Planned, sharded: Sharded, values: Values, whole: Capture | None = None, beside: Sequence[Dealt] = ()
) -> Report:
    """Run the captured graph and the per-rank program on the same values and compare all that they compute.

    The loss is one fixed linear functional of all outputs, so that every element of them has a gradient of its own.

    Args:
        planned, sharded: the decided graph and its program for `planned.tp` ranks.
        values: of the captured graph's leaves; sizes other than the captured ones are allowed where they are symbolic.
        whole: the captured graph, where `planned` is that of one rank of axes beside tp; then results and their
            gradients are compared. beside: these axes, the outermost first.

    Returns:
        A `Report` without plan and capture error.
    """
    whole = planned.program if whole is None else whole
    leaf_values, random_state = values.doubled(), torch.get_rng_state()
    call = CallLayouts(whole, sharded, leaf_values, Simulated(planned.tp, beside))
    with promoted(whole.graph, sharded.graph):
        graded = {leaf.node for leaf, node in call.pairs() if sharded.origin.get(node, (node, 0))[0] in planned.grads}
        expected = expect(whole, {n: own_leaf(v, n in graded) for n, v in leaf_values.items()})
        if whole is not planned.program:  # a copy in which losses are sums: its other nodes stand for the same values
            names = {n.name: n for n in expected.nodes}
            same = [n for n in planned.program.graph.nodes if n.name in names and names[n.name].target == n.target]
            expected.nodes |= {n: expected.nodes[names[n.name]] for n in same}
        torch.set_rng_state(random_state)  # the ranks draw what the original drew
        proof = _Proof(planned, call, graded, expected)
        difference, inside = proof.run()
    out, compared = proof.output_error, sum(x.compared for x in (proof.values, proof.gradients, proof.leaf_gradients))
    return Report(planned.tp, None, out, proof.gradient_error, 0.0, compared, difference, forward_only=expected.failed,
                  inside=inside, beside={x.axis: x.ranks for x in beside})  # fmt: skip


@dataclass
class _Expected(Values):
    """Values and gradients of a captured graph.

    Attributes:
        largest: of all gradients: one that is small beside it may be zero but for rounding.
        failed: why there are no gradients.
        final: position of an output -> what a buffer or input has after the backward.
    """

    largest: float = 0.0
    failed: str = ""
    final: dict[int, Tensor] = field(default_factory=dict)


def expect(program: Capture, leaves: Mapping[fx.Node, Any]) -> _Expected:
    """Run a captured graph, and the backward of the loss of its outputs.

    Args:
        program: of whole values. leaves: a value for each placeholder, of which those with gradients are `own_leaf`s.
    """
    values = run(program, {n: [v] for n, v in leaves.items()}, watch=True)
    (outputs,) = values.outputs
    final = {i: outputs[i] for i in program.mutations if isinstance(outputs[i], Tensor)}
    before = {id(v): v.clone() for v in final.values() if not v.requires_grad}  # a backward may write to it too
    outputs = [before.get(id(v), v) for v in outputs]
    failed = backward(loss(outputs))
    graded = [v.grad for v in compat.tree_leaves(list(values.nodes.values())) if has_grad(v)]
    nodes = {n: [before.get(id(v), v)] for n, (v,) in values.nodes.items()}
    return _Expected(nodes, [outputs], max(map(largest, graded), default=0.0), failed, final)


@dataclass
class _Proof:
    """Simulated ranks beside the whole: their values, and the comparison of these."""

    planned: Planned
    call: CallLayouts
    graded: Container[fx.Node]
    expected: _Expected
    ours: Values = field(default_factory=Values)
    output_error: float = 0.0
    gradient_error: float = 0.0

    def __post_init__(self) -> None:
        self.sharded, self.whole, self.on = self.call.sharded, self.call.captured, self.call.on
        self.leaves = {node: leaf for leaf, node in self.call.pairs()}
        self.values = Rounding(TOLERANCE, lambda node: self.call.made_of(self.expected, self.sharded.origin[node][0]))
        self.gradients, self.leaf_gradients = (Rounding(TOLERANCE, self.expected.largest) for _ in range(2))

    def run(self) -> tuple[Difference | None, Difference | None]:
        """Return the first operator that differs; it comes second where no result differs."""
        inside, result = self._forward()
        if result is None and not self.expected.failed:
            within, result = self._backward()
            inside = inside or within
        return result and (inside or result), None if result else inside

    def _forward(self) -> tuple[Difference | None, Difference | None]:
        """Find the first value that differs, and the first result: an output, or a value written to an input."""
        leaves, failed = {}, None
        for node, leaf in self.leaves.items():
            leaves[node] = [own_leaf(v, leaf.node in self.graded) for v in self.call.dealt(leaf, node)]
        try:
            self.ours = run(self.sharded, leaves, self.on, watch=True)
        except StepError as error:
            self.ours, failed = error.values, error
        nodes = () if self.on.beside else self.ours.nodes
        gap = differences(*self.call.paired(self.ours, self.expected, nodes), self.values)
        if failed is not None and gap is None:
            return None, self._blame(failed.node, float("inf"), f"it fails: {first_line(failed)}")
        first = gap and self._blame(gap.key, gap.error, f"the recombined value is off by {gap.error:.2e}")
        # A leaf is a result, and after a failure there are no others.
        return first, first if gap and (failed or gap.key.op == "placeholder") else self._outputs()

    def _written_scale(self, position: int) -> float:
        """Return the largest operand of an output that a buffer or input becomes."""
        node = self.whole.results[position]
        is_mutation = isinstance(node, fx.Node) and position in self.whole.mutations
        return self.call.made_of(self.expected, node) if is_mutation else 0.0

    def _outputs(self) -> Difference | None:
        """Find the first output that differs on some rank; of a state a rank has its part."""
        wholes, ranks = self.expected.outputs[0], self.ours.outputs
        ours, theirs = {}, {}
        for i, x in enumerate(wholes):
            if isinstance(x, Tensor):
                for rank, part in enumerate(self.call.split(x, self._layouts(i))):
                    ours[i, rank], theirs[i, rank] = ranks[rank][i], part
            else:
                ours[i, 0], theirs[i, 0] = Parts([r[i] for r in ranks], self.call.spec(self.call.output_layout(i))), x
        rounding = Rounding(TOLERANCE, lambda key: self._written_scale(key[0]))
        gap = differences(ours, theirs, rounding)
        self.output_error = rounding.worst
        if gap is None:
            return None
        position = gap.key[0]
        state = self.whole.becomes(position)
        what = f"output {position}" if state is None else f"the state {state}"
        return self._blame(self._output_nodes()[position], gap.error, f"{what} is off by {gap.error:.2e}")

    def _layouts(self, position: int) -> list[Layout]:
        """Return the layouts of an output over each axis: those of axes beside tp are of its tensors alone."""
        wholes = self.expected.outputs[0]
        at = sum(isinstance(x, Tensor) for x in wholes[:position])
        return [*(axis.outputs[at] for axis in self.on.beside), self.call.output_layout(position)]

    def _output_nodes(self) -> list[Any]:
        return compat.tree_leaves(self.sharded.graph.output_node().args[0])

    def _backward(self) -> tuple[Difference | None, Difference | None]:
        """Find the first gradient that differs, from the last value back to the leaves, and the first of a leaf."""
        # One backward for all ranks: a conversion of values sends gradients from each rank to every other.
        totals = [self._loss(rank) for rank in range(self.on.world)]
        failed = None
        if any(t.requires_grad for t in totals):
            try:
                torch.stack(totals).sum().backward()
            except RuntimeError as e:
                failed = e
        inner = [n for n in reversed(self.ours.nodes) if n not in self.leaves and not self.on.beside]
        # Values inside come first, from the last one back, so that what is named is where a fault begins.
        pairs = self.call.paired(self.ours, self.expected, inner, backward=True)
        first = self._gradient_gap(pairs, self.gradients, failed)
        result = first if first and failed else self._gradient_gap(self._leaf_gradients(), self.leaf_gradients, failed)
        # A gradient inside that differs and reaches no leaf is no fault, and its error none of the proof's.
        self.gradient_error = (
            self.leaf_gradients.worst if first else max(self.gradients.worst, self.leaf_gradients.worst)
        )
        if failed is None:
            return first or result, result or self._buffer_gap()
        nothing = Difference("backward", "?", "?", "", float("inf"), f"the backward fails: {failed}")
        return first or result, result or nothing

    def _gradient_gap(self, pairs: Pairs, rounding: Rounding, failed: Exception | None) -> Difference | None:
        """Find the first gradient that differs."""
        gap = differences(*pairs, rounding)
        if gap is None:
            return None
        detail = f"the backward fails: {failed}" if failed else f"the gradient is off by {gap.error:.2e}"
        return self._difference("backward", gap.key, gap.error, detail)

    def _leaf_gradients(self) -> Pairs:
        """Pair the gradients of leaves: over axes beside tp they are means, or parts."""
        if not self.on.beside:
            return self.call.paired(self.ours, self.expected, list(reversed(self.leaves)), backward=True)
        ours, theirs = {}, {}
        for node, leaf in reversed(self.leaves.items()):
            value = self.expected.whole((leaf.node, 0))
            if not has_grad(value):
                continue
            parts = [grad_or_zeros(x) for x in self.ours.nodes[node]]
            parts = self._joined(parts, self.on.tp, self.call.spec(self.sharded.layouts[node].dual))
            for at, over in reversed([*enumerate(self.call.over(leaf))]):
                ranks = self.on.beside[at].ranks
                # Of a whole leaf every rank has a summand times as many, of a part that part.
                spec = self.call.spec(over, axis=at) if over.sharded_dim is not None else SUMMANDS
                parts = [x / ranks for x in self._joined(parts, ranks, spec)]
            (ours[node],), theirs[node] = parts, value.grad
        return ours, theirs

    def _joined(self, parts: list[Tensor], ranks: int, spec: Spec) -> list[Tensor]:
        """Recombine the parts of each run of so many ranks."""
        return [spec.recombine(parts[i : i + ranks]) for i in range(0, len(parts), ranks)]

    def _buffer_gap(self) -> Difference | None:
        """Find the first buffer that differs after the backward, which may write to it."""
        ours, theirs = {}, {}
        for i, x in self.expected.final.items():
            if self.whole.becomes(i) is None and not x.requires_grad and not self.on.beside:
                ours[i], theirs[i] = Parts([r[i] for r in self.ours.outputs], self.call.spec(I)), x
        gap = differences(ours, theirs, Rounding(TOLERANCE, self._written_scale))
        if gap is None:
            return None
        detail = f"it leaves {self.whole.mutations[gap.key]} off by {gap.error:.2e}"
        return self._difference("backward", self._output_nodes()[gap.key], gap.error, detail)

    def _loss(self, rank: int) -> Tensor:
        """Return the loss of a rank: its parts of the outputs, times the weights of these parts.

        Gradients are the mean over axes beside tp of what each of their ranks has for its part.
        """
        total = torch.zeros((), dtype=torch.float64)
        for i, whole in enumerate(self.expected.outputs[0]):
            if not (isinstance(whole, Tensor) and (whole.is_floating_point() or whole.is_complex())):
                continue
            value, layouts = self.ours.outputs[rank][i], self._layouts(i)
            # A part has the weights of its place in the whole: over all ranks that is the loss of the whole.
            weight, over = self.call.split(weights(whole), layouts)[rank], [*zip(self.on.beside, layouts, strict=False)]
            if any(x.sharded_dim is None and x != I for _, x in over):  # no gradient goes through it
                weight = 0 * weight
            total = total + math.prod(a.ranks for a, x in over if x.sharded_dim is not None) * weighted(value, weight)
        return total

    def _blame(self, node: fx.Node, error: float, detail: str) -> Difference:
        """Return the value itself, unless an operand of its operator arrives in another layout than was decided."""
        # What a rule writes for an operator comes just before its result.
        nodes = list(node.graph.nodes)
        result = next((n for n in nodes[nodes.index(node) :] if n in self.sharded.origin), node)
        op = self.planned.ops.get(self.sharded.origin[result][0]) if result in self.sharded.origin else None
        if op is not None and mark(result).conversion is None:
            slots = list(zip(map(resolve, op.slots), self.planned.decisions[op.node].ins, strict=True))
            for operand in self._arrivals(result):
                decided = [layout for value, layout in slots if value == self.sharded.origin[operand]]
                has = self.sharded.layouts[operand]
                if decided and has not in decided:
                    arrives = f"arrives at {op.node.name} as {has}, should be {decided[0]}; there {detail}"
                    return self._difference("forward", operand, error, arrives)
        return self._difference("forward", result, error, detail)

    def _arrivals(self, node: fx.Node) -> list[fx.Node]:
        """Return the planned values that this node is made of, through nodes that its rule wrote in between."""
        origin = self.sharded.origin
        read = reached(node.all_input_nodes, lambda n: () if n in origin else n.all_input_nodes)
        return [n for n in read if n in origin]

    def _difference(self, direction: str, node: fx.Node, error: float, detail: str) -> Difference:
        origin = self.sharded.origin[node][0] if node in self.sharded.origin else node
        nodes = [n for n, (o, _) in self.sharded.origin.items() if o is origin]
        conversions = [n.name for n in nodes if mark(n).conversion is not None]
        detail += f" (conversions of this value: {', '.join(conversions)})" if conversions else ""
        return Difference.at(origin, direction, error, detail)
