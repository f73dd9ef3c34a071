"""`Pipe`: the stages of this rank, what is done with all stages together, and the stages in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer

from autotp.comm.lockstep import meet
from autotp.comm.ranks import Ranks, agree, together
from autotp.comm.turn import Turn
from autotp.errors import InputError, StateError
from autotp.inputs import Inputs
from autotp.ir.graph import SEEDS, outputs_of
from autotp.passes.decompose.counter_random import base_seed
from autotp.passes.stages.balance import Staging
from autotp.passes.stages.cut import Piece
from autotp.plans.plan import Plan
from autotp.runtime import checkpoint
from autotp.runtime.call_message import NOTHING, Sample, sampled
from autotp.text import amount, seconds

from .feed import Feed, local_example, split_of
from .stage import BASE, Stage
from .staged import StagedModule
from .step_message import UNTRAINED, StepMessage, compare, values_of
from .sums import Sums

MICROBATCHES = (4, 8, 16, 32)  # of a step, that waiting is shown for


@dataclass(frozen=True)
class Grid:
    """The ranks of a pipeline.

    Attributes:
        world: all of them. pipeline: those of this one's lane, one for each place; `rank` of `size`.
        chunks: stages of each rank. places: the rank of each stage.
    """

    world: Ranks
    pipeline: ProcessGroup
    rank: int
    size: int
    chunks: int
    places: tuple[int, ...]

    @property
    def stages(self) -> int:
        return self.size * self.chunks

    @property
    def last(self) -> int:
        """The place in the pipeline of the rank that has the last stage."""
        return self.places[-1]


class Running(NamedTuple):
    """The stages of one mode: how the model's inputs get to them, and those of this rank by their index."""

    feed: Feed
    stages: dict[int, Stage]


class Pipe:
    """A model cut into stages, and of these the ones of this rank; made by `autotp.stages`.

    Print it for the blocks, seconds and memory of every stage.

    Attributes:
        plan: of the whole model.
        module: a sharded module with the parameters of this rank's stages, under the original's names.
        staging: how the model's blocks are divided.
    """

    def __init__(
        self, plan: Plan, module: StagedModule, cut: Callable[[bool], tuple[Feed, list[Piece]]], staging: Staging,
        grid: Grid, sums: Sums, example: Inputs, loss: bool,
    ) -> None:  # fmt: skip
        self.plan, self.module, self.staging = plan, module, staging
        self._cut, self._grid, self._sums, self._loss = cut, grid, sums, loss
        self._by_mode: dict[bool, Running] = {}
        self._example = self._now.feed.tensors(example)
        self._schedules: WeakKeyDictionary[Any, tuple[int, list[Stage]]] = WeakKeyDictionary()
        module._calls.updates = 0

    @property
    def stages(self) -> dict[int, Stage]:
        """The modules of this rank's stages in the present mode, for `PipelineStage`, by their index."""
        return self._now.stages

    @property
    def _now(self) -> Running:
        """The stages of the present mode. A collective call of all ranks where it is the first in that mode."""
        mode, grid = self.module.training, self._grid
        if mode not in self._by_mode:
            feed, pieces = together(grid.world, "cutting the model", lambda: self._cut(mode))
            agree(grid.world, "the stages", {f"stage {i}": p.capture.digest() for i, p in enumerate(pieces)})
            own = [i for i, place in enumerate(grid.places) if place == grid.rank]
            last = grid.stages - 1
            self._by_mode[mode] = Running(
                feed, {i: Stage(self.module, pieces[i], i, self._loss and i == last) for i in own}
            )
        return self._by_mode[mode]

    def parameters(self) -> Any:
        """The parameters of this rank's stages, for an optimizer."""
        return self.module.parameters()

    def train(self, mode: bool = True) -> Pipe:
        """Set the mode of this rank's stages; a schedule is for the mode that it was made in."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipe:
        """Set the mode to evaluation; its first schedule cuts the model again, on all ranks together."""
        return self.train(False)

    # ---- running ---------------------------------------------------------------------------------------------------

    def schedule(
        self, kind: Any, microbatches: int, loss: Callable[[Any, Any], Tensor] | None = None, **options: Any
    ) -> Any:
        """One of torch's schedules over this rank's stages; each `step` of it ends with the sums of gradients.

        Args:
            kind: a class of `torch.distributed.pipelining`, such as `Schedule1F1B`.
            microbatches: how many slices of a batch go through the stages, each like the example inputs.
            loss: of a micro-batch's outputs and its targets; left out where the model gives its loss.
            options: what else the schedule takes.

        Raises:
            InputError: a schedule for one stage a rank where there are several, or the other way round; no loss.
        """
        single = isinstance(kind, type) and issubclass(kind, PipelineScheduleSingle)
        if single and self._grid.chunks > 1:
            raise InputError(
                f"{kind.__name__} runs one stage a rank, here are chunks={self._grid.chunks}. Leave it out."
            )
        if (loss is None) != self._loss:
            need = "gives outputs, and no loss" if loss is None else "gives its loss already"
            raise InputError(f"the model {need}: {'pass' if loss is None else 'leave out'} schedule(..., loss=).")

        def share(output: Any, target: Any) -> Tensor:
            return (output.sum() if loss is None else loss(output, target)) / microbatches

        # Made anew for each schedule: a `PipelineStage` of torch's keeps buffers for as many micro-batches as it runs.
        stages = list(self.stages.values())
        parts = [self._pipeline_stage(stage) for stage in stages]
        if not self._example:
            raise InputError("the model takes no tensors.")
        of: Any = parts[0] if single else parts
        # Each micro-batch gives its share of the mean, so torch must not divide gradients once more.
        torch_schedule = kind(of, microbatches, loss_fn=share, scale_grads=False, **options)
        self._schedules[torch_schedule] = microbatches, stages
        self._sums.follow(torch_schedule)
        return torch_schedule

    def _pipeline_stage(self, stage: Stage) -> PipelineStage:
        ranks, piece = self._grid.world, stage.piece
        tp = self.module._source.ranks
        assert tp is not None
        sizes = self._now.feed.sizes(self._example)
        inputs = tuple(local_example(w, sizes, tp.rank, tp.tp) for w in piece.wires_in)
        outputs = tuple(local_example(w, sizes, tp.rank, tp.tp) for w in piece.wires_out)
        if not outputs:
            outputs = tuple(
                torch.empty(1, device="meta") for _ in outputs_of(piece.capture)
            )  # of the last: their number counts
        return PipelineStage(
            stage, stage.index, self._grid.stages, ranks.device, input_args=inputs, output_args=outputs,
            group=self._grid.pipeline,
        )  # fmt: skip

    def feed(self, inputs: Inputs, microbatches: int) -> dict[str, Tensor]:
        """Read what the schedules' `step` takes on this rank for a batch, by name. A collective call.

        Raises:
            InputError: the batch is not cut into micro-batches like the example inputs.
        """
        tensors, batch = together(
            self._grid.world,
            "reading the inputs",
            lambda: self._own(self._by_mode[self.module.training], inputs, microbatches),
        )
        self._meet("feed()", batch)
        return tensors | self._base(microbatches)

    def _own(self, now: Running, inputs: Inputs, microbatches: int) -> tuple[dict[str, Tensor], Sample]:
        """The inputs that this rank's stages read, moved to its device, and a few values of all inputs."""
        tensors = now.feed.tensors(inputs)
        shapes, expected = split_of(tensors, microbatches), {n: tuple(t.shape) for n, t in self._example.items()}
        if shapes != expected:
            raise InputError(
                f"micro-batches of {shapes} were given, and the stages were made for {expected}: what they send each "
                "other has fixed sizes. Pass as many micro-batches as that takes, or these as example_inputs."
            )
        names = {name for stage in now.stages.values() for name in stage.piece.inputs}
        device, batch = self._grid.world.device, self._sample(list(tensors.values()))
        return {name: t.to(device) for name, t in tensors.items() if name in names}, batch

    def _sample(self, values: list[Any]) -> Sample:
        return sampled(values) if self.module._calls.values else NOTHING

    def _meet(self, what: str, batch: Sample, target: Tensor | None = None) -> bool:
        """Make sure that all ranks begin the same with the same batch, and from weights that belong together.

        Returns: whether hooks of the user may fail amid it, on some rank. A collective call.
        """
        calls, grid, tied = self.module._calls, self._grid, self._sums.everywhere
        ranks = self.module._source.ranks
        assert ranks is not None
        what = f"{what}, call {calls.number + 1} of {calls.name} in {grid.stages} stages"
        lane = ranks.batch.rank if ranks.batch is not None else 0
        updates = min(calls.updates or 0, 1)
        if not any(p.requires_grad for p in self.parameters()):
            updates = UNTRAINED
        # Tied weights part where one stage is updated otherwise than another: that shows in values alone.
        values = values_of(self.module._shards, tied if calls.values else ())
        mine = StepMessage(
            lane, ranks.rank, grid.rank, updates, any(calls.inventory.hooked), calls.writes(),
            calls.inventory.trained(), batch, self._sample([target]), values,
        )  # fmt: skip
        everyone = [StepMessage.read(message) for message in meet(grid.world.channel, what, mine.packed())]
        compare(everyone, tied, grid.last, what)
        calls.number, calls.updates, calls.writes_before = calls.number + 1, 0, calls.count()
        return any(m.hooked for m in everyone)

    def _base(self, microbatches: int) -> dict[str, Tensor]:
        """The numbers that random numbers of each micro-batch are made from: the first rank's."""
        if not any(x.kind is SEEDS for x in self._by_mode[self.module.training].feed.capture.leaves):
            return {}
        seeds = torch.tensor([base_seed() for _ in range(microbatches)]).to(self._grid.world.device)
        dist.broadcast(seeds, group=self._grid.world.group, group_src=0)
        return {BASE: seeds.cpu()}

    def _ready(self, schedule: Any, inputs: Inputs) -> tuple[int, tuple[dict[str, Tensor], Sample]]:
        """Read how many micro-batches a schedule runs, and this rank's inputs; or say why it cannot run them."""
        if schedule is None or schedule not in self._schedules:
            raise InputError("this schedule is not of these stages: take what pipe.schedule(...) gives.")
        count, stages = self._schedules[schedule]
        for stage in stages:
            stage.check_mode()
        return count, self._own(self._by_mode[self.module.training], inputs, count)

    def step(self, schedule: Any, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """One step of a schedule: forwards, backwards, and the sums of gradients over stages and dp.

        Args:
            schedule: of `schedule(...)`. args, kwargs: the model's inputs of a whole batch, the same on the ranks of
                all stages. target: of the batch, where the schedule has a loss of its own.

        Returns: the mean of the micro-batches' losses, on every rank.
        Raises: RankError: ranks were given another batch, or their weights were updated apart.
        """
        return self._run(schedule, "step", Inputs(*args, **kwargs), target)

    @torch.no_grad()
    def evaluate(self, schedule: Any, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The loss of a batch without backwards; otherwise as `step`."""
        return self._run(schedule, "eval", Inputs(*args, **kwargs), target)

    def _run(self, schedule: Any, method: str, inputs: Inputs, target: Tensor | None) -> Tensor:
        grid, calls = self._grid, self.module._calls
        channels = [channel for channel in (grid.world.channel, calls.channel) if channel is not None]
        with Turn(f"{method} of {calls.name}", *channels):
            count, (tensors, batch) = together(grid.world, "reading the inputs", lambda: self._ready(schedule, inputs))
            what = f"{method} of {count} micro-batches by {type(schedule).__name__}"
            calls.hooked = self._meet(what, batch, target)
            tensors |= self._base(count)
            # The last stage alone makes losses: its rank passes the target, and the list that torch fills.
            losses: list[Tensor] = []
            options: dict[str, Any] = {}
            device = grid.world.device
            if grid.rank == grid.last:
                target = torch.zeros(count) if target is None else target
                options = {"target": target.to(device), "losses": losses}
            with calls.running():  # an error of a hook is raised at the end: other stages wait for what this one sends
                self._meet_hooked(f"beginning of {what}")
                getattr(schedule, method)(**tensors, **options)
            self._meet_hooked(f"end of {what}")
            # In float64 on all ranks: those of other stages have no loss whose type they would know.
            total = torch.zeros((), dtype=torch.double)
            for loss in losses:
                total += loss.detach().double().cpu()
            total = total.to(device)
            dist.broadcast(total, group=grid.pipeline, group_src=grid.last)
            return total

    def _meet_hooked(self, what: str) -> None:
        """With hooks of the user: hear of ranks of other stages that have left. A collective call."""
        if self.module._calls.hooked:
            meet(self._grid.world.channel, what)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model, all stages, is at most this. Collective.

        Returns: the norm before, on every rank.
        """
        meet(self._grid.world.channel, f"clip_grad_norm_ to {max_norm} by norm {norm_type}")
        return self._sums.clip(max_norm, norm_type)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "dcp",
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save all stages as one folder (DCP), for any number of stages and ranks. A collective call of all ranks.

        Args:
            path, optimizer, extra: see `ShardedModule.save_checkpoint`; the optimizer is over this rank's parameters.
            format: "dcp" alone.
        """
        self._meet("save_checkpoint()", NOTHING)
        checkpoint.save(self._everywhere(), path, format=format, optimizer=optimizer, extra=extra)

    def load_checkpoint(
        self, source: str | os.PathLike[str] | Mapping[str, Any], *, optimizer: Optimizer | None = None, **options: Any
    ) -> checkpoint.Loaded:
        """Load a checkpoint of the whole model; each rank reads its own part. A collective call of all ranks.

        Args:
            source, optimizer, options: see `ShardedModule.load_checkpoint`.
        """
        return checkpoint.load(self._everywhere(), source, optimizer=optimizer, **options)

    def _everywhere(self) -> Any:
        """The shards of this rank, as a part of those of all ranks."""
        shards = self.module._shards
        assert shards.ranks is not None
        return replace(shards, ranks=replace(shards.ranks, every=self._grid.world))

    def __getstate__(self) -> Any:
        raise StateError(
            "a pipe is bound to its process groups and cannot be copied or pickled. Copy pipe.module for its weights, "
            "as AveragedModel does, or call autotp.stages again; save by pipe.save_checkpoint(...)."
        )

    def __str__(self) -> str:
        return table(self.plan, self.staging, self._grid.size, self._grid.chunks, self._grid.places)


def tied_over_ranks(stages: Mapping[int, Any], places: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """First name of each parameter that several ranks of the pipeline hold -> these ranks.

    Args:
        stages: names of the parameters that each reads. places: the rank of each stage.
    """
    homes: dict[str, set[int]] = {}
    for stage, names in stages.items():
        for name in names:
            homes.setdefault(name, set()).add(places[stage])
    return {name: tuple(sorted(ranks)) for name, ranks in homes.items() if len(ranks) > 1}


def idle(times: Sequence[float], places: Sequence[int], ranks: int, microbatches: int) -> float:
    """The share of a step in which ranks wait, of 1F1B or, with several stages a rank, its interleaved form.

    Args:
        times: seconds of each stage for one micro-batch. places: the rank of each stage.
        ranks: of the pipeline. microbatches: of a step.
    """
    own = [0.0] * ranks
    for time, place in zip(times, places, strict=True):
        own[place] += time
    chunks = len(times) // ranks
    step = max(own) * (microbatches + (ranks - 1) / chunks)
    return 1 - sum(own) * microbatches / (ranks * step) if step else 0.0


def table(plan: Plan, staging: Staging, ranks: int, chunks: int, places: Sequence[int]) -> str:
    """The stages of a plan as text.

    Args:
        plan: that was cut. staging: where. ranks: of the pipeline. chunks: micro-batches. places: each stage's rank.
    """
    division = staging.division
    lines = [
        f"{plan.model}: {len(division.sizes)} stages over pp={ranks} x tp={plan.tp}"
        + (f" x dp={plan.batch.size}" if plan.batch.size > 1 else "")
        + f", {plan.cluster}",
        f"{'stage':>5} {'rank':>4}  {'blocks':<40} {'of a micro-batch':>16} {'memory':>10}",
    ]
    at = 0  # of the stage's first block among all
    for i, (size, time, memory) in enumerate(zip(division.sizes, division.seconds, division.memory, strict=True)):
        names = staging.units[at : at + size]
        blocks = names[0] if size == 1 else f"{names[0]} - {names[-1].rpartition('.')[2]}"
        blocks += (" with what is before" if i == 0 else "") + (
            " with what is after" if i == len(division.sizes) - 1 else ""
        )
        lines.append(f"{i:>5} {places[i]:>4}  {blocks:<40} {seconds(time):>16} {amount(memory):>10}")
        at += size
    shares = ", ".join(f"{m}: {idle(division.seconds, places, ranks, m):.0%}" for m in MICROBATCHES)
    lines.append(f"idle share of a step ({'interleaved ' if chunks > 1 else ''}1F1B) by micro-batches: {shares}")
    lines.append(
        "memory: weights, gradients, optimizer states, and what autograd keeps of the micro-batches in flight (1F1B)"
    )
    return "\n".join(lines)
