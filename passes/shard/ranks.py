"""The program of all ranks, and from it that of one, as passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from autotp.comm import conversions as convert
from autotp.ir.program import Planned, Sharded
from autotp.passes.base import Changes, Pass
from autotp.passes.optimise import RankProgram

from .rewrite import rewrite, specialise


@dataclass
class ShardedProgram:
    """A planned program, and what its decisions make of it.

    Attributes:
        planned: the graph with its decisions.
        price: `price(value, a, b)` gives a conversion's seconds.
        sharded: the program of all ranks; until there is one, of a rank that has everything.
    """

    planned: Planned
    price: Callable[..., Any]
    sharded: Sharded | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.planned.program.graph if self.sharded is None else self.sharded.graph


@dataclass(frozen=True)
class ShardOperators(Pass[ShardedProgram]):
    """Every operator on a rank's part of its operands, with the conversions between layouts.

    Attributes:
        outputs: "sharded" leaves outputs as they are made, where that is a plain shard or a summand.
    """

    name: ClassVar[str] = "shard-operators"
    outputs: str = "full"

    def run(self, program: ShardedProgram) -> Changes:
        program.sharded = rewrite(program.planned, program.price, self.outputs)
        targets = set(convert.FUNCTIONS.values())
        return Changes(sum(n.target in targets for n in program.graph.nodes), "conversions between layouts")


@dataclass(frozen=True)
class Specialise(Pass[RankProgram]):
    """The calls that depend on the rank get its place on each mesh axis."""

    name: ClassVar[str] = "specialise"

    def run(self, program: RankProgram) -> Changes:
        program.graph = specialise(Sharded(program.graph), program.axes)
        return Changes(sum("rank" in n.kwargs for n in program.graph.nodes), "calls know their rank")
