"""The public functions: plan, parallelize, compile."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import Placement

from autotp.cost import Cluster

from .capture import aliases, skeleton
from .describe import describe
from .errors import InputError, PlanError
from .graph import Capture
from .inputs import Inputs, bind, for_model, normalise, without_cache
from .layouts import Layout
from .module import LazyModule, Maker, ShardedModule, Source, prepare
from .plan import Plan
from .planner import Builder, Planned, decide
from .ranks import Ranks, agree, broadcast, check_degree, together, versions
from .rewrite import Sharded, rewrite

Pins = Mapping[str, Placement]


@dataclass(frozen=True)
class Options:
    """What steers planning."""

    tp: int
    cluster: Cluster
    pins: Mapping[str, int | None]
    sequence: bool | None
    objective: str = "training"


def plan(
    model: nn.Module,
    tp: int,
    *,
    example_inputs: Any = None,
    pins: Pins | None = None,
    cluster: str | Cluster | None = None,
    objective: str = "training",
    sequence_parallel: bool | None = None,
) -> Plan:
    """Find the cheapest legal placement of a model over `tp` ranks. Needs no devices, weights or process group.

    Among legal plans the parameters per rank come first (at most 1.1 times the least that any legal plan reaches), then
    the least step time by the cost model, then the least saved activations, then a fixed order.

    Args:
        model: any `nn.Module`; on the meta device too.
        tp: number of ranks.
        example_inputs: a tensor, a tuple (args), a mapping (kwargs), or `autotp.Inputs`; a transformers model may leave
            it out.
        pins: `{"model.layers.*.mlp.up_proj.weight": Shard(0)}` with torch's placements; patterns as in `fnmatch`.
        cluster: the machines to price for: a `Cluster` or the name of a preset; default "h100".
        objective: "training" (forward and backward count).
        sequence_parallel: None lets the cost decide; True or False forces or forbids it.

    Returns:
        The `Plan`; print it to read it.

    Raises:
        InputError, CaptureError, PlanError.
    """
    options = read_options(tp, pins, cluster, objective, sequence_parallel)
    inputs = example(model, example_inputs)
    if inputs is None:
        raise InputError(
            f"autotp.plan needs example_inputs for {type(model).__name__}: only transformers models get theirs from the "
            "config. Pass a tensor, a tuple of arguments, a mapping of keyword arguments, or autotp.Inputs(...)."
        )
    return solve_plan(*capture_model(model, inputs, torch.device("cpu")), options, type(model).__name__)


def parallelize(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh | None = None,
    *,
    example_inputs: Any = None,
    outputs: str = "full",
    check: bool | None = None,
) -> ShardedModule:
    """Shard a model by a plan: every rank keeps its part of the parameters, and the module answers like the original.

    Args:
        model: the model that the plan was made for (same parameter names and shapes).
        plan: from `autotp.plan`, or `Plan.load`.
        mesh: a `DeviceMesh`; otherwise the process group that is there, or one made under torchrun.
        example_inputs: captured at once instead of at the first call.
        outputs: "full" values on every rank, or "sharded" DTensors.
        check: also compare the inputs' values between the ranks at the first call of each signature.

    Raises:
        PlanError: the plan does not fit the model. RankError: the ranks disagree.
    """
    ranks = Ranks.find(plan.tp, mesh)
    inputs = None if example_inputs is None else example(model, example_inputs)
    captured = (
        None
        if inputs is None
        else together(ranks, "capturing the model", lambda: capture_model(model, inputs, _device(ranks))[0])
    )
    return _shard(
        model, plan, ranks, read_options(plan.tp, None, plan.cluster, plan.objective, None), captured, outputs, check
    )


def compile(
    model: nn.Module,
    tp: int | None = None,
    *,
    example_inputs: Any = None,
    mesh: DeviceMesh | None = None,
    plan: Plan | None = None,
    pins: Pins | None = None,
    cluster: str | Cluster | None = None,
    objective: str = "training",
    sequence_parallel: bool | None = None,
    outputs: str = "full",
    backend: str = "eager",
    options: Mapping[str, Any] | None = None,
    check: bool | None = None,
) -> ShardedModule:
    """Shard a model over `tp` ranks: `parallelize(model, plan(model, tp, ...))`.

    Run it by torchrun, the same on every rank. In one plain process the plan is made and prints, and calling the
    module raises an error with the torchrun line.

    Args:
        model: any `nn.Module`; it is left as it is. On the meta device too (then load weights afterwards).
        tp: number of ranks; default: all of the mesh or world. In a larger world, contiguous groups of `tp` ranks.
        example_inputs: a tensor, a tuple (args), a mapping (kwargs), or `autotp.Inputs`. Left out: a transformers model
            gets inputs made from its config; any other module is captured at its first call.
        mesh: a `DeviceMesh`; otherwise the process group that is there, or one made under torchrun.
        plan: use this plan instead of making one (not together with pins or objective).
        pins, cluster, objective, sequence_parallel: see `autotp.plan`.
        outputs: "full" values in the original's own output class on every rank, or "sharded": tensors as DTensors.
        backend: "eager".
        options: options of the backend; none for "eager".
        check: also compare input values between the ranks (a sampler that feeds tp ranks different batches).

    Returns:
        The `ShardedModule`.

    Raises:
        AutoTPError: its subclasses say what is wrong, where, why, and what to do; all ranks raise together.
    """
    _refuse_backend(backend, options, outputs)
    if plan is not None and (pins or objective != "training" or sequence_parallel is not None):
        raise InputError("plan= is complete: it cannot be given together with pins, objective or sequence_parallel.")
    if tp is not None:
        check_degree(tp, None)
    ranks = Ranks.find(tp if tp is not None else (plan.tp if plan is not None else None), mesh)
    degree = ranks.tp if ranks is not None else tp or (plan.tp if plan is not None else 1)
    chosen = read_options(degree, pins, cluster, objective, sequence_parallel)
    inputs = together(ranks, "reading the example inputs", lambda: example(model, example_inputs))

    def build(inputs: Inputs) -> ShardedModule:
        captured, notes = together(ranks, "capturing the model", lambda: capture_model(model, inputs, _device(ranks)))
        agree(ranks, "the model", {**versions(), "graph": captured.digest(), **_shapes(model)})
        found = plan
        if found is None:
            first = ranks is None or ranks.rank == 0
            found = together(
                ranks, "planning", lambda: solve_plan(captured, notes, chosen, type(model).__name__) if first else None
            )
            found = broadcast(ranks, found)
        assert found is not None
        return _shard(model, found, ranks, chosen, captured, outputs, check)

    return build(inputs) if inputs is not None else LazyModule(build)  # type: ignore[return-value]


def make_options(tp: int, given: Mapping[str, Any]) -> Options:
    """Options from the keyword arguments of a public function."""
    names = ("pins", "cluster", "objective", "sequence_parallel")
    unknown = set(given) - set(names)
    if unknown:
        raise InputError(f"unknown argument {sorted(unknown)[0]!r}; known are {', '.join(names)}.")
    return read_options(tp, *(given.get(n, "training" if n == "objective" else None) for n in names))


def read_options(tp: int, pins: Pins | None, cluster: Any, objective: str, sequence: bool | None) -> Options:
    if objective != "training":
        raise InputError(f"objective={objective!r} is not known; this version plans for objective='training'.")
    dims: dict[str, int | None] = {}
    for pattern, placement in (pins or {}).items():
        if not isinstance(placement, Split | Whole):
            raise InputError(f"the pin {pattern!r} is {placement!r}; give torch's Shard(dim) or Replicate().")
        dims[pattern] = placement.dim if isinstance(placement, Split) else None
    return Options(check_degree(tp, None), Cluster.resolve(cluster), dims, sequence, objective)


def _refuse_backend(backend: str, options: Any, outputs: str) -> None:
    if backend != "eager" or options:
        raise InputError(
            f"backend={backend!r} with options={options!r} is not known; this version runs backend='eager'."
        )
    if outputs not in ("full", "sharded"):
        raise InputError(f"outputs={outputs!r} is not known; choose 'full' or 'sharded'.")


def example(model: nn.Module, example: Any) -> Inputs | None:
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {type(model).__name__}; autotp shards an nn.Module.")
    inputs = for_model(model) if example is None else normalise(example)
    if inputs is not None:
        bind(model.forward, inputs)
    return inputs


def _device(ranks: Ranks | None) -> torch.device:
    return ranks.device if ranks is not None else torch.device("cpu")


def capture_model(model: nn.Module, inputs: Inputs, device: torch.device) -> tuple[Capture, list[str]]:
    inputs, note = without_cache(model, inputs)
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    dtype = next((p.dtype for p in model.parameters()), None)
    captured = prepare(skeleton(model, device), inputs, device, (model.training, dtype, autocast))
    return captured, [*([note] if note else []), *captured.notes]


def _builder(captured: Capture, options: Options, placements: Mapping[str, Layout] | None = None) -> Builder:
    return Builder(captured, options.tp, options.cluster, placements or {}, options.pins, options.sequence)


def solve_plan(captured: Capture, notes: list[str], options: Options, name: str) -> Plan:
    """The plan of a captured model."""
    builder = _builder(captured, options)
    planned = decide(builder)
    sharded = rewrite(planned, builder.convert_seconds)
    shapes = tuple(f"{x.name}: {_shape(x.node)}" for x in captured.inputs)
    return describe(planned, sharded, builder, name, options.objective, shapes, notes)


def _shape(node: Any) -> str:
    val = node.meta.get("val")
    return (
        f"{tuple(str(s) for s in val.shape)} {val.dtype}".replace("'", "")
        if isinstance(val, torch.Tensor)
        else repr(val)
    )


def apply_plan(captured: Capture, plan: Plan, options: Options) -> tuple[Planned, Sharded]:
    """The program of a capture under a plan: by its own decisions where it was made for this graph, otherwise solved
    again with every parameter where the plan has it."""
    builder = _builder(captured, options, plan.placements)
    if captured.digest() == plan.digest:
        nodes = {n.name: n for n in [*builder.leaves, *builder.calls]}
        decisions = {nodes[name]: decision for name, decision in plan.decisions.items()}
        planned = Planned(captured, plan.tp, decisions, builder.ops, builder.rules, builder.same, builder.grads)
    else:
        planned = decide(builder)
    return planned, rewrite(planned, builder.convert_seconds)


def _shard(
    model: nn.Module, plan: Plan, ranks: Ranks | None, options: Options, captured: Capture | None, outputs: str,
    check: bool | None,
) -> ShardedModule:  # fmt: skip
    _fits(model, plan)
    agree(ranks, "the plan", {"plan": _digest(plan), **versions(), **_shapes(model)})
    make: Maker = lambda c: apply_plan(c, plan, options)[1]  # noqa: E731
    bare = skeleton(model, _device(ranks))
    ready = [] if captured is None else [(captured, together(ranks, "rewriting the graph", lambda: make(captured)))]
    source = Source(bare, make, ranks, plan.tp, aliases(model), outputs, check, type(model).__name__, ready)
    return ShardedModule(model, plan, source)


def _fits(model: nn.Module, plan: Plan) -> None:
    have = {n: tuple(p.shape) for n, p in model.named_parameters()}
    want = {p.name: tuple(p.shape) for p in plan.parameters}
    if have != want:
        odd = sorted(set(have.items()) ^ set(want.items()))[:5]
        raise PlanError(
            f"the plan was made for {plan.model} with other parameters than this {type(model).__name__} has, such as "
            f"{', '.join(f'{n} {s}' for n, s in odd)}. Plan again for this model."
        )


def _shapes(model: nn.Module) -> dict[str, str]:
    return {f"parameter {n}": f"{tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters()}


def _digest(plan: Plan) -> str:
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
