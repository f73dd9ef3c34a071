"""The micro-pipeline of Inductor: g and g* in the form that it fuses with matmuls through symmetric memory."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autotp import compat
from autotp.comm import symmetric
from autotp.comm.conversions import g
from autotp.passes.base import Changes

from .base import Optimisation, RankProgram
from .judged import Change, Judged, Position
from .products import dealt, groups, over_tp


@dataclass(frozen=True)
class MicroPipeline(Optimisation):
    """Where a compiled program runs on NVLink: the g and g* that were measured faster in torch's fused operators.

    What Inductor makes of them is no rewrite of this graph, so both ways are a conversion together with its products,
    compiled without and with the fusion.
    """

    name: ClassVar[str] = "micro_pipeline"
    measurable: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def idle(self, program: RankProgram) -> str:
        """Only for Inductor on GPUs that share memory, where somebody measures it."""
        compiled = program.setting.backend == "inductor"
        return self.unshared(program.setting) if compiled else "nowhere: it is a pass of backend='inductor'"

    def run(self, program: RankProgram) -> Changes:
        """Rewrite the conversions; what Inductor then fused is counted when it compiles (`symmetric.Fused`)."""
        if not any(over_tp(n, *symmetric.FORMS) for n in program.graph.nodes):
            return Changes(0, "nowhere: the plan has no g or g*")
        compat.use_symmetric_memory(program.setting.place.group)
        judged = Judged(program, self, _rewritten)
        count = sum(1 for _ in _rewritten(program.graph, judged.refused))
        parts = []
        for (name, on), why in sorted(judged.why.items()):
            parts.append(f"{name} {'' if on else 'not used '}({why})")
        measured = f"measured: {', '.join(parts)}" if parts else ""
        return Changes(count, "; ".join(filter(None, (f"{count} conversions" if count else "nowhere", measured))))


def _rewritten(graph: fx.Graph, refused: Container[Position]) -> Iterator[Change]:
    beside: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for group in groups(graph):
        beside[group.conversion] = tuple(p.node for p in group.products)
    for group in dealt(graph):
        beside[group.conversion] = (group.product.node,)
    for node in list(graph.nodes):
        if over_tp(node, *symmetric.FORMS) and (node, 0) not in refused:
            products = beside.get(node, ())
            kind, count = "g" if node.target is g else "g*", len(products)
            name = f"{kind} with {count} product{'s' * (count != 1)}"
            node.target = symmetric.FORMS[node.target]
            yield Change(name, (node, 0), node, products)
