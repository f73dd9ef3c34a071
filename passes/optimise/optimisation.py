"""The base class of optimisations, the program that they rewrite, and what says whether a rewrite is worth it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import fx

from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.ir.program import MeshPlace
from autotp.passes.base import Pass
from autotp.passes.schema import verify


class Value(NamedTuple):
    """An operand as large as on this rank; `shape` None is a number."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    number: int = 0


@dataclass(frozen=True)
class Alternative:
    """Operators of a program, and what would stand in for them.

    Attributes:
        name: of what would be put in.
        key: its line in the table of measurements: the name, the operators, the operands' class of shapes and types;
            the same on every rank.
        plain, ours: functions of the same operands, which return the same results as a tuple.
        operands: of both, on this rank.
        sends: whether ranks send each other something in them, so that all run them at once.
    """

    name: str
    key: str
    plain: fx.GraphModule
    ours: fx.GraphModule
    operands: tuple[Value, ...]
    sends: bool = False


class Verdict(NamedTuple):
    """An answer to whether an alternative is used, and why: "1.31 of torch's speed"."""

    used: bool
    reason: str


Judge = Callable[[Alternative], Verdict]  # reads a table of measurements, and extends it: a collective call


@dataclass(frozen=True)
class Setting:
    """The place where a rank's program runs, and the objective.

    Attributes:
        place: this rank's place on the tp axis, with the name of the process group ("" in one plain process).
        cluster: the machines, for what an optimisation costs and saves.
        objective: "training" and so on: whether there is a backward.
        device: where the rank computes.
        backend: name of what runs the program: "eager", or a backend of `torch.compile`.
        rank_bytes: bytes that the fullest rank holds, by the memory model.
        judges: name of an optimisation -> what knows or measures whether each of its rewrites is faster, for all ranks
            together. Without one nothing is measured: it is on or off whatever it takes.
    """

    place: MeshPlace
    cluster: Cluster
    objective: Objective
    device: torch.device
    backend: str = "eager"
    rank_bytes: float = 0.0
    judges: Mapping[str, Judge] = field(default_factory=dict)


@dataclass
class RankProgram:
    """One rank's program, and where it runs.

    Attributes:
        axes: its place on each mesh axis, for the program of all ranks.
    """

    graph: fx.Graph
    setting: Setting
    axes: Mapping[str, MeshPlace] = field(default_factory=dict)


class Optimisation(Pass[RankProgram]):
    """A rewrite of one rank's graph that keeps its numbers; it says where it fired, with figures, or why nowhere.

    Attributes:
        measurable: whether it asks `Setting.judges` of each of its rewrites.
        sends: whether these are about what is sent, so that ranks run them together.
    """

    measurable: ClassVar[bool] = False
    sends: ClassVar[bool] = False

    def check(self, program: RankProgram, before: Set[fx.Node]) -> None:
        """Refuse marks that the optimisation forgot on what it put in."""
        verify(program.graph, f"pass {self.name}", before=before)
