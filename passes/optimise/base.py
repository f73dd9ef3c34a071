"""What an optimisation is, and what it may know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.ir.program import MeshPlace


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


@dataclass(frozen=True)
class Optimisation:
    """A rewrite of one rank's graph in place that keeps its numbers; options are fields."""

    name: ClassVar[str]

    def idle(self, setting: Setting) -> str:
        """Why it has nothing to do in this setting unless it is asked for by name; empty where it is on by itself."""
        return ""

    def run(self, graph: fx.Graph, setting: Setting) -> str:
        """Rewrite; says where it fired, in a few words with figures, or why nowhere ("nowhere: ...")."""
        raise NotImplementedError
