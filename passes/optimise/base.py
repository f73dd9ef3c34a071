"""What an optimisation is, and what it may know."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import fx

from autotp.comm import peers
from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.ir.program import MeshPlace
from autotp.passes.base import Pass
from autotp.passes.schema import verify

from .alternatives import Alternative


class Verdict(NamedTuple):
    """Whether what an optimisation would put in is used, and why: "1.31 of torch's speed"."""

    used: bool
    why: str


class Judge(Protocol):
    """Compares and times what an optimisation would put in."""

    def __call__(self, alternative: Alternative) -> Verdict:
        """Whether it is used."""
        ...

    def ahead(self, count: int) -> None:
        """So many alternatives are about to come."""
        ...


@dataclass(frozen=True)
class Setting:
    """Where and what for a rank's program runs.

    Attributes:
        place: this rank's place on the tp axis, with the name of the process group ("" in one plain process).
        cluster: the machines, for what an optimisation costs and saves.
        objective: "training" and so on: whether there is a backward.
        device: where the rank computes.
        backend: name of what runs the program: "eager", or a backend of `torch.compile`.
        rank_bytes: bytes that the fullest rank holds, by the memory model.
        judges: name of an optimisation -> what compares and times each thing that it would put in, for all ranks
            together. Without one nothing is measured: it is on or off whatever it takes.
    """

    place: MeshPlace
    cluster: Cluster
    objective: Objective
    device: torch.device
    backend: str = "eager"
    rank_bytes: float = 0.0
    judges: Mapping[str, Judge] = field(default_factory=dict)

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
    """A rewrite of one rank's graph that keeps its numbers; it says where it fired, with figures, or why nowhere.

    Attributes:
        measurable: whether it asks `Setting.judges` of each thing that it would put in.
        sends: whether these are about what is sent, so that ranks run them together.
        shares: whether ranks read each other's memory in it, so that only some machines can run it.
    """

    measurable: ClassVar[bool] = False
    sends: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    def unshared(self, setting: Setting) -> str:
        """Why ranks do not read each other's memory here: they cannot, or nobody measures whether that is faster."""
        why = peers.unavailable(setting.device, setting.place.size)
        if not why and self.name not in setting.judges:
            why = f"not measured (optimise={{'{self.name}': True}})"
        return f"nowhere: {why}" if why else ""

    def check(self, program: RankProgram, before: Set[fx.Node]) -> None:
        """Refuse marks that the optimisation forgot on what it put in."""
        verify(program.graph, f"pass {self.name}", before=before)
