"""The programs of a rank's stages in training and in evaluation, each cut when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotp.comm.ranks import Ranks, agree, together
from autotp.passes.stages.cut import Piece

from .feed import Feed
from .part import StagedModule
from .stage import Stage


@dataclass(frozen=True)
class Running:
    """The stages of one mode: how the model's inputs get to them, and those of this rank by their index."""

    feed: Feed
    stages: dict[int, Stage]


@dataclass
class Modes:
    """The stages by mode.

    Attributes:
        module: holds the parameters of this rank's stages. own: their indices.
        loss: whether the last of them gives the model's loss.
        world: all ranks.
        again: captures and cuts the model in training (True) or evaluation.
    """

    module: StagedModule
    own: tuple[int, ...]
    loss: bool
    world: Ranks
    again: Callable[[bool], tuple[Feed, list[Piece]]]
    by_mode: dict[bool, Running] = field(default_factory=dict)

    def add(self, training: bool, feed: Feed, pieces: Sequence[Piece]) -> None:
        """Make the stages of this rank."""
        last = len(pieces) - 1
        stages = {i: Stage(self.module, pieces[i], i, self.loss and i == last) for i in self.own}
        self.by_mode[training] = Running(feed, stages)

    @property
    def now(self) -> Running:
        """The stages of the present mode, of which there is a schedule."""
        return self.by_mode[self.module.training]

    def __getitem__(self, training: bool) -> Running:
        """The stages of a mode. A collective call of all ranks where it is the first."""
        if training not in self.by_mode:
            feed, pieces = together(self.world, "cutting the model", lambda: self.again(training))
            agree(self.world, "the stages", {f"stage {i}": p.capture.digest() for i, p in enumerate(pieces)})
            self.add(training, feed, pieces)
        return self.by_mode[training]
