"""What an optimisation is, and what it may know."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.ir.program import MeshPlace
from autotp.passes.base import Pass
from autotp.passes.schema import verify


@dataclass(frozen=True)
class Setting:
    """Where and what for a rank's program runs.

    Attributes:
        place: this rank's place on the tp axis, with the name of the process group ("" in one plain process).
        cluster: the machines, for what an optimisation costs and saves.
        objective: "training" and so on: whether there is a backward.
        device: where the rank computes.
        backend: name of what runs the program: "eager", or a backend of `torch.compile`.
        held: bytes that the fullest rank holds, by the memory model.
    """

    place: MeshPlace
    cluster: Cluster
    objective: Objective
    device: torch.device
    backend: str = "eager"
    held: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether the program goes through `torch.compile` afterwards."""
        return self.backend != "eager"


@dataclass
class RankProgram:
    """One rank's program, and where and what for it runs.

    Attributes:
        axes: its place on each mesh axis, for the program of all ranks.
    """

    graph: fx.Graph
    setting: Setting
    axes: Mapping[str, MeshPlace] = field(default_factory=dict)


class Optimisation(Pass[RankProgram]):
    """A rewrite of one rank's graph that keeps its numbers; it says where it fired, with figures, or why nowhere."""

    def check(self, program: RankProgram, before: Set[fx.Node]) -> None:
        """Refuse marks that the optimisation forgot on what it put in."""
        verify(program.graph, f"pass {self.name}", before=before)
