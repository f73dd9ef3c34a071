"""The public functions: plan, parallelize, compile; sweep is in its own file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.capture.request import CaptureRequest
from autotp.comm.ranks import PLAIN_PROCESS, Ranks, agree, mesh_of, of_first, together, versions
from autotp.comm.turn import Turn
from autotp.cost import Cluster
from autotp.driver.compare import kind_of
from autotp.driver.compile import Compilation, capture_model, plain, solve_plan
from autotp.driver.like import plan_like
from autotp.driver.mesh_search import choose_experts, choose_mesh, refuse_beside_devices
from autotp.driver.options import (
    CaptureKeywords,
    CompileKeywords,
    ModuleKeywords,
    Options,
    PlanKeywords,
    Product,
    axes_beside,
    degrees_of,
    example,
    pick,
    read_invariant,
    refuse_beside,
    refuse_late,
    refuse_unknown,
    refuse_unlike,
    required_inputs,
    with_keywords,
)  # fmt: skip
from autotp.driver.sweep import DEGREES, automatic, sweep
from autotp.ir.graph import Capture
from autotp.passes.decompose.loss_sums import with_loss
from autotp.plans.choices import MeshChoice, Sweep
from autotp.plans.estimates import ALONE, Axes, refuse_travel
from autotp.plans.plan import Plan
from autotp.runtime.checkpoint import resumed
from autotp.runtime.lower.lower import Lowering
from autotp.runtime.module import LazyModule, ShardedModule

from .errors import InputError, PlanError
from .inputs import Inputs
from .text import BITS

__all__ = ["Plan", "Sweep", "compile", "parallelize", "plan", "sweep"]


@overload
def plan(
    model: nn.Module, tp: Product | DeviceMesh | Literal["auto"], *, devices: None = None, global_batch: None = None,
    example_inputs: Any = None, like: Plan | None = None, **keywords: Unpack[PlanKeywords],
) -> Plan: ...  # fmt: skip
@overload
def plan(
    model: nn.Module, tp: Product | DeviceMesh | Literal["auto"] | None = None, *, devices: int,
    global_batch: int | None = None, example_inputs: Any = None, **keywords: Unpack[PlanKeywords],
) -> MeshChoice: ...  # fmt: skip
@with_keywords
def plan(
    model: nn.Module, tp: Product | DeviceMesh | Literal["auto"] | None = None, *, devices: int | None = None,
    global_batch: int | None = None, example_inputs: Any = None, like: Plan | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Plan | MeshChoice:  # fmt: skip
    """Find the cheapest legal placement of a model over `tp` ranks. Needs no devices, weights or process group.

    Among legal plans the parameters per rank come first (at most 1.03 times the least that any legal plan reaches),
    then the least step time by the cost model. Among the plans within a band of that (2%) the one that sends the fewest
    bytes is taken, then the fewest collectives, then the plainest partitions; never one that is slower than Megatron's.

    Args:
        model: any `nn.Module`; on the meta device too.
        tp: number of ranks, as a product too (docs/heads.md): (8, 2); or a `DeviceMesh` with dimensions dp, cp and tp,
            which gives all degrees; "auto": of 1, 2, 4, ... 32 that one with the most throughput per device among those
            that fit into `memory`, by default the device's. The plan then holds the table of all (`Plan.degrees`).
        devices: price every pp x dp x cp x tp of so many, for training (docs/choosing.md); with `tp` those alone.
        global_batch: examples of a step over all of these; default: as many as the example inputs have, for each.
        example_inputs: a tensor, args, kwargs, `autotp.Inputs`; of transformers optional. With `devices` a micro-batch.
        pins: `{"model.layers.*.mlp.up_proj.weight": Shard(0)}` with torch's placements, for parameters, module outputs,
            the model's inputs and outputs, or a logical axis (docs/guide.md); patterns as in `fnmatch`.
        cluster: the machines to price for: a `Cluster`, a preset's name, or a .json or .toml file; default "h100".
        objective: "training" (forward and backward count), "prefill" (a forward), or "decode" (a forward of one new
            token a sequence, against a cache as long as the example inputs).
        optimizer: whose states count in memory, such as "adamw". sequence_parallel: None, as cost decides, True, False.
        memory: what a rank may hold beside its working set, in bytes or as "80GB"; None for no limit.
        within_node: refuse a degree that leaves the node. shares: of each rank, as (2, 1). seconds: of the search, CPU.
        band: share of the least step time that a plan may take longer to send less; 0, and with `devices`: no longer.
        dp, cp: ranks of data and of context parallelism (docs/axes.md). With dp the example inputs are one rank's slice
            of the batch, with cp whole sequences. `fully_shard` splits weights over both too; `ep` experts over dp.
        like: a plan for another depth, degree or width of this architecture, of which all is kept that sizes allow.
        outputs, random, carried, precision: see `autotp.compile`.
        check_capture: compare the captured graph with the model, outputs and gradients, on the example inputs. None
            does so, of a large model with a small one of its classes; True with the model itself, False not at all. The
            plan's notes say what was compared, or why nothing was.

    Returns: the `Plan`; print it to read it. With `devices` the `MeshChoice`: `.rows`, `.best`, `.plan`, `.to_svg()`.
    Raises: InputError, CaptureError, PlanError.
    """
    refuse_unknown("plan", keywords, PlanKeywords)
    degree, keywords = degrees_of(tp, keywords, model)
    others = (like, *map(keywords.get, ("within_node", "fully_shard", "dp", "cp", "ep")))
    refuse_beside_devices(devices, global_batch, degree, any(x not in (None, False, 1) for x in others))
    axes = axes_beside(None, _fixed(keywords), degree)
    options = Options.read(1 if degree is None or degree == "auto" else degree, keywords, axes)
    dealt = replace(axes, cp=_request(keywords, axes).cp)
    inputs, name = required_inputs(model, example_inputs, "autotp.plan", dealt), type(model).__name__
    capture = partial(_captured, model, example_inputs, keywords, options.cluster)
    if devices is not None:
        return choose_mesh(capture, inputs, options, name, devices, global_batch, degree)
    if (free := keywords.get("ep") == "auto") and like is None:
        return _experts(model, example_inputs, options, keywords)
    captured, notes = capture(options.tp, axes)
    if like is not None:
        auto = "auto" if free else degree
        return plan_like(like, auto, captured, options, lambda of: solve_plan(captured, notes, of, name))
    if degree == "auto":
        return automatic(captured, notes, DEGREES, keywords, name)
    return solve_plan(captured, notes, options, name)


@with_keywords
@Turn("autotp.parallelize()")
def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    example_inputs: Any = None,
    **keywords: Unpack[ModuleKeywords],
) -> ShardedModule:
    """Shard a model by a plan: every rank keeps its part of the parameters, and the module answers like the original.

    Args:
        model: the model that the plan was made for (same parameter names and shapes).
        plan: from `autotp.plan`, or `Plan.load`.
        mesh: a `DeviceMesh`; otherwise the process group that is there, or one made under torchrun.
        example_inputs: captured at once instead of at the first call.
        outputs, random, carried, backend, options, optimise, precision, reduce_dtype: see `compile`.
        check, compare: compare values between the ranks, and with the original; see `compile`.

    Raises:
        PlanError: the plan does not fit the model. RankError: the ranks disagree.
    """
    refuse_unknown("parallelize", keywords, ModuleKeywords)
    _refuse_other(plan)
    options = Options.of_plan(plan)
    request, lowering = _request(keywords, plan.batch).within(options.tp, options.cluster), Lowering.read(keywords)
    kind = kind_of(keywords.get("compare"))
    refuse_travel(plan.batch, keywords)
    ranks = Ranks.find(plan.tp, mesh, plan.batch.dp, plan.batch.cp).holding(model)
    dealt = replace(plan.batch, cp=request.cp)
    inputs = None if example_inputs is None else _examples(model, example_inputs, dealt, ranks)
    refuse_late(plan.batch, inputs)
    model = plain(model, request, lowering)
    compilation = Compilation(
        model, ranks, options, request, lowering, plan, keywords.get("check"), check_capture=False
    )
    captured = compilation.capture(inputs)[0] if inputs is not None else None
    return kind(*compilation.source(plan, captured))


@with_keywords
@Turn("autotp.compile()")
def compile(
    model: nn.Module,
    tp: int | tuple[int | str, ...] | DeviceMesh | Literal["auto"] | None = None,
    *,
    example_inputs: Any = None,
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    **keywords: Unpack[CompileKeywords],
) -> ShardedModule:
    """Shard a model over `tp` ranks: `parallelize(model, plan(model, tp, ...))`. Run it by torchrun, alike on all.

    Args:
        model: any `nn.Module`; it is left as it is. On the meta device too (then load weights afterwards).
        tp: number of ranks; default: all of the mesh or world; in a larger one, contiguous groups. A product, as for
            `plan`, or the names of the last dimensions of `mesh`, which make one: ("outer", "inner"). A `DeviceMesh` of
            all degrees, as for `plan`, and the ranks. "auto": the world's best divisor, without `mesh` or `plan`.
        example_inputs: a tensor, args, kwargs, or `autotp.Inputs`; left out: by config, or at the first call.
        mesh: a `DeviceMesh`; otherwise the process group that is there, or one made under torchrun.
        plan: use this plan instead of making one (then without what steers planning).
        pins, cluster, objective, optimizer, sequence_parallel, memory, within_node, band, seconds, shares: see `plan`.
        dp, cp, ep, imbalance, fully_shard: see `plan`: dp ranks pass slices of the batch, all cp ranks whole sequences.
        outputs: "full" in the original's own class, "sharded": tensors as DTensors, "loss": its scalar alone.
        loss: the module then takes `targets=` too, and gives `loss(outputs of the model, targets)`.
        random: "counter": what dropout and its like draw does not depend on tp; "torch": the original's own numbers.
        carried: {1: "past_k"}: output 1 comes back as the input past_k. Each rank gets, and passes, its part of it.
        backend, options: "eager", or what they are to `torch.compile`, such as "inductor".
        optimise: switches by name: {"overlap": False}, "measured"; True, False: all; None: each as it sees fit.
        check: compare values between the ranks too: parameters' once, inputs' at every call. check_capture: see `plan`.
        precision: "float8", "float8-rowwise", "float8-delayed": large products in that (docs/precision.md).
        reduce_dtype: torch.float32: gradients of narrower parameters are added up in it, over ranks and backwards.
        compare: "first", "every": for debugging, compare that call and its backward with the original's, on the ranks.
        tp_invariant, dp_invariant: 8, 4: equal bits at all tp and dp that divide these (docs/invariance.md).
        resume: take the weights of the latest step that `snapshot()` kept of this run of torchrun, where there is one.
    Returns: the `ShardedModule`; in one plain process it holds the plan, and cannot be called.
    Raises: AutoTPError: its subclasses say what is wrong, where, why, and what to do; all ranks raise together.
    """
    refuse_unknown("compile", keywords, CompileKeywords)
    tp, mesh = mesh_of(tp, mesh)
    degree, keywords = degrees_of(tp, keywords, model)
    _refuse(plan, keywords, degree, mesh)
    lowering, kind = Lowering.read(keywords), kind_of(keywords.get("compare"))
    model = with_loss(model, loss) if loss is not None else model
    axes, captured = axes_beside(plan, _fixed(keywords), degree), None
    request = _request(keywords, axes)
    if degree == "auto":
        (plan, captured), degree = _automatic(model, example_inputs, keywords, request, lowering), None
    ranks, options, hosts = _ranks(plan, degree, mesh, axes, keywords, model)
    if keywords.get("ep") == "auto" and plan is None:
        plan = _experts(model, example_inputs, options, keywords, ranks)
        axes, options, request = plan.batch, Options.of_plan(plan), _request(keywords, plan.batch)
    inputs = _examples(model, example_inputs, replace(axes, cp=request.cp), ranks)
    refuse_late(ALONE if hosts else axes, inputs, bool(keywords.get("resume")))
    request = request.within(options.tp, options.cluster)
    check, check_capture = keywords.get("check"), keywords.get("check_capture")
    model = plain(model, request, lowering)
    compilation = Compilation(model, ranks, options, request, lowering, plan, check, check_capture, captured, hosts)
    if inputs is None:
        return LazyModule(model, compilation, kind)
    return resumed(kind(*compilation(inputs)), bool(keywords.get("resume")))


def _captured(
    model: nn.Module, example_inputs: Any, keywords: Mapping[str, Any], cluster: Cluster, tp: int, axes: Axes,
    check: bool = True, dealt: bool = True,
) -> tuple[Capture, list[str]]:  # fmt: skip
    """Capture the program of a rank of the axes beside tp, with its notes; compared with the model as `check_capture`
    says. Without `dealt` it has as many tokens as a rank of cp, but is not sharded over cp."""
    request = _request(keywords, refuse_travel(axes, keywords))
    inputs = required_inputs(model, example_inputs, "autotp.plan", replace(axes, cp=request.cp))
    compared = keywords.get("check_capture") if check else False
    request = request.within(tp, cluster) if dealt else replace(request, cp=1)
    return capture_model(model, inputs, torch.device("cpu"), compared, request)


def _fixed(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords without an ep that is to be chosen."""
    return {name: value for name, value in keywords.items() if (name, value) != ("ep", "auto")}


def _experts(
    model: nn.Module, example_inputs: Any, options: Options, keywords: Mapping[str, Any], ranks: Ranks = PLAIN_PROCESS
) -> Plan:
    """Make the plan with the best ep, on one rank. A collective call."""
    capture = partial(_captured, model, example_inputs, keywords, options.cluster)
    solve = partial(solve_plan, name=type(model).__name__)
    return of_first(ranks.planners, "planning", partial(choose_experts, capture, solve, options, keywords))


def _request(keywords: Mapping[str, Any], axes: Axes) -> CaptureRequest:
    """Read the keywords of captures."""
    return CaptureRequest.read(axes, **pick(keywords, CaptureKeywords))


def _examples(model: nn.Module, example_inputs: Any, axes: Axes, ranks: Ranks) -> Inputs | None:
    """Read the example inputs, on the ranks of all axes together. A collective call."""
    read = partial(example, model, example_inputs, axes, ranks)
    return together(ranks.planners, "reading the example inputs", read)


def _refuse_other(plan: Any) -> None:
    """Refuse an object that is no plan."""
    if not isinstance(plan, Plan):
        raise InputError(f"plan is {type(plan).__name__}; give what autotp.plan returns, or Plan.load(path).")


def _refuse(plan: Any, keywords: Mapping[str, Any], tp: Any, mesh: DeviceMesh | None) -> None:
    """Refuse arguments of `compile` that say the same thing twice."""
    if plan is not None:
        _refuse_other(plan)
    refuse_beside(plan, keywords)
    if any(keywords.get(name) is not None for name in BITS):
        refuse_unlike({**keywords, "tp": "auto" if tp == "auto" else None})
    if tp == "auto" and (mesh is not None or plan is not None):
        raise InputError("tp='auto' picks the degree, and mesh= and plan= come with one. Leave it out, or them.")


def _automatic(
    model: nn.Module, example_inputs: Any, keywords: Mapping[str, Any], request: CaptureRequest, lowering: Lowering
) -> tuple[Plan, tuple[Capture, list[str]]]:
    """Make the plan of the best degree that the world can have, on one rank; return it with its capture."""
    options, world = Options.read(1, keywords), Ranks.find().holding(model)
    inputs = together(world, "reading the example inputs", lambda: example(model, example_inputs))
    if inputs is None:
        raise InputError("tp='auto' plans before the first call: give example_inputs.")
    check, model = keywords.get("check_capture"), plain(model, request, lowering)
    captured, notes = Compilation(model, world, options, request, lowering, check_capture=check).capture(inputs)
    agree(world, "the model", {**versions(), "graph": captured.digest()})
    tps = DEGREES
    if world.mesh is not None:
        tps = [n for n in range(1, world.tp + 1) if world.tp % n == 0]
    plan = of_first(world, "planning", lambda: automatic(captured, notes, tps, keywords, type(model).__name__))
    return plan, (captured, notes)


def _ranks(
    plan: Plan | None, tp: int | None, mesh: DeviceMesh | None, axes: Axes, keywords: Mapping[str, Any],
    model: nn.Module,
) -> tuple[Ranks, Options, dict[str, int]]:  # fmt: skip
    """Return the ranks, the options of planning for them (those of a given plan), and the number of processes on each
    axis that share virtual ranks; none where each rank is a process."""
    virtual = {axis: n for axis in ("dp", "tp") if (n := read_invariant(keywords, axis)) is not None}
    if virtual:
        refuse_unlike({**keywords, **axes.degrees})
    processes = keywords.get("dp") or 1 if "dp" in virtual else axes.dp
    hosts = plan.tp if plan is not None and tp is None and not virtual else tp
    ranks = Ranks.find(hosts, mesh, processes, axes.cp).holding(model)
    hosts = ranks.tp if ranks.mesh is not None else hosts or 1
    degree = read_invariant(keywords, "tp", hosts) or hosts
    if plan is not None and plan.tp != degree:
        raise PlanError(f"the plan is for tp={plan.tp} ranks, and here are tp={degree}. Plan again with tp={degree}.")
    options = Options.of_plan(plan) if plan else Options.read(degree, keywords, axes)
    if not virtual:
        return ranks, options, {}
    # A search that its time ends has another plan in another run, and other bits.
    read_invariant(keywords, "dp", processes)
    return ranks, replace(options, seconds=math.inf), {**({"dp": processes} if axes.dp > 1 else {}), "tp": hosts}
