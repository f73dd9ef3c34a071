"""`Pipe`: the stages of this rank, steps and checkpoints of all stages together, and the stages as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import BACKWARD_WEIGHT, PipelineScheduleSingle

from autotp import compat
from autotp.comm.lockstep import meet
from autotp.comm.ranks import broadcast, together
from autotp.errors import InputError, StateError
from autotp.inputs import Inputs, Kwargs
from autotp.ir.files import PathLike
from autotp.ir.graph import NamedTensors
from autotp.passes.decompose.counter_random import base_seed
from autotp.passes.stages.balance import Staging
from autotp.plans.plan import Plan
from autotp.runtime import checkpoint, program_search, state
from autotp.runtime.module import ShardedModule
from autotp.runtime.programs import Program, form
from autotp.text import amount, divisors, seconds

from .stage import BASE, Pipeline, Stage

MICROBATCHES = (4, 8, 16, 32)  # of a step, that waiting is shown for
ROW = "{:>5} {:>4}  {:<40} {:>16} {:>10}"  # of a stage


UNSUMMED = (
    "the step of a schedule of your own over pipe.stages would not end with the sums of gradients over the stages that "
    "share weights, and over dp; here are {}. pipe.schedule(kind, microbatches, loss) makes any schedule of torch's "
    "with them."
)


def refuse_apart(schedule: Any) -> None:
    """Refuse a schedule of torch that computes gradients of weights apart, where this torch does so wrongly.

    Raises:
        InputError: it says what to take.
    """
    kind, order = type(schedule).__name__, getattr(schedule, "pipeline_order", {})
    splits = any(step and step.computation_type == BACKWARD_WEIGHT for steps in order.values() for step in steps)
    if splits and compat.VERSION < (2, 13):
        raise InputError(
            f"{kind} computes gradients of weights apart, and torch {torch.__version__} counts some of them several "
            "times. Take Schedule1F1B or ScheduleInterleaved1F1B, or torch 2.13."
        )


class Pipe:
    """A model cut into stages, and of these the ones of this rank; made by `autotp.stages`.

    Print it for the blocks, seconds and memory of every stage.

    Attributes:
        plan: of the whole model.
        module: a sharded module with the parameters of this rank's stages, under the original's names. A call of it
            goes through all stages, one after another.
        staging: how the model's blocks are divided.
    """

    def __init__(self, plan: Plan, module: ShardedModule, staging: Staging, example: Inputs) -> None:
        self.plan, self.module, self.staging, self._example = plan, module, staging, example
        pipeline: Pipeline = module._source.pipeline
        self._pipeline, self._grid = pipeline, pipeline.grid
        self._schedules: WeakKeyDictionary[Any, tuple[int, list[Stage]]] = WeakKeyDictionary()

    @property
    def stages(self) -> dict[int, Stage]:
        """Modules of this rank's stages in the present mode, for `PipelineStage`, by their index.

        Raises:
            StateError: a step of a schedule over them would not end with sums of gradients that are needed.
        """
        if self._pipeline.holders or self.module._shards.axis.size > 1:
            raise StateError(UNSUMMED.format(min(self._pipeline.holders, default="") or self.plan.batch.name))
        return dict(self._program.stages)

    @property
    def _program(self) -> Program:
        """Program of a micro-batch in the present mode. A collective call where it is the first in that mode."""
        call = self.module._arguments(self._example.args, dict(self._example.kwargs), "")
        with torch.enable_grad():
            return program_search.program_of(self.module, call)[0]

    def parameters(self) -> Any:
        """Return the parameters of this rank's stages, for an optimizer."""
        return self.module.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the whole model, stage after stage; see `ShardedModule.forward`. A collective call of all ranks."""
        return self.module(*args, **kwargs)

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
        """Make one of torch's schedules over this rank's stages; each `step` of it ends with the sums of gradients.

        Args:
            kind: a class of `torch.distributed.pipelining`, such as `Schedule1F1B`.
            microbatches: how many slices of a batch go through the stages, each like the example inputs.
            loss: of a micro-batch's outputs and its targets; left out where the model gives its loss.
            options: what else the schedule takes.

        Raises:
            InputError: a schedule for one stage a rank where there are several, or the other way round; no loss; one
                that this version of torch computes wrongly.
        """
        single = isinstance(kind, type) and issubclass(kind, PipelineScheduleSingle)
        if single and self._grid.chunks > 1:
            raise InputError(
                f"{kind.__name__} runs one stage a rank, here are chunks={self._grid.chunks}. Leave it out."
            )
        if (loss is None) != self._pipeline.loss:
            need = "gives outputs, and no loss" if loss is None else "gives its loss already"
            raise InputError(f"the model {need}: {'pass' if loss is None else 'leave out'} schedule(..., loss=).")

        def share(output: Any, target: Any) -> Tensor:
            return (output.sum() if loss is None else loss(output, target)) / microbatches

        # Made anew for each schedule: a `PipelineStage` of torch's keeps buffers for as many micro-batches as it runs.
        stages = list(self._program.stages.values())
        parts = [self._pipeline_stage(stage) for stage in stages]
        of: Any = parts[0] if single else parts
        # Each micro-batch gives its share of the mean, so torch must not divide gradients once more.
        torch_schedule = kind(of, microbatches, loss_fn=share, scale_grads=False, **options)
        order = getattr(torch_schedule, "stage_index_to_group_rank", None)
        if order is not None and tuple(order[i] for i in sorted(order)) != self._grid.places:
            raise InputError(
                f"{kind.__name__} takes stages that are placed otherwise than on the ranks {list(self._grid.places)}: "
                "make them with order='v' for torch's V schedules, 'loop' for all others."
            )
        refuse_apart(torch_schedule)
        self._schedules[torch_schedule] = microbatches, stages
        self.module._calls.tied.follow(torch_schedule)
        return torch_schedule

    def _pipeline_stage(self, stage: Stage) -> PipelineStage:
        tensors = self._by_name(stage.program, self._example)
        relay: Any = self.module._programs[stage.program.key]
        if not tensors:
            raise InputError("the model takes no tensors.")
        inputs, outputs = relay.examples(stage, list(tensors.values()))
        return PipelineStage(
            stage, stage.index, self._grid.stages, self._grid.world.device, input_args=inputs, output_args=outputs,
            group=self._grid.pipeline,
        )  # fmt: skip

    def _by_name(self, program: Program, inputs: Inputs) -> NamedTensors:
        """Return the tensors of a call by the program's names.

        Raises:
            InputError: the model was captured for another kind of call.
        """
        flat, spec = compat.tree_flatten((inputs.args, dict(inputs.kwargs)))
        own_form, leaves = form(self.module._shards.bare, flat, spec)[0], program.capture.inputs
        names = {i: x.name for i, x in enumerate(leaves) if x.is_tensor}
        if own_form.key != program.form.key:
            raise InputError(
                "this call has other arguments than the example inputs: a schedule runs the one program that it was "
                f"made for. The program takes {', '.join(names.values())}."
            )
        at = dict(zip(program.form.order, own_form.order, strict=True))
        return {name: flat[at[i]] for i, name in names.items()}

    def feed(self, inputs: Inputs, microbatches: int) -> NamedTensors:
        """Return the inputs that schedules' `step` takes on this rank for a batch, by name. A collective call.

        Raises:
            InputError: the batch is not cut into micro-batches like the example inputs.
        """
        program = self._program
        world = self._grid.world
        tensors, _ = together(world, "reading the inputs", lambda: self._local(program, inputs, microbatches))
        self._begin("feed()", inputs)
        return tensors | self._base(program, microbatches)

    def _local(
        self, program: Program, inputs: Inputs, microbatches: int, target: Tensor | None = None
    ) -> tuple[NamedTensors, Tensor | None]:
        """Return the inputs that this rank's stages read, on its device, and the target; with cp its part of them."""
        every = Inputs(inputs.args, dict(inputs.kwargs), target)
        args, kwargs, target = state.dealt(self.module._shards, every)[0].args
        tensors, example = self._by_name(program, Inputs(*args, **kwargs)), self._by_name(program, self._example)
        shapes, expected = split_of(tensors, microbatches), {n: tuple(t.shape) for n, t in example.items()}
        if shapes != expected:
            raise InputError(
                f"micro-batches of {shapes} were given, and the stages were made for {expected}: what they send each "
                "other has fixed sizes. Pass as many micro-batches as that takes, or these as example_inputs."
            )
        names = {name for stage in program.stages.values() for name in stage.piece.inputs}
        return {name: t.to(self._grid.world.device) for name, t in tensors.items() if name in names}, target

    def _begin(self, what: str, inputs: Inputs, target: Tensor | None = None) -> None:
        """Compare the operation, the batch and the weights between all ranks."""
        module = self.module
        module._calls.count_own()
        call = module._arguments(inputs.args, dict(inputs.kwargs), "")
        module._calls.begin(program_search.kind_of(module, call), call, None, what, target)

    def _base(self, program: Program, microbatches: int) -> NamedTensors:
        """Return the seeds of each micro-batch's random numbers: the first rank's."""
        if not program.seeds:
            return {}
        return {BASE: torch.tensor(broadcast(self._grid.world, [base_seed() for _ in range(microbatches)]))}

    def _ready(self, schedule: Any, inputs: Inputs, target: Tensor | None) -> tuple[int, Program, Any]:
        """Return how many micro-batches a schedule runs, the program, and this rank's inputs.

        Raises:
            InputError, StateError: the schedule cannot run them.
        """
        if schedule is None or schedule not in self._schedules:
            raise InputError("this schedule is not of these stages: take what pipe.schedule(...) gives.")
        count, stages = self._schedules[schedule]
        for stage in stages:
            stage.check_mode()
        return count, stages[0].program, self._local(stages[0].program, inputs, count, target)

    def step(self, schedule: Any, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run one step of a schedule: forwards, backwards, and the sums of gradients over stages and dp.

        Args:
            schedule: of `schedule(...)`. args, kwargs: the model's inputs of a whole batch, the same on the ranks of
                all stages. target: of the batch, where the schedule has a loss of its own.

        Returns: the mean of the micro-batches' losses, on every rank.
        Raises: RankError: ranks were given another batch, or their weights were updated differently.
        """
        return self._run(schedule, "step", Inputs(*args, **kwargs), target)

    @torch.no_grad()
    def evaluate(self, schedule: Any, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the loss of a batch without backwards; otherwise as `step`.

        Raises:
            InputError: order="v": torch's V schedules wait for each other without backwards.
        """
        if self._grid.places[-1] != self._grid.size - 1:
            raise InputError(
                "evaluate() of stages that are placed there and back (order='v'): torch's V schedules do not end "
                "without backwards. Call pipe.module(**batch) under torch.no_grad() instead."
            )
        return self._run(schedule, "eval", Inputs(*args, **kwargs), target)

    def _run(self, schedule: Any, method: str, inputs: Inputs, target: Tensor | None) -> Tensor:
        grid, calls = self._grid, self.module._calls
        with calls.turn(method):
            ready = together(grid.world, "reading the inputs", lambda: self._ready(schedule, inputs, target))
            count, program, (tensors, own_target) = ready
            what = f"{method} of {count} micro-batches by {type(schedule).__name__}"
            self._begin(what, inputs, target)
            tensors |= self._base(program, count)
            # The last stage alone makes losses: its rank passes the target, and the list that torch fills.
            losses: list[Tensor] = []
            options: Kwargs = {}
            device = grid.world.device
            if grid.rank == grid.last:
                own_target = torch.zeros(count) if own_target is None else own_target
                options = {"target": own_target.to(device), "losses": losses}
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
        """Meet all ranks where the user has hooks, to notice ranks that have left. A collective call."""
        if self.module._calls.hooked:
            meet(self._grid.world.channel, what)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model, all stages, is at most this. Collective.

        Returns: the norm before, on every rank.
        """
        meet(self._grid.world.channel, f"clip_grad_norm_ to {max_norm} by norm {norm_type}")
        return self.module._calls.tied.clip(max_norm, norm_type)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: PathLike, **options: Any) -> checkpoint.Pending | None:
        """Save all stages as one folder, for any number of stages and ranks. A collective call of all ranks.

        Args:
            path, options: see `ShardedModule.save_checkpoint`; an optimizer is over this rank's parameters.
        """
        return self.module.save_checkpoint(path, **options)

    def load_checkpoint(self, source: PathLike | Mapping[str, Any], **options: Any) -> checkpoint.Loaded:
        """Load a checkpoint of the whole model; each rank reads its own part. A collective call of all ranks.

        Args:
            source, options: see `ShardedModule.load_checkpoint`.
        """
        return self.module.load_checkpoint(source, **options)

    def __getstate__(self) -> Any:
        raise StateError(
            "a pipe is bound to its process groups and cannot be copied or pickled. Copy pipe.module for its weights, "
            "as AveragedModel does, or call autotp.stages again; save by pipe.save_checkpoint(...)."
        )

    def __str__(self) -> str:
        return table(self.plan, self.staging, self._grid.size, self._grid.chunks, self._grid.places)


def split_of(tensors: Mapping[str, Tensor], microbatches: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input in one micro-batch.

    Raises:
        InputError: an input has another first dimension than the others, or micro-batches do not divide it.
    """
    rows = {name: next(iter(t.shape), None) for name, t in tensors.items()}
    if None in rows.values() or len(set(rows.values())) > 1:
        raise InputError(
            f"micro-batches are slices of the first dimension of every input, and these have {rows}. Give each input "
            "the batch as its first dimension."
        )
    size = next((n for n in rows.values() if n is not None), microbatches)
    if size % microbatches:
        raise InputError(
            f"{microbatches} micro-batches do not divide a batch of {size}: take one of "
            f"{divisors(size)}, or another batch."
        )
    return {name: (size // microbatches, *t.shape[1:]) for name, t in tensors.items()}


def idle(times: Sequence[float], places: Sequence[int], ranks: int, microbatches: int) -> float:
    """Return the share of a step in which ranks wait, of 1F1B or, with several stages a rank, its interleaved form.

    Args:
        times: seconds of each stage for one micro-batch. places: the rank of each stage.
        ranks: of the pipeline. microbatches: of a step.
    """
    busy = [0.0] * ranks
    for time, place in zip(times, places, strict=True):
        busy[place] += time
    chunks = len(times) // ranks
    step = max(busy) * (microbatches + (ranks - 1) / chunks)
    return 1 - sum(busy) * microbatches / (ranks * step) if step else 0.0


def table(plan: Plan, staging: Staging, ranks: int, chunks: int, places: Sequence[int]) -> str:
    """Return the stages of a plan as text.

    Args:
        plan: that was cut. staging: where. ranks: of the pipeline. chunks: micro-batches. places: each stage's rank.
    """
    division = staging.division
    lines = [
        f"{plan.model}: {len(division.sizes)} stages over pp={ranks} x tp={plan.tp}"
        + (f" x {plan.batch.text}" if plan.batch.size > 1 else "")
        + f", {plan.cluster}",
        ROW.format("stage", "rank", "blocks", "of a micro-batch", "memory"),
    ]
    at = 0  # of the stage's first block among all
    for i, (size, time, memory) in enumerate(zip(division.sizes, division.seconds, division.memory, strict=True)):
        names = staging.units[at : at + size]
        blocks = names[0] if size == 1 else f"{names[0]} - {names[-1].rpartition('.')[2]}"
        at += size
        blocks += " with what is before" * (i == 0) + " with what is after" * (at == len(staging.units))
        lines.append(ROW.format(i, places[i], blocks, seconds(time), amount(memory)))
    shares = ", ".join(f"{m}: {idle(division.seconds, places, ranks, m):.0%}" for m in MICROBATCHES)
    lines.append(f"idle share of a step ({'interleaved ' if chunks > 1 else ''}1F1B) by micro-batches: {shares}")
    lines.append(
        "memory: weights, gradients, optimizer states, and what autograd keeps of the micro-batches in flight (1F1B)"
    )
    return "\n".join(lines)
