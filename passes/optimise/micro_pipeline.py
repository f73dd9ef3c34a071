"""The micro-pipeline of Inductor: g and g* in the form that it fuses with matmuls through symmetric memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotp import compat
from autotp.comm import peers, symmetric
from autotp.passes.base import Changes

from .base import Optimisation, RankProgram
from .products import over_tp


@dataclass(frozen=True)
class MicroPipeline(Optimisation):
    """Where a compiled program runs on NVLink: every g and g*, for torch's fused operators."""

    name: ClassVar[str] = "micro_pipeline"

    def idle(self, program: RankProgram) -> str:
        """Only for Inductor on GPUs that share memory."""
        setting = program.setting
        if setting.backend != "inductor":
            return "nowhere: it is a pass of backend='inductor'"
        why = peers.unavailable(setting.device, setting.place.size)
        return f"nowhere: {why}" if why else ""

    def run(self, program: RankProgram) -> Changes:
        """Rewrite the conversions; what Inductor then fused is counted when it compiles (`symmetric.Fused`)."""
        found = [n for n in program.graph.nodes if over_tp(n, *symmetric.FORMS)]
        if found:
            compat.use_symmetric_memory(program.setting.place.group)
        for node in found:
            node.target = symmetric.FORMS[node.target]  # type: ignore[index]
        return Changes(len(found), f"{len(found)} conversions" if found else "nowhere: the plan has no g or g*")
