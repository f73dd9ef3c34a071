"""The pass that shards a program over an axis of the mesh, and leaves one rank's in its place.

A captured program speaks of whole inputs. Planned over the ranks of an axis by the rules and the solver that tp has, it
becomes a program of parts, with the conversions that the ranks need, such as the reduction of a mean loss. That is an
ordinary program again, which the next axis shards as any other: dp, then cp, then tp, whose plan is the product of
all and whose rank is filled in last. What dp and cp have of their own are their policies: `batch_axis.py` and
`sequence_axis.py`. What a gradient of a weight lacks, the sum over both, is no operator of the program: it comes with
the backward (`autotp.runtime.data_parallel`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autotp.cost import Cluster
from autotp.cost.compute import size_hint
from autotp.ir.graph import BUFFER, TABLE, Capture, computed, outputs_of, resolve
from autotp.ir.layouts import Layout, Layouts, Size, SlotLayouts
from autotp.ir.marks import KEY, BatchConversion, Mark, mark
from autotp.ir.op import expression, sizes
from autotp.ir.sizes import substitute
from autotp.passes.base import Changes, Pass
from autotp.passes.decompose.loss_sums import take_sums_apart
from autotp.rules.local import ARITHMETIC

from .batch_axis import BatchRules, BatchWriter
from .decide import decide
from .own_rows import calls, copied, fold, unfold
from .planner import Builder
from .rewrite import Rewriter
from .travel import Journey, own_experts, refuse_staying, travelling


@dataclass(frozen=True)
class Dealt:
    """Layouts over an axis of what a call passes and gives, with the sizes of the whole.

    Attributes:
        axis: its name. ranks: on it. symbol: of the size that is sharded.
        inputs, weights: those that come in parts. outputs: all tensors, in order. notes: of it, in words.
    """

    axis: str
    ranks: int
    symbol: sympy.Symbol
    inputs: Layouts
    outputs: SlotLayouts
    notes: list[str]
    weights: Layouts


@dataclass(frozen=True)
class DealAxis(Pass[Capture]):
    """Puts the program of one rank of an axis in place of that of whole inputs; the symbol of the sharded size then
    means a rank's.

    Attributes:
        policy: of the axis. ranks: on it.
        inner: ranks of tp that each of them has, where these split heads first.
        cluster: the machines that it is priced on; None for h100.
        ep: ranks of it, or groups of ranks, over which experts are sharded, whose rows travel; 1 for experts whole on
            each.
    """

    name = "deal-axis"
    policy: type[BatchRules] = BatchRules
    ranks: int = 1
    inner: int = 1
    cluster: Cluster | None = None
    ep: int = 1

    def idle(self, program: Capture) -> str:
        """Run only where there are several ranks."""
        return f"{self.policy.axis}=1" if self.ranks == 1 else ""

    def run(self, program: Capture) -> Changes:
        """Plan the program over the ranks, and write one rank's.

        Raises:
            CaptureError: it cannot be sharded; the policy gives the reason.
        """
        program.notes += self.deal(program).notes
        return Changes(len(self.policy.conversions(program)), f"conversions over {self.policy.axis}")

    def deal(self, program: Capture) -> Dealt:
        """Do so, and return the layouts of inputs and outputs over the axis; see `run`."""
        symbol = self.policy.symbol(program)
        take_sums_apart(program)
        if self.policy.by_examples:
            fold(program, symbol)
        if self.ep > 1:
            refuse_staying(program)
        rules = self.policy.of(program, symbol, self.ranks, self.inner)
        machines = Cluster.resolve(self.cluster)
        # Ranks that are neighbours here have those of tp between them.
        machines = replace(machines, devices_per_node=max(machines.devices_per_node // self.inner, 1))
        inputs = {leaf.name: rules.leaf(leaf, False, self.ranks) for leaf in program.inputs if rules.sliced(leaf)}
        builder = Builder(program, self.ranks, machines, axis=rules)
        planned, goals = decide(builder), builder.goals()
        layouts = dict(zip(map(resolve, outputs_of(program)), goals, strict=True))
        sharded = Rewriter(planned, builder.prices.convert, BatchWriter(symbol, self.ranks, layouts)).run()
        Localised(program, sharded.graph, self, symbol).run()
        notes = rules.settle(program, planned, inputs)
        notes += [travelling(calls(program), self.ranks, self.ep)] if self.ep > 1 else []
        owned = own_experts(program, self.ranks) if self.ep > 1 else {}
        journey = partial(Journey, ranks=self.ranks, ep=self.ep, owned=owned)
        unfold(program, copied if self.ep == 1 else journey)
        weights = {x.name: owned[x.node] for x in program.leaves if x.node in owned}
        program.owned = dict.fromkeys(weights, self.ranks)
        return Dealt(self.policy.axis, self.ranks, symbol, inputs, goals, notes, weights)


def own_copy(program: Capture) -> Capture:
    """Copy the record of a program, to be changed while the other stays."""
    copied = replace(
        program, notes=[*program.notes], guards=[*program.guards], hints=dict(program.hints),
        symbols=dict(program.symbols), ranges=dict(program.ranges),
    )  # fmt: skip
    copied.own_graph()
    return copied


def _strided(val: Tensor, shape: list[Any]) -> Tensor:
    """Make a fake tensor of this shape with the order in memory of `val`, which says what operators copy.

    Args:
        val: expanded dimensions have stride 0. shape: of as many dimensions.
    """
    strides = [size_hint(n) for n in val.stride()]
    order = sorted(range(val.ndim), key=lambda d: -strides[d])
    sizes = []
    for d in order:
        sizes.append(shape[d] if strides[d] else 1)  # an expanded dimension has stride 0, and one element in memory
    empty = val.new_empty(sizes)
    return empty.permute([order.index(d) for d in range(val.ndim)]).expand(shape)


class Localised:
    """Gives the nodes of a rank's graph their local values, and puts it in the place of that of whole inputs.

    Args:
        program: of whole inputs. graph: of one rank, as it was written. dealt: the axis. symbol: of the sharded size.
    """

    def __init__(self, program: Capture, graph: fx.Graph, dealt: DealAxis, symbol: sympy.Symbol) -> None:
        self.program, self.graph, self.dealt, self.symbol = program, graph, dealt, symbol
        self.whole: Mapping[Any, int] = {symbol: dealt.ranks * symbol}  # type: ignore[dict-item]
        self.symints = {s: node.meta["val"].shape[d] for s, (node, d) in program.symbols.items()}
        self.tensor = cache(self._tensor)  # copies of a block have the values of the first: so have theirs

    def run(self) -> None:
        for node in self.graph.nodes:
            self._value(node)
        program = self.program
        before = program.graph.find_nodes(op="placeholder")
        env = dict(zip(before, self.graph.find_nodes(op="placeholder"), strict=True))
        low, high = program.ranges.get(self.symbol, (1, 2**62))
        program.move(self.graph, env)
        for leaf in program.leaves:
            leaf.kind = BUFFER if leaf.kind is TABLE else leaf.kind
        program.ranges = {**program.ranges, self.symbol: (-(-low // self.dealt.ranks), high // self.dealt.ranks)}
        program.guards = [substitute(g, self.whole) for g in program.guards]

    def _value(self, node: fx.Node) -> None:
        """Write the mark and the local value of one node, in the place of those of the whole."""
        old = mark(node)
        batch, axis = old.batch, old.axis
        # The layouts over the axis are done with: what is left is that a call converts over it, an operator for others.
        if old.conversion is not None:
            batch = BatchConversion(*old.conversion, self.dealt.ranks, self.dealt.policy.axis, self.dealt.inner)
        if axis == "tp":  # as planner and rewriter say for every axis
            axis = self.dealt.policy.axis
        # A new mark, without layout, flops and saved bytes: the next plan would take those of the whole for its own.
        node.meta[KEY] = Mark(no_grad=old.no_grad, batch=batch, axis=axis, scope=old.scope)
        if node.op in ("placeholder", "output"):
            return
        val = node.meta.get("val")
        # A size that the rewrite counts, such as 2 * batch, has no value yet; of the others the shape is the whole
        # batch's.
        if old.layout is not None and isinstance(val, Tensor):
            node.meta["val"] = self.tensor(val, old.layout)
        elif val is None:
            node.meta["val"] = computed(node)
        elif isinstance(val, torch.SymInt):
            node.meta["val"] = self._size(expression(val), True)
        elif isinstance(val, list | tuple):
            # Of several results those that something reads have their layouts.
            node.meta["val"] = values = list(val)
            for item in (u for u in node.users if u.target is operator.getitem):
                self._value(item)
                values[int(item.args[1])] = item.meta["val"]  # type: ignore[arg-type]

    def _tensor(self, val: Tensor, layout: Layout) -> Tensor:
        shape = list(sizes(val))
        local: list[Any] = [self._size(n, True) for n in shape]
        dim, distribution = layout.sharded_dim, layout.distribution
        if dim is not None and distribution is not None:
            share = substitute(sympy.sympify(distribution.length), self.whole) / self.dealt.ranks
            local[dim] = self._size(sympy.cancel(share), False)
        same = all(expression(a) == b for a, b in zip(local, shape, strict=True))
        return val if same else _strided(val, local)

    def _size(self, size: Size, whole: bool) -> Any:
        """Give the (symbolic) int of an expression; with `whole` of one that is in terms of the whole batch."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        size = substitute(size, self.whole) if whole else size

        def read(e: Any) -> Any:
            if e.is_Integer:
                return int(e)
            return self.symints[e] if e in self.symints else reduce(ARITHMETIC[type(e).__name__], map(read, e.args))

        return read(size)
