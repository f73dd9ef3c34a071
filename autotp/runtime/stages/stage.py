"""One stage: what a call of the whole runs of it, and as a module what torch's `PipelineStage` takes; and all of them.

Of all stages of a sharded module: the ranks that run them, what they share, and how a program of it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.errors import InputError, StateError
from autotp.inputs import Leaves
from autotp.ir.graph import SEEDS, Capture, Function
from autotp.ir.program import Sharded
from autotp.passes.stages.cut import Piece
from autotp.runtime import state
from autotp.runtime.module import ShardedModule
from autotp.runtime.program_search import built
from autotp.runtime.programs import Form, Program
from autotp.runtime.storage import ShardState

from .relay import Grid, Relay
from .weights import Sums, Tied

BASE = "random_base"  # the argument with the number that random numbers of a micro-batch are made from


class Stage(nn.Module):
    """A stage of the pipeline: what the stage before gives goes in by position, the model's own inputs by name.

    Attributes:
        module: the sharded module that holds its parameters, with those of the rank's other stages.
        piece: its program before this rank's. index: its place in the pipeline.
        program: of all stages of this rank; `function` and `graph` are this one's.
        draws: whether it takes seeds of random numbers. loss: whether it gives the model's loss.
    """

    module: ShardedModule
    program: Program
    graph: fx.Graph

    def __init__(
        self, module: ShardedModule, piece: Piece, index: int, function: Function, draws: bool, loss: bool
    ) -> None:
        super().__init__()
        self.piece, self.index, self.function, self.draws, self.loss = piece, index, function, draws, loss
        object.__setattr__(self, "module", module)  # no child: a rank's stages share it
        first = module._shards.aliases
        self.names = {first.get(n, n) for n in piece.names}

    def run(self, values: Leaves) -> list[Any]:
        """All that the stage gives: what is written or kept, the model's results or what flows on.

        Args:
            values: what flows in, the model's own inputs, and seeds of random numbers where it draws.
        """
        return list(self.function(*values))

    def forward(self, *values_in: Tensor, **inputs: Any) -> Any:
        """The values for the next stage, or the model's outputs: a tensor, or a tuple of some."""
        # A schedule that a user has made passes what he gave it: it is checked before the program reads it by position.
        names = [n for n in self.piece.inputs if n not in inputs]
        if names or len(values_in) != len(self.piece.wires_in):
            raise InputError(
                f"stage {self.index} takes {len(self.piece.wires_in)} values of the stage before and the inputs "
                f"{', '.join(self.piece.inputs) or 'none'}; it got {len(values_in)}, and lacks {names}. "
                "Pass what pipe.feed(...) gives to the schedule's step."
            )
        self.check_mode()
        values = [*map(_contiguous_gradient, values_in), *(inputs[n] for n in self.piece.inputs)]
        if self.draws:
            values += self.program.random(self.module._shards, int(inputs[BASE]))
        with self.module.plain(self.program):
            results = self.run(values)
        outputs = []
        for i, value in enumerate(results):
            taker = self.piece.capture.mutations.get(i)
            if isinstance(taker, str):
                state.write(self.module._shards, taker, value)
            else:
                outputs.append(value)
        if self.piece.wires_out:
            return tuple(x.contiguous() for x in outputs)
        if self.loss:
            return outputs[0].reshape(1)  # so that a schedule can join those of its micro-batches
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def check_mode(self) -> None:
        """Refuse a mode that the program was not captured in."""
        captured = self.piece.capture
        kind = self.module._shards.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if self.module.training != captured.training or autocast != captured.state[-1]:
            raise StateError(
                f"this schedule was made with training={captured.training} and autocast {captured.state[-1]}, and now "
                f"it is training={self.module.training} and {autocast}. Make one in this mode: pipe.schedule(...); "
                "for autocast, make the stages under it."
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage reads, under the original's names."""
        outer, shards = f"{prefix}." if prefix else "", self.module._shards
        for name in shards.storages:
            if name in self.names:
                yield from ((outer + name, p) for p in state.pieces(shards, name))


def _contiguous_gradient(value: Tensor) -> Tensor:
    """A value of the stage before, whose gradient can be sent back as it lies in memory."""
    if not value.requires_grad:
        return value
    value = value.view_as(value)  # the schedule's own tensor is there for all steps, and would keep a hook of each
    value.register_hook(Tensor.contiguous)
    return value


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
