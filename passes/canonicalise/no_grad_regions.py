"""Regions under `torch.no_grad` before a graph is traced a second time, which would forget them.

What such a region reads is detached in front of it: then whatever it makes, and writes to buffers, carries no gradient.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from torch import fx

from autotp.ir.graph import CUTS, Env, floating
from autotp.ir.op import aten, is_tensor

from .functionalise import is_region, memory, mutates, region_body, without_gradient, written_operand


def detach_regions(graph: fx.Graph, leaves: Set[str]) -> fx.Node | None:
    """Detach what regions under no_grad read.

    Args:
        graph: of an export whose fake values share memory where the real ones do.
        leaves: names of the placeholders that are parameters, or inputs that require a gradient.

    Returns: what writes, without a gradient, into a value that carries one and keeps it as it was: no operator says
        this. None where nothing does.
    """
    flow = _Flow(graph, {n for n in graph.find_nodes(op="placeholder") if n.name in leaves})
    flow.run()
    return next(iter(flow.faults), None)


@dataclass
class _Flow:
    """The values of a graph that carry a gradient.

    Attributes:
        carries: those values. places: memory of what carries one. cut: values that share such memory, detached.
        faults: what writes into one without a gradient.
    """

    graph: fx.Graph
    carries: set[fx.Node]
    places: set[int] = field(default_factory=set)
    cut: set[fx.Node] = field(default_factory=set)
    faults: list[fx.Node] = field(default_factory=list)

    def run(self) -> None:
        self.memory = memory(self.graph)
        for node in self.carries:
            self.places |= self.memory[node]
        for node in list(self.graph.nodes):
            if is_region(node):
                self._region(node)
            elif node.op == "call_function":
                self._operator(node)

    def carrying(self, node: fx.Node) -> bool:
        return node in self.carries or (node not in self.cut and bool(self.memory[node] & self.places))

    def _operator(self, node: fx.Node) -> None:
        operands = [*filter(is_tensor, node.all_input_nodes)]
        target = written_operand(node) if mutates(node) else None
        if target is not None and target in self.cut and self.memory[target] & self.places:
            self.faults.append(node)
        if node.target in CUTS or any(x in self.cut and self.memory[x] & self.memory[node] for x in operands):
            self.cut.add(node)
        elif floating(node.meta.get("val")) and any(map(self.carrying, operands)):
            self.carries.add(node)
            self.places |= self.memory[node]

    def _region(self, node: fx.Node) -> None:
        module, operands = region_body(node, self.graph.owning_module)
        body = module.graph
        carried = {inner: x for inner, x in operands.items() if is_tensor(x) and self.carrying(x)}
        if without_gradient(node):
            self._detach(node, body, carried)
            return
        inner = _Flow(body, set(carried))
        inner.run()
        self.faults += inner.faults
        results = body.output_node().args[0]
        for user in node.users:
            result = results[user.args[1]]  # type: ignore[index]
            if isinstance(result, fx.Node) and is_tensor(result) and inner.carrying(result):
                self.carries.add(user)
                self.places |= self.memory[user]

    def _detach(self, region: fx.Node, body: fx.Graph, carried: Env) -> None:
        of = memory(body)
        writes = [n for n in body.nodes if mutates(n)]
        of_carried = set().union(*(of[inner] for inner in carried))
        self.faults += [n for n in writes if of[n] & of_carried]
        for x in dict.fromkeys(carried.values()):
            with self.graph.inserting_before(region):
                new = self.graph.call_function(aten.detach.default, (x,))
                new.meta = {**x.meta, "nn_module_stack": region.meta.get("nn_module_stack")}
                region.replace_input_with(x, new)
