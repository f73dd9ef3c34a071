"""Compare a per-rank program with the captured graph, value by value and gradient by gradient, in float64."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autotp import compat
from autotp.ir.graph import resolve, short_name
from autotp.ir.layouts import Groups, I, Layout, R, Size
from autotp.ir.marks import mark
from autotp.ir.program import Planned, Sharded
from autotp.ir.scopes import module_path
from autotp.ir.specs import Spec

from .expected import Expected, expect, watched
from .numerics import grad_or_zeros, largest, layout_error, loss, own_leaf, weighted, weights
from .report import TOLERANCE, Difference, Report
from .simulate import StepError, Values, promoted, run

HANDS_ON = (operator.getitem, torch.ops.aten.detach.default)  # what these give is made where their operand is


def compare(planned: Planned, sharded: Sharded, values: Values) -> Report:
    """Run the captured graph and the per-rank program on the same values and compare all that they compute.

    The loss is one fixed linear functional of all outputs, so that every element of them has a gradient of its own.

    Args:
        planned, sharded: the decided graph and its program for `planned.tp` ranks.
        values: of the graph's leaves; sizes other than the captured ones are allowed where they are symbolic.

    Returns:
        A `Report` without plan and capture error.
    """
    leaf_values, random_state = values.doubled(), torch.get_rng_state()
    with promoted(planned.program.graph, sharded.graph):
        leaves = {n: own_leaf(v, n in planned.grads) for n, v in leaf_values.items()}
        expected = expect(planned.program.graph, leaves, planned.program.mutations)
        torch.set_rng_state(random_state)  # the ranks draw what the original drew
        proof = _Proof(planned, sharded, _bind(planned, leaf_values), expected, leaf_values)
        difference, inside = proof.run()
    errors = proof.output_error, proof.gradient_error, 0.0
    return Report(planned.tp, None, *errors, proof.compared, difference, forward_only=expected.failed, inside=inside)


def _bind(planned: Planned, leaf_values: Mapping[fx.Node, Any]) -> dict[str, int]:
    """The size of every symbol, by name."""
    return {str(symbol): leaf_values[node].shape[d] for symbol, (node, d) in planned.program.symbols.items()}


@dataclass
class _Proof:
    """The simulated ranks: what they made of every value, and how it compares."""

    planned: Planned
    sharded: Sharded
    sizes: Mapping[str, int]
    expected: Expected
    leaf_values: Mapping[fx.Node, Any]
    rank_values: dict[fx.Node, list[Any]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    output_error: float = 0.0
    gradient_error: float = 0.0
    compared: int = 0

    def run(self) -> tuple[Difference | None, Difference | None]:
        """The first operator that differs; it comes second where no result differs."""
        inside, result = self.forward()
        if result is not None or self.expected.failed:
            return result and (inside or result), None if result else inside
        within, result = self.backward()
        inside = inside or within
        return result and (inside or result), None if result else inside

    def forward(self) -> tuple[Difference | None, Difference | None]:
        """The first value that differs, and the first result: an output, or a buffer or input that is written to."""
        graphs = self.sharded.graph, self.planned.program.graph
        leaves = zip(*(g.find_nodes(op="placeholder") for g in graphs), strict=True)
        failed: StepError | None = None
        try:
            inputs = {n: self._deal(n, self.leaf_values[whole]) for n, whole in leaves}
            self.outputs = run(self.sharded, self.planned.tp, inputs, self._keep)
        except StepError as e:
            failed = e
        first: Difference | None = None
        for node, ranks in self.rank_values.items():
            error = self._value_error(node, ranks)
            if not error <= TOLERANCE:
                difference = self._blame(node, error, f"the recombined value is off by {error:.2e}")
                first = first or difference
                if failed is not None or node.op == "placeholder":
                    return first, difference
        if failed is not None:
            return first, self._blame(failed.node, float("inf"), f"it fails: {str(failed).splitlines()[0]}")
        return first, self._compare_outputs()

    def _deal(self, node: fx.Node, value: Any) -> list[Any]:
        """A leaf's value on every rank, as its layout says."""
        if not isinstance(value, Tensor):
            return [value] * self.planned.tp
        differentiable = node in self.sharded.origin and self.sharded.origin[node][0] in self.planned.grads
        spec = self._spec(self.sharded.layouts.get(node, R))
        return [own_leaf(v, differentiable) for v in spec.split(value.detach(), self.planned.tp)]

    def _keep(self, node: fx.Node, ranks: list[Any]) -> None:
        if node in self.sharded.origin:
            self.rank_values[node] = [watched(v) for v in ranks]

    def _spec(self, layout: Layout, node: fx.Node | None = None) -> Spec:
        def number(size: Size | Groups) -> Any:
            if isinstance(size, int):
                return size
            if isinstance(size, Groups):
                assert node is not None, "a leaf cannot lie by groups"
                return self.expected.values[self.sharded.origin[self.sharded.ends[node]]]
            return int(size.subs({s: self.sizes[str(s)] for s in size.free_symbols}))  # type: ignore[arg-type]

        return layout.to_runtime(number)

    def _value_error(self, node: fx.Node, ranks: list[Any]) -> float:
        origin = self.sharded.origin[node]
        whole = self.expected.values.get(origin)
        if whole is None:
            return 0.0
        self.compared += 1
        spec = self._spec(self.sharded.layouts[node], node)
        error = layout_error(ranks, spec, whole.detach())
        if error <= TOLERANCE:
            return error
        return layout_error(ranks, spec, whole.detach(), self._scale(origin[0]))

    def _scale(self, node: fx.Node) -> float:
        """The largest of what a value is made of: a sum of these may be zero. A buffer that an operator writes to is
        made of what that reads."""
        while node.target in HANDS_ON:
            node = node.all_input_nodes[0]
        makers = list(node.users) if node.op == "placeholder" else [node]
        read = [self.expected.values.get(resolve(i)) for maker in makers for i in maker.all_input_nodes]
        return max((largest(v) for v in read if v is not None and not v.is_complex()), default=0.0)

    def _compare_outputs(self) -> Difference | None:
        """Every output is whole on every rank, but a state, of which a rank has its part."""
        wholes = compat.tree_leaves(self.planned.program.graph.output_node().args[0])
        nodes = compat.tree_leaves(self.sharded.graph.output_node().args[0])
        ranks = [compat.tree_leaves(o) for o in self.outputs]
        for i, (node, whole) in enumerate(zip(nodes, self.expected.outputs, strict=True)):
            parts = [r[i] for r in ranks]
            state = self.planned.program.becomes(i)
            if isinstance(whole, Tensor):
                is_mutation = i in self.planned.program.mutations
                scale = self._scale(wholes[i]) if is_mutation and isinstance(wholes[i], fx.Node) else 0.0
                spec = self._spec(I if state is None else self.sharded.states.get(state, I))
                error = layout_error(parts, spec, whole.detach(), scale)
            else:
                equal = all(v == whole for v in parts)
                error = 0.0 if equal else float("inf")
            if not error <= TOLERANCE:
                what = f"output {i}" if state is None else f"the state {state}"
                return self._blame(node, error, f"{what} is off by {error:.2e}")
            self.output_error = max(self.output_error, error)
        return None

    def backward(self) -> tuple[Difference | None, Difference | None]:
        """The first gradient that differs, from the last value made back to the parameters, and the first of a leaf."""
        totals = [self._loss(compat.tree_leaves(o), rank) for rank, o in enumerate(self.outputs)]
        failed: RuntimeError | None = None
        if any(t.requires_grad for t in totals):
            try:
                torch.stack(totals).sum().backward()
            except RuntimeError as e:
                failed = e
        first: Difference | None = None
        for node in reversed(self.rank_values):
            error = 0.0 if mark(node).conversion is not None else self._gradient_error(node)
            if error <= TOLERANCE:
                self.gradient_error = max(self.gradient_error, error)
                continue
            detail = f"the backward fails: {failed}" if failed else f"the gradient is off by {error:.2e}"
            difference = self._difference("backward", node, error, detail)
            first = first or difference
            if failed or node.op == "placeholder":
                return first, difference
        if failed is None:
            return first, self._compare_written()
        return first, Difference("backward", "?", "?", "", float("inf"), f"the backward fails: {failed}")

    def _compare_written(self) -> Difference | None:
        """What buffers have after the backward, which may write to them."""
        wholes = compat.tree_leaves(self.planned.program.graph.output_node().args[0])
        nodes = compat.tree_leaves(self.sharded.graph.output_node().args[0])
        ranks = [compat.tree_leaves(o) for o in self.outputs]
        for i, whole in self.expected.final_values.items():
            if self.planned.program.becomes(i) is None and not whole.requires_grad:
                error = layout_error([r[i] for r in ranks], self._spec(I), whole, self._scale(wholes[i]))
                if not error <= TOLERANCE:
                    name = self.planned.program.mutations[i]
                    return self._difference("backward", nodes[i], error, f"it leaves {name} off by {error:.2e}")
        return None

    def _loss(self, outputs: list[Any], rank: int) -> Tensor:
        """The loss on one rank: of states, of which it has a part, with that part's weights."""
        states = {i: self.sharded.states.get(self.planned.program.becomes(i) or "", I) for i in range(len(outputs))}
        total = loss([v for i, v in enumerate(outputs) if states[i].sharded_dim is None])
        for i, layout in states.items():
            whole = self.expected.outputs[i]
            if layout.sharded_dim is not None and whole.is_floating_point():
                total = total + weighted(outputs[i], self._spec(layout).split(weights(whole), self.planned.tp)[rank])
        return total

    def _gradient_error(self, node: fx.Node) -> float:
        whole = self.expected.values.get(self.sharded.origin[node])
        if whole is None or whole.grad is None:
            return 0.0
        ranks = [grad_or_zeros(v) for v in self.rank_values[node]]
        self.compared += 1
        return layout_error(ranks, self._spec(self.sharded.layouts[node].dual, node), whole.grad, self.expected.largest)

    def _blame(self, node: fx.Node, error: float, detail: str) -> Difference:
        """The value itself, unless an operand of its operator arrives in another layout than was decided."""
        result = next((n for n in _onwards(node) if n in self.sharded.origin), node)
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
        """The planned values that this node is made of, through what its rule wrote in between."""
        arrivals, todo, visited = [], list(node.all_input_nodes), set()
        while todo:
            n = todo.pop(0)
            if n in self.sharded.origin:
                arrivals += [n] if n not in visited else []
            elif n not in visited:
                todo += n.all_input_nodes
            visited.add(n)
        return arrivals

    def _difference(self, direction: str, node: fx.Node, error: float, detail: str) -> Difference:
        origin = self.sharded.origin[node][0] if node in self.sharded.origin else node
        nodes = [n for n, (o, _) in self.sharded.origin.items() if o is origin]
        conversions = [n.name for n in nodes if mark(n).conversion is not None]
        detail += f" (conversions of this value: {', '.join(conversions)})" if conversions else ""
        path = module_path(origin)
        return Difference(direction, origin.name, short_name(origin.target), path[-1] if path else "", error, detail)


def _onwards(node: fx.Node) -> list[fx.Node]:
    """The node and those after it: what a rule writes for an operator comes just before its result."""
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) :]
