"""Communication through symmetric memory, where it was measured to be faster: small all-reduces, and fused matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotp import compat
from autotp.comm import one_shot, symmetric
from autotp.comm.conversions import g
from autotp.cost import tensor_bytes
from autotp.passes.base import Changes

from .judged import Judged, Rewrite, retarget
from .optimisation import Optimisation, RankProgram
from .products import dealt, groups, over_tp


@dataclass(frozen=True)
class OneShot(Optimisation):
    """All-reduces of few bytes in one step, in which ranks read each other's memory."""

    name: ClassVar[str] = "one_shot"
    measurable: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def idle(self, program: RankProgram) -> str:
        """Stay off but for GPUs that share memory, where somebody measures it."""
        alone = program.setting.place.size == 1
        return "nowhere: nothing is sent in one process" if alone else self.unshared(program.setting)

    def run(self, program: RankProgram) -> Changes:
        """Rewrite the conversions."""
        judged = Judged(program, self)
        for node in list(program.graph.nodes):
            small = over_tp(node, *one_shot.FORMS) and tensor_bytes(node.meta["val"]) <= one_shot.MAX_BYTES
            if small and node.args[1].reduction == "sum":
                judged.put("all-reduce in one step", Rewrite((node,), retarget, (node, one_shot.FORMS[node.target])))
        text = ", ".join(judged.summary()) or "nowhere: the plan has no small all-reduce"
        return Changes(judged.fired.total(), text)


@dataclass(frozen=True)
class MicroPipeline(Optimisation):
    """The g and g* in the form that Inductor fuses with matmuls over NVLink.

    What Inductor makes of them is no rewrite of this graph, so both ways are a conversion together with its products,
    compiled without and with the fusion.
    """

    name: ClassVar[str] = "micro_pipeline"
    measurable: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    shares: ClassVar[bool] = True

    def idle(self, program: RankProgram) -> str:
        """Stay off but for Inductor on GPUs that share memory, where somebody measures it."""
        compiled = program.setting.backend == "inductor"
        return self.unshared(program.setting) if compiled else "nowhere: it is a pass of backend='inductor'"

    def run(self, program: RankProgram) -> Changes:
        """Rewrite the conversions; what Inductor then fused is counted when it compiles (`symmetric.Fused`)."""
        graph = program.graph
        conversions = [n for n in graph.nodes if over_tp(n, *symmetric.FORMS)]
        if not conversions:
            return Changes(0, "nowhere: the plan has no g or g*")
        compat.use_symmetric_memory(program.setting.place.group)
        judged = Judged(program, self)
        beside = {group.conversion: group for group in (*groups(graph), *dealt(graph))}
        for node in conversions:
            nodes, count = (beside[node].nodes, len(beside[node].products)) if node in beside else ((node,), 0)
            kind = "g" if node.target is g else "g*"
            name = f"{kind} with {count} product{'s' * (count != 1)}"
            judged.put(name, Rewrite(nodes, retarget, (node, symmetric.FORMS[node.target])))
        count = judged.fired.total()
        parts = ", ".join(judged.measured() + judged.refused())
        text = f"{count} conversions" if count else "nowhere"
        return Changes(count, f"{text}; measured: {parts}" if parts else text)
