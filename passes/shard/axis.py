"""Rules and writers of a mesh axis, for planning and rewriting: those of tensor parallelism.

Planner and rewriter are the same for every axis; what a leaf may be, what an output must be and what gathering costs
are answers of an object that is handed in. Those of the batch axis are in `batch_axis.py`, those of a rule's proof in
`autotp/proof/rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from autotp.cost.prices import Surcharge
from autotp.ir.graph import Capture, Leaf, Value, outputs_of, resolve, tensors
from autotp.ir.layouts import Distribution, I, Layout, P, Partition, R, SlotLayouts
from autotp.ir.op import Op, Rule
from autotp.ir.program import Planned
from autotp.rules.core import rule_of
from autotp.rules.local import Sizes

from .states import as_read

Partitions = Callable[[fx.Node, int], Iterable[Distribution]]  # of a dimension of an output: what it may have
Seed = tuple[fx.Node, int, Partition]  # a leaf, a dimension of it, and how that may be sharded


class AxisRules:
    """Answers of an axis to the planner; by default those of tensor parallelism, where all is the planner's choice."""

    ignores_states: bool = False  # states are inputs and outputs like others, whose layouts need not be the same

    @property
    def surcharge(self) -> Surcharge | None:
        """Additions of the axis to the prices of operators and conversions."""
        return None

    def decides(self, node: fx.Node) -> bool:
        """Say whether this operator has a choice; one that has none is copied."""
        return True

    def rule(self, op: Op) -> Rule | None:
        """Read what may be split of an operator."""
        return rule_of(op)

    def fills(self, loop: Distribution, ranks: int) -> bool:
        """Say whether every rank certainly owns something of a loop that is sharded so."""
        return loop.full(ranks)

    def seeds(self, leaves: Iterable[Leaf], ranks: int) -> list[Seed] | None:
        """Give the partitions that everything else follows from; None: of all dimensions of leaves and views."""
        return None

    def leaf(self, leaf: Leaf, graded: bool, ranks: int) -> Layout | None:
        """Give the one layout that a leaf may have, which carries a gradient or not; None: any that its kind may."""
        return None

    def outputs(self, program: Capture, grads: Set[fx.Node], ranks: int, partitions: Partitions) -> SlotLayouts | None:
        """Give the layouts of the program's tensor outputs; None: whole, or as they are pinned."""
        return None


TENSOR = AxisRules()


class Result(NamedTuple):
    """One output of the program: a value with the layout that it leaves in, or a size or literal `x`."""

    x: object
    value: Value | None = None
    layout: Layout | None = None


class AxisWriter:
    """Answers of an axis to the rewriter."""

    rereads: bool = False  # sizes that the program reads off its inputs are computed anew, as inputs are slices

    def sizes(self, graph: fx.Graph) -> Sizes:
        """Make what computes sizes in the new graph."""
        return Sizes(graph, {})

    def results(self, planned: Planned) -> list[Result]:
        """List the program's outputs in order."""
        raise NotImplementedError

    def emitted(self, node: fx.Node, new: Iterable[fx.Node]) -> None:
        """Mark the nodes that were written for one operator; those without a module are run where they stand."""

    def leave(self, graph: fx.Graph, planned: Planned, values: Sequence[Any]) -> tuple[Any, ...]:
        """Give what the new graph returns, where the results have these values."""
        return tuple(values)


@dataclass(frozen=True)
class TensorWriter(AxisWriter):
    """Writer of tp: outputs leave whole; with `sharded` as they are made, where DTensor has a placement for that."""

    sharded: bool = False

    def results(self, planned: Planned) -> list[Result]:
        return results(planned, lambda position, x: self._layout(planned, position, x))

    def _layout(self, planned: Planned, position: int, x: fx.Node) -> Layout:
        node, index = resolve(x)
        graded = node in planned.grads
        whole = I if graded else R
        state = planned.program.becomes(position)
        if state is not None and state in planned.states:
            return as_read(planned.states[state], graded)
        if not self.sharded or position in planned.program.mutations:
            return whole
        pinned = planned.decisions.get(planned.program.graph.output_node())
        if pinned is not None:
            return pinned.ins[outputs_of(planned.program).index(x)]
        layout = planned.decisions[node].outs[index]
        if layout.sharded_dim is not None:
            return layout if layout.plain(planned.tp) else whole
        return layout if graded and layout == P else whole


def results(planned: Planned, layout: Callable[[int, fx.Node], Layout]) -> list[Result]:
    """List the outputs of the captured program; `layout(position, x)` gives that of a tensor among them."""
    out = []
    for i, x in enumerate(planned.program.results):
        tensor = isinstance(x, fx.Node) and bool(tensors(x))
        out.append(Result(x, resolve(x), layout(i, x)) if tensor else Result(x))
    return out
