"""`autotp.stages`: one plan, cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp import compat
from autotp.capture.capture import aliases, skeleton
from autotp.capture.request import CaptureRequest
from autotp.comm.ranks import Ranks, check_degree, together
from autotp.cost.objective import TRAINING
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layout
from autotp.ir.program import Decided, Sharded
from autotp.passes.decompose.loss_sums import with_loss
from autotp.passes.stages.balance import Staging
from autotp.plans.plan import Plan
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.module import ShardedModule
from autotp.runtime.programs import Source
from autotp.runtime.stages.pipe import Pipe
from autotp.runtime.stages.pipeline import Pipeline
from autotp.runtime.stages.relay import Grid
from autotp.text import counts

from .compile import Compilation, applied, decided_for, further, plain
from .options import Options, StageKeywords, read_axis, refuse_beside, refuse_unknown, required_inputs, with_keywords
from .schedule import schedule
from .staging import check_draws, in_pieces, staging

ORDERS = ("loop", "v")


@with_keywords
def stages(
    model: nn.Module,
    pp: int,
    tp: int = 1,
    *,
    dp: int = 1,
    chunks: int = 1,
    order: str = "loop",
    example_inputs: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    outputs: str = "loss",
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
    **keywords: Unpack[StageKeywords],
) -> Pipe:
    """Cut a model into pipeline stages of one tensor-parallel plan. Run it by torchrun on pp x dp x tp ranks.

    Stages are cut between repeated blocks: so that the slowest takes the least time by the plan's own seconds, and none
    holds more than `memory`. Each rank holds the parameters of its own stages alone, under the original's names.

    Args:
        model: any `nn.Module` with repeated blocks; it is left as it is. On the meta device too (then load weights).
        pp, tp, dp: ranks of the pipeline, and of each of its places: tensor- and data-parallel ones.
        chunks: stages of each rank, for interleaved schedules.
        order: "loop" deals stages to ranks in turn, "v" there and back, as torch's zero-bubble V schedule wants it.
        example_inputs: one micro-batch (of one dp rank): a tensor, args, kwargs, or `autotp.Inputs`.
        loss: the model then takes `targets=` too, and gives `loss(outputs of the model, targets)`.
        outputs: "loss": the last stage gives the model's loss; "full": its outputs, a tensor or a tuple of them, for
            the loss of a schedule.
        mesh: with dimensions "pp", "tp", and with dp "dp"; by default the world, tp ranks next to each other.
        plan: use this plan for the whole model instead of making one.
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band, seconds: see
            `autotp.plan`; the objective is "training", and memory what a rank may hold of all its stages.
        backend, options, optimise, check, check_capture: see `autotp.compile`.

    Returns: the `Pipe`; print it for the stages, `pipe.schedule(...)` and `pipe.step(...)` run it.
    Raises: AutoTPError: its subclasses say what is wrong; all ranks raise together.
    """
    refuse_unknown("stages", keywords, StageKeywords)
    axis = _read(pp, tp, dp, chunks, order)
    steering = {name: value for name, value in keywords.items() if name != "memory"}  # which is of all stages of a rank
    refuse_beside(plan, steering)
    objective = keywords.get("objective", TRAINING.name)
    if objective != TRAINING.name:
        raise InputError(f"objective={objective!r}: stages are planned for training. Leave it out.")
    grid, ranks = _grid(pp, tp, dp, chunks, order, mesh)
    model = with_loss(model, loss) if loss is not None else model
    inputs = together(
        grid.world, "reading the example inputs", lambda: required_inputs(model, example_inputs, "autotp.stages")
    )
    lowering, request = Lowering.read(keywords), CaptureRequest.read(dp, outputs, "counter")
    settings = Options.of_plan(plan) if plan is not None else Options.read(tp, steering, axis)
    if plan is not None and (plan.tp, plan.batch.size) != (tp, dp):
        raise PlanError(f"the plan is for tp={plan.tp} and dp={plan.batch.size}, and tp={tp}, dp={dp} are asked for.")
    check, check_capture = keywords.get("check"), keywords.get("check_capture")
    model = plain(model, request)
    compilation = Compilation(model, grid.world, settings, request, lowering, plan, check, check_capture)
    limit = Options.read(tp, {"memory": keywords.get("memory")}).memory
    return _staged_pipe(compilation, inputs, grid, ranks, limit, outputs == "loss" or loss is not None)


def _staged_pipe(
    compilation: Compilation, inputs: Inputs, grid: Grid, ranks: Ranks, limit: float | None, loss: bool
) -> Pipe:
    """Capture, plan, cut, and a sharded module of this rank's stages."""
    model, options = compilation.model, compilation.options
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
        places = tuple(place for place, own in enumerate(holdings) if name in own)
        holders |= {name: places} if len(places) > 1 else {}
    elsewhere = []
    for own in holdings:
        elsewhere.append(frozenset(n for n, f in first.items() if f not in own))
    source = Source(
        bare=skeleton(model, ranks.device),
        decide=partial(decided_for, plan=plan, options=options),
        make=partial(_cut, plan=plan, options=options, division=division, absent=[elsewhere[i] for i in grid.places]),
        capture=further, agreed=schedule(ranks=grid.world).agreed, ranks=ranks, tp=plan.tp, aliases=first,
        want=compilation.request, sample=compilation.check is not False,
        lowering=compilation.lowering.priced(options.cluster, options.objective, schedule().rank),
        ready=[(captured, sharded)], pipeline=Pipeline(grid, holders, loss),
        elsewhere=elsewhere[grid.rank],
    )  # fmt: skip
    module = ShardedModule(model, plan, source)
    return Pipe(plan, module, division, without_cache(model, inputs)[0])


def _division(
    captured: Capture, plan: Plan, compilation: Compilation, grid: Grid, limit: float | None
) -> tuple[Staging, Sharded]:
    """The best division of the model's blocks into stages, and the program of the ranks, cut so."""
    check_draws(captured)
    planned, sharded, builder = applied(captured, plan, compilation.options, compilation.request.outputs)
    division = staging(planned, sharded, builder, plan.model, grid.size, grid.chunks, limit)
    return division, in_pieces(planned, sharded, division, plan.model)


def _cut(
    captured: Capture, states: Mapping[str, Layout], outputs: str, decided: Decided, *, plan: Plan, options: Options,
    division: Staging, absent: Sequence[frozenset[str]],
) -> Sharded:  # fmt: skip
    """The program of the ranks for a further call, cut at the division's blocks.

    Args:
        captured, states, outputs, decided, plan, options: see `applied`. division: of the blocks.
        absent: names of the parameters and buffers that the rank of each stage does not hold.
    """
    check_draws(captured)
    planned, sharded, _ = applied(captured, plan, options, outputs, states, decided)
    sharded = in_pieces(planned, sharded, division, plan.model)
    for stage, (piece, names) in enumerate(zip(sharded.pieces, absent, strict=True)):
        if missing := piece.names & names:
            raise PlanError(
                f"in this call stage {stage} reads {min(missing)}, which another stage holds. Make stages by an "
                "example of such a call."
            )
    return sharded


def _read(pp: int, tp: int, dp: int, chunks: int, order: str) -> Any:
    for name, value in (("pp", pp), ("chunks", chunks)):
        if not counts(value):
            raise InputError(
                f"{name}={value!r}: it counts {'ranks' if name == 'pp' else 'stages'}, so it is at least 1."
            )
    check_degree(tp)
    if order not in ORDERS or (order == "v" and chunks != 2):
        raise InputError(f"order={order!r}: take 'loop', or with chunks=2 'v'.")
    return read_axis(dp, False, tp)


def _grid(pp: int, tp: int, dp: int, chunks: int, order: str, mesh: DeviceMesh | None) -> tuple[Grid, Ranks]:
    """Find the ranks of the pipeline, and those of this one's stages."""
    if mesh is None:
        every = Ranks.find()
        if every is None:
            raise InputError(f"stages run on ranks: launch pp x dp x tp = {pp * dp * tp} of them with torchrun.")
        if every.tp != pp * dp * tp:
            raise InputError(
                f"pp={pp} x dp={dp} x tp={tp} makes {pp * dp * tp} ranks; the world has {every.tp}. Launch as many, "
                "or pass a mesh with dimensions 'pp', 'dp' and 'tp' over a part of them."
            )
        kind = every.device.type
        mesh = DeviceMesh(kind, torch.arange(every.tp).view(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if (sizes.get("pp"), sizes.get("dp", 1), sizes.get("tp")) != (pp, dp, tp) or set(sizes) - {"pp", "dp", "tp"}:
        raise InputError(f"the mesh has dimensions {sizes}, and pp={pp}, dp={dp}, tp={tp} are asked for.")
    ranks, world = Ranks.find(tp, mesh, dp), Ranks.find(mesh=compat.flat_mesh(mesh))
    line = world if dp == 1 else Ranks.find(mesh=compat.flat_mesh(mesh["pp", "tp"]))
    assert ranks is not None and world is not None and line is not None
    there = list(range(pp))
    places = there * chunks if order == "loop" else [*there, *reversed(there)]
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    world, line = replace(world, axes="pp, dp and tp"), replace(line, axes="pp and tp" if dp > 1 else "pp, dp and tp")
    return Grid(world, group, rank, pp, chunks, tuple(places)), replace(ranks, every=world, line=line)
