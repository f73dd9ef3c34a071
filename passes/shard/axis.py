"""What planning and rewriting ask of the mesh axis that they are for, and the answers of tensor parallelism.

Planner and rewriter are the same for every axis; what a leaf may be, what an output must be and what gathering costs
are answers of an object that is handed in. Those of the batch axis are in `batch_axis.py`, those of a rule's proof in
`autotp/proof/rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import fx

from autotp import compat
from autotp.cost.prices import Surcharge
from autotp.ir.graph import Capture, Leaf, Value, outputs_of, resolve, tensors
from autotp.ir.layouts import Distribution, I, Layout, P, Partition, R
from autotp.ir.op import Op, Rule
from autotp.ir.program import Planned
from autotp.rules.core import rule_of
from autotp.rules.local import Sizes

from .states import as_read

Partitions = Callable[[fx.Node, int], Iterable[Distribution]]  # of a dimension of an output: what it may have
Seed = tuple[fx.Node, int, Partition]  # a leaf, a dimension of it, and how that may be dealt


class AxisRules(Protocol):
    """What the planner asks of an axis. None leaves it to the planner: whatever the operators' rules allow."""

    @property
    def surcharge(self) -> Surcharge | None:
        """What the axis adds to the prices of operators and conversions."""
        ...

    @property
    def ignores_states(self) -> bool:
        """Whether states are inputs and outputs like others, whose layouts need not be the same."""
        ...

    def decides(self, node: fx.Node) -> bool:
        """Whether this operator has a choice; one that has none is copied."""
        ...

    def rule(self, op: Op) -> Rule | None:
        """What may be split of an operator."""
        ...

    def fills(self, loop: Distribution, ranks: int) -> bool:
        """Whether every rank certainly owns something of a loop that is dealt so."""
        ...

    def seeds(self, leaves: Iterable[Leaf], ranks: int) -> list[Seed] | None:
        """The partitions that everything else follows from; None: of all dimensions of leaves and views."""
        ...

    def leaf(self, leaf: Leaf, graded: bool, ranks: int) -> Layout | None:
        """The one layout that a leaf may have, which carries a gradient or not; None: any that its kind may."""
        ...

    def outputs(
        self, program: Capture, grads: Set[fx.Node], ranks: int, partitions: Partitions
    ) -> tuple[Layout, ...] | None:
        """The layouts of the program's tensor outputs; None: whole, or as they are pinned."""
        ...


@dataclass(frozen=True)
class TensorRules:
    """Over the tp ranks every operator has a choice, and nothing is settled beforehand."""

    surcharge: Surcharge | None = None
    ignores_states: bool = False

    def decides(self, node: fx.Node) -> bool:
        return True

    def rule(self, op: Op) -> Rule | None:
        return rule_of(op)

    def fills(self, loop: Distribution, ranks: int) -> bool:
        return loop.full(ranks)

    def seeds(self, leaves: Iterable[Leaf], ranks: int) -> None:
        return None

    def leaf(self, leaf: Leaf, graded: bool, ranks: int) -> None:
        return None

    def outputs(self, program: Capture, grads: Set[fx.Node], ranks: int, partitions: Partitions) -> None:
        return None


TENSOR = TensorRules()


class Result(NamedTuple):
    """One output of the program: a value with the layout that it leaves in, or a size or literal `x`."""

    x: Any
    value: Value | None = None
    layout: Layout | None = None


class AxisWriter(Protocol):
    """What the rewriter asks of an axis."""

    @property
    def rereads(self) -> bool:
        """Whether sizes that the program reads off its inputs are computed anew, as inputs are slices."""
        ...

    def sizes(self, graph: fx.Graph) -> Sizes:
        """What computes sizes in the new graph."""
        ...

    def results(self, planned: Planned) -> list[Result]:
        """The program's outputs in order."""
        ...

    def emitted(self, node: fx.Node, new: Iterable[fx.Node]) -> None:
        """Called with the nodes that were written for one operator."""
        ...

    def leave(self, graph: fx.Graph, planned: Planned, values: Sequence[Any]) -> tuple[Any, ...]:
        """What the new graph returns, where the results have these values."""
        ...


@dataclass(frozen=True)
class TensorWriter:
    """Outputs leave the tp ranks whole; with `sharded` as they are made, where DTensor has a word for that."""

    sharded: bool = False
    rereads: bool = False

    def sizes(self, graph: fx.Graph) -> Sizes:
        return Sizes(graph, {})

    def results(self, planned: Planned) -> list[Result]:
        return results(planned, lambda position, x: self._layout(planned, position, x))

    def emitted(self, node: fx.Node, new: Iterable[fx.Node]) -> None:
        """Nodes without a module are run where they stand."""

    def leave(self, graph: fx.Graph, planned: Planned, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values)

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
    """The outputs of the captured program; `layout(position, x)` says how a tensor among them leaves."""
    out = []
    for i, x in enumerate(compat.tree_leaves(planned.program.graph.output_node().args[0])):
        tensor = isinstance(x, fx.Node) and bool(tensors(x))
        out.append(Result(x, resolve(x), layout(i, x)) if tensor else Result(x))
    return out
