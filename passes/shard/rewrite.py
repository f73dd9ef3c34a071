"""Rewriter from the captured graph to the program of one rank, with the conversions inserted.

The result is one template for all ranks: calls that depend on the rank are marked, and `specialise` fills it in.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from autotp import compat
from autotp.comm import conversions as convert
from autotp.cost.solver.problem import conversions
from autotp.errors import PlanError
from autotp.ir.graph import Value, copy_graph, copy_node, resolve, tensors
from autotp.ir.layouts import Layout, R
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import Op, expression
from autotp.ir.program import Decision, MeshPlace, Planned, Sharded, sent_as
from autotp.ir.scopes import innermost, scope_path
from autotp.passes.base import Changes, Pass
from autotp.passes.optimise import RankProgram
from autotp.passes.schema import converts, verify
from autotp.rules.local import ShardCall

from .axis import AxisWriter, Result, TensorWriter
from .ends import ends_of, ends_slots


class Rewriter:
    """Copies the captured graph node by node, converting operands to the decided layouts."""

    def __init__(self, planned: Planned, price: Any, axis: AxisWriter) -> None:
        self.planned, self.price, self.axis = planned, price, axis
        self.old = planned.program.graph
        self.new = fx.Graph()
        self.out = Sharded(self.new)
        self.env: dict[fx.Node, Any] = {}
        self.node_of: dict[tuple[Value, Layout], fx.Node] = {}
        self.results = axis.results(planned)
        self.routes = self._routes()
        self.sizes = axis.sizes(self.new)
        self.ends: fx.Node | None = None  # of the operator that is being written

    def run(self) -> Sharded:
        for node in self.old.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                values = [self._output(x, node) for x in self.results]
                self.new.output(self.axis.leave(self.new, self.planned, values))
            elif node in self.planned.decisions:
                last = next(iter(reversed(self.new.nodes)), None)
                self._call(node)
                self.axis.emitted(node, self.new.nodes if last is None else _after(last))
            elif node.target is operator.getitem and resolve(node)[0] in self.planned.decisions:
                continue
            else:
                self._other(node)
        self.new.eliminate_dead_code()
        self.out.states = dict(self.planned.states)
        return self.out

    def _placeholder(self, node: fx.Node) -> None:
        new = copy_node(node, self.new, self.env.__getitem__)
        self.env[node] = new
        if node in self.planned.decisions:
            self._hold(node, 0, new, self.planned.decisions[node].outs[0])
        for symbol, (owner, dim) in self.planned.program.symbols.items():
            if owner is node:
                self.sizes.symbols[symbol] = (new, dim)

    def _other(self, node: fx.Node) -> None:
        """Copy arithmetic on sizes, which is the same on every rank."""
        if self.axis.rereads and node.target is compat.sym_size:
            self.env[node] = self.sizes.of(expression(node.meta["val"]))
            return
        self.env[node] = copy_node(node, self.new, self.env.__getitem__)
        self.sizes.note(self.env[node])

    def _call(self, node: fx.Node) -> None:
        op, decision = self.planned.ops[node], self.planned.decisions[node]
        self.ends = self._ends(op, decision)
        reads = zip(map(resolve, op.slots), decision.ins, strict=True)
        operands = [self.converted(value, layout, node) for value, layout in reads]
        target, args, kwargs = self._local(op, decision, operands)
        new = target if isinstance(target, fx.Node) else self.new.call_function(target, args, kwargs)
        inherit(new, node, axis=mark(new).axis or mark(node).axis)
        self.env[node] = new
        self.sizes.note(new)
        if isinstance(node.meta.get("val"), list | tuple):
            for i, layout in enumerate(decision.outs):
                item = self.new.call_function(operator.getitem, (new, i))
                inherit(item, node, node.meta["val"][i], axis=None)
                self._hold(node, i, item, layout)
        elif tensors(node):
            self._hold(node, 0, new, decision.outs[0])

    def _local(self, op: Op, decision: Decision, operands: list[fx.Node]) -> Any:
        rule = self.planned.rules[op.node]
        local = ShardCall(
            graph=self.new,
            sizes=self.sizes,
            env=self.env,
            operands=operands,
            ins=decision.ins,
            outs=decision.outs,
            factor=self.planned.split(op.node),
            loop=None if decision.loop is None or decision.loop.by_data else decision.loop,
            rule=rule,
            tp=self.planned.tp,
        )
        call = rule.localise(op, local) if rule is not None and rule.localise is not None else local.unchanged(op)
        return (call, (), {}) if isinstance(call, fx.Node) else call

    def _hold(self, node: fx.Node, index: int, new: fx.Node, layout: Layout) -> None:
        self.node_of[(node, index), layout] = new
        self.out.layouts[new] = layout
        write(new, layout=layout)
        self.out.origin[new] = (node, index)
        if layout.groups is not None and self.ends is not None:
            self.out.ends[new] = self.ends

    def converted(self, value: Value, layout: Layout, consumer: fx.Node) -> fx.Node:
        """Give the value in this layout, converted before its first consumer and shared by all."""
        if (value, layout) not in self.node_of:
            source = next(a for a, b in self.routes[value] if b == layout)
            before = self.converted(value, source, consumer)
            self._convert(value, source, layout, before)
        return self.node_of[value, layout]

    def _convert(self, value: Value, source: Layout, layout: Layout, before: fx.Node) -> None:
        wire = sent_as(value[0].target, convert.primitive(source, layout))
        narrow = {} if wire is None else {"wire": wire}
        node = self.sizes.convert(before, source, layout, self.out.ends.get(before, self.ends), **narrow)
        scope = innermost([scope_path(n) for n, slot in self.consumers[value] if slot == layout])
        no_grad = mark(before).no_grad or False  # a leaf says nothing
        inherit(node, before, conversion=(source, layout), scope=scope, axis="tp", batch=None, no_grad=no_grad)
        self._hold(value[0], value[1], node, layout)

    def _ends(self, op: Op, decision: Decision) -> fx.Node | None:
        """Find the ends of the groups by which this operator's operands or results are sharded: of its own block, in a
        fold."""
        ends: dict[fx.Node, None] = {}
        if not self.planned.ends:
            return None
        # An operator over groups reads their ends itself.
        if decision.factor is not None:
            for slot in ends_slots(self.planned.rules[op.node], decision.factor):
                ends[self.converted(resolve(op.slots[slot]), decision.ins[slot], op.node)] = None
        # One that works row by row goes on with its operands' groups.
        for operand, layout in zip(op.slots, decision.ins, strict=True):
            rows = self.node_of.get((resolve(operand), layout))
            if rows in self.out.ends:
                ends[self.out.ends[rows]] = None
        # Where no operand is sharded so yet, as with a row of biases for every token, the layouts' number says which.
        numbers = {x.groups.ends for x in (*decision.ins, *decision.outs) if x.groups is not None}
        for number in numbers if not ends else ():
            ends[self.converted(ends_of(self.planned, number, op.node), R, op.node)] = None
        if len(ends) > 1:
            raise PlanError(f"{op.node.name} joins rows sharded by the groups of two blocks. Please report the model.")
        return next(iter(ends), None)

    def _output(self, result: Result, output: fx.Node) -> Any:
        if result.value is not None and result.layout is not None:
            return self.converted(result.value, result.layout, output)
        return self.env[result.x] if isinstance(result.x, fx.Node) else result.x

    def _routes(self) -> dict[Value, list[tuple[Layout, Layout]]]:
        """Find for every value the conversions that serve all its consumers at least cost."""
        self.consumers: dict[Value, list[tuple[fx.Node, Layout]]] = defaultdict(list)
        # A conversion is paid once for a value and a layout, so all that read the value are asked for together.
        for node, decision in self.planned.decisions.items():
            if node in self.planned.ops:
                for operand, layout in zip(self.planned.ops[node].slots, decision.ins, strict=True):
                    self.consumers[resolve(operand)].append((node, layout))
        # What leaves the program is read as well: a value that nothing else reads is converted for that alone.
        output = self.old.output_node()
        for _, value, layout in self.results:
            if value is not None and layout is not None:
                self.consumers[value].append((output, layout))
        routes = {}

        @cache
        def route(value: Value, produced: Layout, targets: frozenset[Layout]) -> list[tuple[Layout, Layout]]:
            return conversions(produced, targets, lambda a, b: self.price(value, a, b)) or []

        for (node, index), users in self.consumers.items():
            # Equal values of equal blocks go equal ways, which are found once: else as often as there are layers.
            key = self.planned.same.get(node, node), index
            routes[node, index] = route(key, self.planned.decisions[node].outs[index], frozenset(x for _, x in users))
        return routes


def _after(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of a graph that come after this one."""
    while (node := node.next).op != "root":
        yield node


def rewrite(planned: Planned, price: Any, outputs: str = "full") -> Sharded:
    """Write the per-rank program of a planned graph.

    Args:
        planned: the graph with its decisions.
        price: `price(value, a, b)` gives a conversion's seconds.
        outputs: "full"; "sharded": left as they are made, where that is a plain shard or a summand.
    """
    program = Rewriter(planned, price, TensorWriter(outputs == "sharded")).run()
    verify(program, "rewrite", planned=planned)
    return program


def specialise(sharded: Sharded, axes: Mapping[str, MeshPlace]) -> fx.Graph:
    """Write the program of the rank that has this place on each mesh axis, "tp" and where there is one "dp"."""
    graph, env = copy_graph(sharded.graph.nodes)
    for node, new in env.items():
        if axis := mark(node).axis:
            rank, size, group = axes[axis]
            extra = {"group": group} if converts(node) else {}
            new.kwargs = {**new.kwargs, "rank": rank, "tp": size, **extra}
    verify(graph, "specialise")
    return graph


# ---- as passes -------------------------------------------------------------------------------------------------------

# The program of all ranks, and from it that of one, as passes.


@dataclass
class ShardedProgram:
    """A planned program, and what its decisions make of it.

    Attributes:
        planned: the graph with its decisions.
        price: `price(value, a, b)` gives a conversion's seconds.
        sharded: the program of all ranks; until there is one, of a rank that has everything.
    """

    planned: Planned
    price: Callable[..., Any]
    sharded: Sharded | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.planned.program.graph if self.sharded is None else self.sharded.graph


@dataclass(frozen=True)
class ShardOperators(Pass[ShardedProgram]):
    """Writes every operator on a rank's part of its operands, with the conversions between layouts.

    Attributes:
        outputs: "sharded" leaves outputs as they are made, where that is a plain shard or a summand.
    """

    name = "shard-operators"
    outputs: str = "full"

    def run(self, program: ShardedProgram) -> Changes:
        program.sharded = rewrite(program.planned, program.price, self.outputs)
        return Changes(sum(map(converts, program.graph.nodes)), "conversions between layouts")


class Specialise(Pass[RankProgram]):
    """Fills in the rank's place on each mesh axis in the calls that depend on it."""

    name = "specialise"

    def run(self, program: RankProgram) -> Changes:
        program.graph = specialise(Sharded(program.graph), program.axes)
        return Changes(sum("rank" in n.kwargs for n in program.graph.nodes), "calls know their rank")
