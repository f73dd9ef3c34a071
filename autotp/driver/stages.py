"""`autotp.stages`: one plan, cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp import compat
from autotp.capture.capture import aliases, skeleton
from autotp.capture.request import CaptureRequest, mode_of
from autotp.comm.ranks import Ranks, check_degree, together
from autotp.cost.objective import TRAINING
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, without_cache
from autotp.ir.graph import Capture, draws
from autotp.passes.decompose.loss_sums import with_loss
from autotp.passes.stages.balance import Staging, stage_starts
from autotp.passes.stages.cut import Piece, cut
from autotp.plans.plan import Plan
from autotp.runtime.interop.tool_refusals import refuse_clipping_of
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.programs import Source
from autotp.runtime.stages.feed import Feed
from autotp.runtime.stages.pipe import Grid, Pipe, tied_over_ranks
from autotp.runtime.stages.staged import StagedModule
from autotp.runtime.stages.sums import Sums

from .compile import Compilation, applied, further, plain
from .options import Options, StageKeywords, read_axis, refuse_beside, refuse_unknown, required_inputs, with_keywords
from .schedule import schedule
from .staging import found_units, staging

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
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band: see `autotp.plan`; the
            objective is "training", and memory what a rank may hold of all its stages.
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
    """Capture, plan, cut, and of the stages those of this rank."""
    captured, notes = compilation.capture(inputs)
    plan = compilation.solve(captured, notes)
    compilation.compare_weights()
    division, pieces = together(
        grid.world, "cutting the model", lambda: _cut(captured, plan, compilation.options, grid, limit)
    )
    return _pipe(compilation, captured, plan, division, pieces, grid, ranks, inputs, loss)


def _read(pp: int, tp: int, dp: int, chunks: int, order: str) -> Any:
    for name, value in (("pp", pp), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
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
    ranks = Ranks.find(tp, mesh, dp)
    world = Ranks.find(mesh=compat.flat_mesh(mesh))
    assert ranks is not None and world is not None
    there = list(range(pp))
    places = there * chunks if order == "loop" else [*there, *reversed(there)]
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    return Grid(replace(world, axes="pp, dp and tp"), group, rank, pp, chunks, tuple(places)), ranks


def _cut(
    captured: Capture, plan: Plan, options: Options, grid: Grid, limit: float | None = None,
    division: Staging | None = None,
) -> tuple[Staging, list[Piece]]:  # fmt: skip
    """The best division, or a given one, and the programs of its stages."""
    odd = next((n for n in captured.graph.nodes if n.op == "call_function" and draws(n)), None)
    if odd is not None:
        raise PlanError(
            f"{odd.name} draws random numbers by torch's generator, and those of stages must not depend on where they "
            "run: there is no form of it that draws by counters. Leave it out, or use tensor parallelism alone."
        )
    planned, sharded, builder = applied(captured, plan, options)
    if division is None:
        division = staging(planned, sharded, builder, plan.model, grid.size, grid.chunks, limit)
    units = found_units(sharded, plan.model, grid.size, grid.chunks)
    return division, cut(planned, sharded, stage_starts(units, division.division.sizes))


def _pipe(
    compilation: Compilation, captured: Capture, plan: Plan, division: Staging, pieces: list[Piece], grid: Grid,
    ranks: Ranks, inputs: Inputs, loss: bool,
) -> Pipe:  # fmt: skip
    """This rank's modules."""
    model, first = compilation.model, aliases(compilation.model)
    own = [i for i, place in enumerate(grid.places) if place == grid.rank]
    names = [_first(piece.names, first) for piece in pieces]
    placed = [place for place, size in zip(grid.places, division.division.sizes, strict=True) for _ in range(size)]
    blocks = tuple(f"{u}." for u, place in zip(division.units, placed, strict=True) if place == grid.rank)
    # The first stage also holds what nobody reads: checkpoints of the whole have it.
    names[0] |= unread(model, set().union(*names))
    mine = set().union(*(names[i] for i in own))
    paths = set().union(*(pieces[i].paths for i in own))
    paths |= {path for path, _ in model.named_modules() if f"{path}.".startswith(blocks)}  # in other modes too
    part = pruned(model, mine, paths)
    elsewhere = {n for n in model.state_dict() if first.get(n, n) not in mine}
    bare, options, request = skeleton(model, ranks.device), compilation.options, compilation.request
    source = Source(
        bare=skeleton(part, ranks.device), make=_no_other, capture=further, agreed=(), ranks=ranks, tp=plan.tp,
        aliases=aliases(part), want=request, sample=compilation.check is not False, whole=bare,
        lowering=compilation.lowering.priced(options.cluster, options.objective, schedule().rank),
    )  # fmt: skip
    module = StagedModule(part, plan, source)
    module._shards.elsewhere = frozenset(elsewhere)
    if grid.size > 1:
        refuse_clipping_of(module)
    # A weight of several stages has one gradient, their sum, and counts once in a norm: at its first holder.
    parameters = {n for n, _ in model.named_parameters()}
    tied = tied_over_ranks({i: n & parameters for i, n in enumerate(names)}, grid.places)
    shared = {name: holders for name, holders in tied.items() if grid.rank in holders}
    counted = {n for n in module._shards.storages if n not in tied or tied[n][0] == grid.rank}
    sums = Sums(module._shards, tied, shared, frozenset(counted), grid.pipeline, ranks.batch)
    inputs = without_cache(model, inputs)[0]

    # Stages of the other mode (train or eval) are cut once they are called, at the same units.
    ready = {captured.training: (Feed(bare, captured), pieces)}

    def cut_in(training: bool) -> tuple[Feed, list[Piece]]:
        if training in ready:
            return ready.pop(training)
        bare.train(training)
        other = further(bare, inputs, ranks.device, mode_of(bare.modules(), ranks.device), request)
        return Feed(bare, other), _cut(other, plan, options, grid, division=division)[1]

    return Pipe(plan, module, cut_in, division, grid, sums, inputs, loss)


def _first(names: set[str], first: Mapping[str, str]) -> set[str]:
    return {first.get(n, n) for n in names}


def _no_other(*args: Any) -> Any:
    raise PlanError("stages run the one program that they were cut from. Make stages again for other inputs or modes.")


def pruned(model: nn.Module, names: Collection[str], paths: Collection[str]) -> nn.Module:
    """A shallow copy of a model; it shares the tensors that it has, and the model stays as it is.

    Args:
        names: of the parameters and buffers that it has, each under any of its names.
        paths: of the modules that it has beside those that hold something.
    """
    first = aliases(model)
    first_names = {first.get(n, n) for n in names}
    tensors = {n for n, f in first.items() if f in first_names}
    module_paths = {*paths, *(n.rpartition(".")[0] for n in tensors)}
    homes = set(module_paths)
    for path in module_paths:
        homes |= {".".join(path.split(".")[:i]) for i in range(1, path.count(".") + 1)}
    copies: dict[int, nn.Module] = {}

    def part(module: nn.Module, path: str) -> nn.Module:
        if id(module) not in copies:
            new: Any = object.__new__(type(module))
            copies[id(module)] = new
            new.__dict__ = dict(vars(module))
            inside = f"{path}." if path else ""
            for table in ("_parameters", "_buffers"):
                old = vars(module)[table]
                # None, which forwards and descriptions ask for, in the place of what is held elsewhere.
                new.__dict__[table] = dict.fromkeys(old) | {k: t for k, t in old.items() if inside + k in tensors}
            children = {k: m for k, m in module._modules.items() if m is None or inside + k in homes}
            new.__dict__["_modules"] = {k: m and part(m, inside + k) for k, m in children.items()}
        return copies[id(module)]

    return part(model, "")


def unread(model: nn.Module, names: Collection[str]) -> set[str]:
    """First names of the tensors of a model that no stage reads: the first stage holds them, for checkpoints."""
    first = aliases(model)
    return set(first.values()) - {first.get(n, n) for n in names}
