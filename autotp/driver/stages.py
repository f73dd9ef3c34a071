"""`autotp.stages`: one plan, cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autotp import compat
from autotp.capture.capture import aliases, skeleton
from autotp.capture.request import CaptureRequest
from autotp.comm.ranks import Ranks, check_degree, check_order, together
from autotp.cost.objective import TRAINING
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layouts
from autotp.ir.program import Decided, Sharded
from autotp.passes.decompose.loss_sums import with_loss
from autotp.passes.stages.balance import Staging
from autotp.plans.estimates import Axes
from autotp.plans.plan import Plan
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.module import ShardedModule
from autotp.runtime.stages.pipe import Pipe
from autotp.runtime.stages.stage import Grid, Pipeline
from autotp.runtime.storage import ShardState
from autotp.text import axis_text, counts

from .compare import kind_of
from .compile import Compilation, applied, plain
from .options import (
    Keywords,
    Options,
    StageKeywords,
    StateKeywords,
    axes_beside,
    pick,
    refuse_beside,
    refuse_unknown,
    required_inputs,
    with_keywords,
)  # fmt: skip
from .staging import check_draws, in_pieces, staging

ORDERS = ("loop", "v")


@with_keywords
def stages(
    model: nn.Module,
    pp: int,
    tp: int = 1,
    *,
    chunks: int = 1,
    order: str = "loop",
    example_inputs: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    outputs: str = "loss",
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
    **keywords: Unpack[StageKeywords],
) -> Pipe:
    """Cut a model into pipeline stages of one tensor-parallel plan. Run it by torchrun on pp x dp x cp x tp ranks.

    Stages are cut between repeated blocks: so that the slowest takes the least time by the plan's own seconds, and none
    holds more than `memory`. Each rank holds the parameters of its own stages alone, under the original's names.

    Args:
        model: any `nn.Module` with repeated blocks; it is left as it is. On the meta device too (then load weights).
        pp, tp: ranks of the pipeline, and tensor-parallel ones of each of its places.
        chunks: stages of each rank, for interleaved schedules.
        order: "loop" assigns stages to ranks in turn, "v" there and back, as torch's zero-bubble V schedule wants it.
        example_inputs: one micro-batch, of one dp rank and of whole sequences: a tensor, args, kwargs, or `Inputs`.
        loss: the model then takes `targets=` too, and gives `loss(outputs of the model, targets)`.
        outputs: "loss": the last stage gives the model's loss; "full": its outputs, a tensor or a tuple of them, for
            the loss of a schedule.
        mesh: with dimensions "pp" and "tp", and between them "dp", "cp" where these are asked for; default: the world.
        plan: use this plan for the whole model instead of making one.
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band, seconds, shares: see
            `autotp.plan`; the objective is "training", and memory what a rank may hold of all its stages.
        dp, cp, fully_shard, carried, precision, reduce_dtype: see `autotp.compile`, as backend, options, optimise,
            check, check_capture. compare: refused, for a rank does not hold the whole original.

    Returns: the `Pipe`; print it for the stages, `pipe.schedule(...)` and `pipe.step(...)` run it.
    Raises: AutoTPError: its subclasses say what is wrong; all ranks raise together.
    """
    refuse_unknown("stages", keywords, StageKeywords)
    axes = _read(pp, tp, chunks, order, plan, keywords)
    steering = {name: value for name, value in keywords.items() if name != "memory"}  # which is of all stages of a rank
    refuse_beside(plan, steering)
    grid, ranks = _grid(pp, tp, axes, chunks, order, mesh)
    model = with_loss(model, loss) if loss is not None else model
    read = partial(required_inputs, model, example_inputs, "autotp.stages", axes, ranks)
    inputs = together(grid.world, "reading the example inputs", read)
    lowering = Lowering.read(keywords)
    settings = Options.of_plan(plan) if plan is not None else Options.read(tp, steering, axes)
    request = CaptureRequest.read(axes, outputs, **pick(keywords, StateKeywords)).within(tp, settings.cluster)
    if settings.tp != tp:
        raise PlanError(f"the plan is for tp={settings.tp}, and tp={tp} is asked for. Plan again.")
    check, check_capture = keywords.get("check"), keywords.get("check_capture")
    model = plain(model, request, lowering)
    compilation = Compilation(model, grid.world, settings, request, lowering, plan, check, check_capture)
    limit = Options.read(tp, {"memory": keywords.get("memory")}).memory
    return _staged_pipe(compilation, inputs, grid, ranks, limit, outputs == "loss" or loss is not None)


def _staged_pipe(
    compilation: Compilation, inputs: Inputs, grid: Grid, ranks: Ranks, limit: float | None, loss: bool
) -> Pipe:
    """Capture, plan and cut a model, and make the sharded module of this rank's stages."""
    model = compilation.model
    captured, notes = compilation.capture(inputs)
    plan = compilation.solve(captured, notes)
    compilation.compare_weights()
    division, sharded = together(
        grid.world, "cutting the model", lambda: _division(captured, plan, compilation, grid, limit)
    )
    first = aliases(model)
    holdings: list[set[str]] = [set() for _ in range(grid.size)]
    for place, piece in zip(grid.places, sharded.pieces, strict=True):
        holdings[place] |= {str(first.get(n, n)) for n in piece.names}
    # What no stage reads the first one holds: checkpoints of the whole have it.
    holdings[grid.places[0]] |= set(first.values()) - set().union(*holdings)
    holders = {}
    for name, _ in model.named_parameters():
        places = tuple(place for place, names in enumerate(holdings) if name in names)
        holders |= {name: places} if len(places) > 1 else {}
    elsewhere = []
    for names in holdings:
        elsewhere.append(frozenset(n for n, f in first.items() if f not in names))
    shards = ShardState(
        skeleton(model, ranks.device), ranks, plan.tp, first, plan.batch, elsewhere=elsewhere[grid.rank], staged=True
    )
    absent = [elsewhere[i] for i in grid.places]
    make = partial(_cut, plan=plan, options=compilation.options, division=division, absent=absent)
    pipeline = Pipeline(grid, holders, loss)
    source = compilation.source_of(shards, plan, make, ready=[(captured, sharded)], pipeline=pipeline)
    return Pipe(plan, ShardedModule(model, plan, source), division, without_cache(model, inputs)[0])


def _division(
    captured: Capture, plan: Plan, compilation: Compilation, grid: Grid, limit: float | None
) -> tuple[Staging, Sharded]:
    """Find the best division of the model's blocks into stages, and cut the program of the ranks by it."""
    check_draws(captured)
    planned, sharded, builder = applied(captured, plan, compilation.options, compilation.request.outputs)
    division = staging(planned, sharded, builder, plan.model, grid.size, grid.chunks, limit, grid.places)
    return division, in_pieces(planned, sharded, division, plan.model)


def _cut(
    captured: Capture, states: Layouts, outputs: str, decided: Decided, *, plan: Plan, options: Options,
    division: Staging, absent: Sequence[frozenset[str]],
) -> Sharded:  # fmt: skip
    """Make the program of the ranks for a further call, cut at the division's blocks.

    Args:
        captured, states, outputs, decided, plan, options: see `applied`. division: of the blocks.
        absent: names of the parameters and buffers that the rank of each stage does not hold.
    """
    check_draws(captured)
    planned, sharded, _ = applied(captured, plan, options, outputs, states, decided)
    sharded = in_pieces(planned, sharded, division, plan.model, absent)
    for stage, (piece, names) in enumerate(zip(sharded.pieces, absent, strict=True)):
        if missing := piece.names & names:
            raise PlanError(
                f"in this call stage {stage} reads {min(missing)}, which another stage holds. Make stages by an "
                "example of such a call."
            )
    return sharded


def _read(pp: int, tp: int, chunks: int, order: str, plan: Plan | None, keywords: Keywords) -> Axes:
    """Read the axes beside stages, and refuse arguments that stages cannot have."""
    for name, value in (("pp", pp), ("chunks", chunks)):
        if not counts(value):
            raise InputError(
                f"{name}={value!r}: it counts {'ranks' if name == 'pp' else 'stages'}, so it is at least 1."
            )
    check_degree(tp)
    if order not in ORDERS or (order == "v" and chunks != 2):
        raise InputError(f"order={order!r}: take 'loop', or with chunks=2 'v'.")
    if kind_of(keywords.get("compare")) is not ShardedModule:
        raise InputError(
            "compare= runs the whole original on every rank, and a rank of stages holds the weights of its own alone. "
            "autotp.verify(model, tp, inputs, pp=2) compares stages with the original."
        )
    objective = keywords.get("objective", TRAINING.name)
    if objective != TRAINING.name:
        raise InputError(f"objective={objective!r}: stages are planned for training. Leave it out.")
    return axes_beside(plan, {**keywords, "pp": pp}, tp)  # type: ignore[typeddict-unknown-key]


def _grid(pp: int, tp: int, axes: Axes, chunks: int, order: str, mesh: DeviceMesh | None) -> tuple[Grid, Ranks]:
    """Find the ranks of the pipeline, and those of this one's stages."""
    degrees = {"pp": pp, **axes.degrees, "tp": tp}
    text, count = axis_text(degrees), prod(degrees.values())
    if mesh is None:
        every = Ranks.find()
        if every is None:
            raise InputError(f"stages run on ranks: launch {text} = {count} of them with torchrun.")
        if every.tp != count:
            raise InputError(
                f"{text} makes {count} ranks; the world has {every.tp}. Launch as many, or pass a mesh with dimensions "
                "of these names over a part of them."
            )
        mesh = init_device_mesh(every.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    names = mesh.mesh_dim_names or ()
    check_order(names)
    sizes = dict(zip(names, mesh.shape, strict=False))
    if {name: n for name, n in sizes.items() if n > 1 or name in degrees} != degrees:
        raise InputError(f"the mesh has dimensions {sizes}, and {text} are asked for.")
    ranks, world = Ranks.find(tp, mesh, axes.dp, axes.cp), Ranks.find(mesh=compat.flat_mesh(mesh))
    line = world if axes.size == 1 else Ranks.find(mesh=compat.flat_mesh(mesh["pp", "tp"]))
    places = [*range(pp)] * chunks if order == "loop" else [*range(pp), *reversed(range(pp))]
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    world = replace(world, axes=f"{', '.join([*degrees][:-1])} and tp")
    ranks = replace(ranks, every=world, line=replace(line, axes="pp and tp"), place=ranks.every)
    return Grid(world, group, rank, pp, chunks, tuple(places)), ranks
