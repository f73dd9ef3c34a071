"""Values that hang together: regions between modules, and sums over ranks that are taken together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from autotp.ir.graph import resolve
from autotp.ir.layouts import Layout
from autotp.ir.op import Op
from autotp.ir.program import Decision

Port = tuple[str, Any]  # ("op", node), or one side of a module: ("in", node), ("out", node)


class Joined:
    """Disjoint sets."""

    def __init__(self) -> None:
        self.above: dict[Any, Any] = {}

    def root(self, item: Any) -> Any:
        """The one that stands for an item's set."""
        while (up := self.above.get(item, item)) != item:
            item = up
        return item

    def join(self, a: Any, b: Any) -> None:
        """Make one set of two."""
        if (a := self.root(a)) != (b := self.root(b)):
            self.above[a] = b


class Regions(Joined):
    """Sets of ports whose values are split together, or whole together.

    Attributes:
        dims: port -> the dimensions along which its values are split, and whether they are the batch's or sequence's.
        why: of a region that must be whole, the reason; "" where that is no difference from the plan.
    """

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.tp = tp
        self.dims: dict[Port, set[tuple[int, bool]]] = defaultdict(set)
        self.reasons: dict[Port, str] = {}

    def lies(self, port: Port, layout: Layout, shape: tuple[Any, ...]) -> None:
        """Note how a value lies at a port; code between modules knows even parts in one piece only.

        Args:
            port: where it is made or read. layout: of the value. shape: of the whole.
        """
        dim, p = layout.sharded_dim, layout.distribution
        if dim is None or p is None:
            return self.refuse(port, "rows are dealt by group")
        if p.pieces != 1:
            self.refuse(port, "the parts lie in several pieces, and a style cuts in one")
        elif p.static and not (p.even(self.tp) and p.is_plain(self.tp)):
            self.refuse(port, f"{p.length} are not split evenly")
        side = port[0] != "op" and dim != len(shape) - 1
        self.dims[port].add((dim, side or not isinstance(shape[dim], int)))

    def refuse(self, port: Port, reason: str) -> None:
        """Have the values of a port's region whole."""
        self.reasons[port] = self.reasons.get(port) or reason

    @property
    def why(self) -> dict[Port, str]:
        """Root of each refused region -> the reason."""
        out: dict[Port, str] = {}
        for port, reason in self.reasons.items():
            root = self.root(port)
            out[root] = out.get(root) or reason
        return out

    def of_data(self) -> set[Port]:
        """Roots of the regions that are split along batch or sequence."""
        roots = set()
        for port, lies in self.dims.items():
            if any(along for _, along in lies):
                roots.add(self.root(port))
        return roots

    def members(self) -> dict[Port, list[Port]]:
        """Root -> the ports of its region at which something is split."""
        out: dict[Port, list[Port]] = defaultdict(list)
        for port in self.dims:
            out[self.root(port)].append(port)
        return out


class Sums(Joined):
    """The places where sums over ranks are taken: what reads a chain of partial sums decides how its makers leave them.

    Attributes:
        goals: maker of partial sums, or operator that passes them on -> how the sum is to lie; missing for whole.
        passing: operators that pass them on; `loose`: those that make them by themselves, outside all modules.
    """

    def __init__(
        self, ops: Mapping[fx.Node, Op], decisions: Mapping[str, Decision], modules: Mapping[fx.Node, Any],
        ends: list[fx.Node],
    ) -> None:  # fmt: skip
        super().__init__()
        partial = {n for n in ops if decisions[n.name].outs[0].partial}
        wants: dict[fx.Node, list[Any]] = defaultdict(list)
        self.passing: list[fx.Node] = []
        for node, op in ops.items():
            for have, slot in zip(decisions[node.name].ins, op.slots, strict=True):
                maker = resolve(slot)[0]
                if maker not in partial:
                    continue
                if have.partial and node not in modules:
                    self.join(maker, node)
                    self.passing.append(node)
                else:
                    wants[maker].append(have)
        for end in ends:
            wants[resolve(end)[0]].append(None)
        self.loose = [n for n in ops if n in partial and n not in modules and n not in self.passing]
        layouts: dict[fx.Node, set[Any]] = defaultdict(set)
        for maker, reads in wants.items():
            layouts[self.root(maker)] |= set(reads)
        one = {root: next(iter(reads)) for root, reads in layouts.items() if len(reads) == 1}
        goals = {n: one.get(self.root(n)) for n in {*partial, *self.passing}}
        self.goals = {n: x for n, x in goals.items() if x is not None and x.sharded_dim is not None}
