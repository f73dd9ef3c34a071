"""The stages of one sharded module: the ranks that run them, what they share, and how a program of it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotp.ir.graph import SEEDS, Capture
from autotp.ir.program import Sharded
from autotp.runtime.program_search import built
from autotp.runtime.programs import Form, Program
from autotp.runtime.storage import ShardState

from .relay import Grid, Relay
from .stage import Stage
from .sums import Sums
from .tied import Tied


@dataclass(frozen=True)
class Pipeline:
    """The stages of a sharded module.

    Attributes:
        grid: their ranks. holders: first name of each parameter that several ranks hold -> their places.
        loss: whether the last stage gives the model's loss.
    """

    grid: Grid
    holders: Mapping[str, tuple[int, ...]]
    loss: bool

    def sums(self, shards: ShardState) -> Sums:
        """Sums of gradients of what a rank holds."""
        own = {name: places for name, places in self.holders.items() if self.grid.rank in places}
        # A weight of several stages has one gradient, their sum, and counts once in a norm: at its first holder.
        elsewhere = {name for name, places in own.items() if places[0] != self.grid.rank}
        return Sums(shards, own, frozenset(shards.storages.keys() - elsewhere), self.grid.pipeline)

    def tied(self, shards: ShardState) -> Tied:
        """Comparison of the parameters that several ranks hold."""
        return Tied(shards, self.holders, self.grid.world.tp // self.grid.size)

    def program(self, module: Any, captured: Capture, sharded: Sharded, key: int, call_form: Form) -> Program:
        """Install the stages of this rank.

        Args:
            module: the sharded module. captured, sharded: the program of one process, and that of the ranks, cut.
            key: of the program. call_form: that it is called in.
        """
        last, stages, parts = len(sharded.pieces) - 1, dict[int, Stage](), []
        for index in self.grid.own():
            piece = sharded.pieces[index]
            parts.append(built(module, piece.capture, piece.sharded, (key, index), Form((), ())))
            function = module._programs[key, index]
            stages[index] = Stage(module, piece, index, function, parts[-1].seeds > 0, self.loss and index == last)
        ranks = module._source.ranks
        module._programs[key] = Relay(captured, sharded, stages, self.grid, ranks, module._sums)
        # Of all stages: ranks whose own draw nothing take part in the choice of the number that others draw from.
        count = max((x.node.meta["val"].shape[0] for x in captured.leaves if x.kind is SEEDS), default=0)
        program = Program(
            captured, sharded, parts[0].graph, key, call_form, count, False,
            parts[0].fired, parts[0].compiler, [read for part in parts for read in part.reads], stages=stages,
        )  # fmt: skip
        for stage, part in zip(stages.values(), parts, strict=True):
            stage.program, stage.graph = program, part.graph
        return program
