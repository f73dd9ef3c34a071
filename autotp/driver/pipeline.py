"""From a model to a captured graph, from that to a plan, and from a plan to the program of the ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.capture.capture import capture, skeleton
from autotp.capture.copies import with_histories
from autotp.capture.model_key import Untold, model_key
from autotp.capture.refusals import refuse_scripted, refuse_unsaid
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest, Mode, mode_of
from autotp.capture.selfcheck import Trial
from autotp.capture.stand_in import trial_of
from autotp.capture.subclasses.weights import plain_weights
from autotp.comm.ranks import Ranks
from autotp.cost.cache import Cache, cache_of
from autotp.cost.decode import check_lengths
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, bind, for_model, normalise, without_cache
from autotp.ir.graph import Capture, draws, short_name
from autotp.ir.layouts import Layout
from autotp.ir.named_states import check_names, name_states
from autotp.ir.program import Decision, Planned, Sharded
from autotp.log import dump, log, stage, uncollected
from autotp.passes.base import run_passes
from autotp.passes.shard.batch_program import two_examples
from autotp.passes.shard.decide import decide
from autotp.passes.shard.past import CacheParts, cache_parts
from autotp.passes.shard.planner import Builder
from autotp.passes.shard.ranks import ShardedProgram
from autotp.plans.describe.batch_axis import described
from autotp.plans.describe.describe import describe, with_regathering
from autotp.plans.describe.reasons import few_groups, without_rule
from autotp.plans.estimates import ALONE, Axis
from autotp.plans.plan import Plan

from .begun_cache import BegunCache, begun_cache
from .options import Options
from .schedule import schedule

GATHERED = (
    "what is carried from call to call is gathered in every call: another program of the plan splits it as an operator "
    "of this one cannot read it"
)

GUESSED = "the cache is a guess, keys and values as they enter the attentions: a call with one cannot be captured ({})"


def example(model: nn.Module, example: Any, axis: Axis = ALONE, ranks: Ranks | None = None) -> Inputs | None:
    """The example inputs, checked against `forward`; None where none were given and the config does not say enough.

    Args:
        model: that they are for. example: as the user gave them.
        axis: beside tp; of whole sequences over cp they are this rank's part. ranks: by default the first one's.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {type(model).__name__}; autotp shards an nn.Module.")
    refuse_scripted(model)
    inputs = for_model(model) if example is None else normalise(example)
    if inputs is not None:
        bind(model.forward, inputs)
    if inputs is not None and axis.name == "cp":
        inputs, _ = inputs.own_part(ranks.batch.rank if ranks is not None and ranks.batch is not None else 0, axis.size)
    return inputs


def required_inputs(model: nn.Module, example_inputs: Any, function: str, axis: Axis = ALONE) -> Inputs:
    """The example inputs that this public function cannot do without; see `example`."""
    inputs = example(model, example_inputs, axis)
    if inputs is None:
        raise InputError(
            f"{function} needs example_inputs for {type(model).__name__}: only transformers models get theirs from the "
            "config. Pass a tensor, a tuple of arguments, a mapping of keyword arguments, or autotp.Inputs(...)."
        )
    return inputs


def prepare(
    bare: nn.Module,
    inputs: Inputs,
    device: torch.device,
    mode: Mode,
    trial: Trial | None = None,
    request: CaptureRequest = DEFAULT_CAPTURE,
) -> Capture:
    """Capture and canonicalise a skeleton, and hold the result against the model itself where `trial` has it.

    Args:
        bare: the model with fake tensors in place of weights.
        inputs: of one call; with dp > 1 a slice of the batch, and the capture is that of one data-parallel rank.
        device: that the weights are on. mode: what the model is in now, as `mode_of` reads it.
        trial: the model with its weights, to be run beside the capture; None: the capture is not compared.
        request: what else the public functions were asked for.
    """

    order = schedule(request)
    with stage("capture"):
        program = capture(bare, two_examples(inputs, request.dp), device, order.canonical, trial, mode, request.states)
        name_states(program, bare.forward, request.carried)
    run_passes(program, order.requested)
    return program


def further(bare: nn.Module, inputs: Inputs, device: torch.device, mode: Mode, request: CaptureRequest) -> Capture:
    """Capture a call that there is no program for yet; it is not compared with the model.

    Args:
        bare, inputs, device, mode, request: see `prepare`.
    """
    return prepare(bare, inputs, device, mode, request=request)


def _small(trial: Trial, states: Collection[str] = ()) -> Capture:
    """The capture of a stand-in, held against it."""
    with torch.enable_grad():  # as the trial runs the model
        mode = mode_of(trial.model.modules(), trial.device)
    bare = skeleton(trial.model, trial.device)
    return capture(bare, trial.inputs, trial.device, schedule().canonical, trial, mode, states)


def capture_key(
    model: nn.Module, inputs: Inputs, device: torch.device, check: bool | None, request: CaptureRequest
) -> tuple[str | None, str]:
    """Return all that `capture_model` with these arguments depends on, as a word, or None and why that cannot be told.

    Args:
        model, inputs, device, check, request: see `capture_model`.
    """
    try:
        with torch.enable_grad():
            mode = mode_of(model.modules(), device)
        real = any(not p.is_meta for p in model.parameters())
        more = (inputs.args, inputs.kwargs), mode, check, repr(request), real
        return model_key(skeleton(model, device), *more), ""
    except Untold as odd:
        return None, str(odd)
    except Exception as error:  # whatever a user's class may raise: the capture itself then says what is wrong
        return None, f"{type(error).__name__}: {error}"


@uncollected()
def capture_model(
    model: nn.Module,
    inputs: Inputs,
    device: torch.device,
    check: bool | None = None,
    request: CaptureRequest = DEFAULT_CAPTURE,
) -> tuple[Capture, list[str]]:
    """A model's graph for these inputs as the model is now, and what the user should know of it.

    Args:
        model: with its weights, or on the meta device. inputs: of one call. device: that the weights are on.
        check: `check_capture` of the public functions.
        request: what else they were asked for.
    """
    _warn_of_cache(os.environ.get("AUTOTP_CACHE", ""))
    inputs, note = without_cache(model, inputs)
    model = with_histories(plain_weights(model), request.precision)
    refuse_unsaid(model, inputs)
    small = partial(_small, states=request.states)
    trial = trial_of(model, two_examples(inputs, request.dp), device, check, small)
    bare = skeleton(model, device)
    check_names(bare.forward, request.states)
    with torch.enable_grad():  # as the trial runs the model
        mode = mode_of(model.modules(), device)
    captured = prepare(bare, inputs, device, mode, trial, request)
    captured.origin = bare, inputs
    captured.unproved = trial.skip
    if trial.skip:
        captured.notes.append(f"the capture was not compared with the model: {trial.skip}")
    elif trial.ground:
        captured.notes.append(f"the capture was compared with the model on {trial.ground}")
    captured.notes += [trial.remark] if trial.remark else []
    draw_count = sum(draws(n) for n in captured.graph.nodes)
    notes = [note] if note else []
    notes += captured.notes
    if draw_count:
        notes.append(
            f"{draw_count} operators draw random numbers by torch: they run whole, so that every rank draws the same"
        )
    return captured, notes


@cache
def _warn_of_cache(folder: str) -> None:
    """Log once that the variable which named a cache of captures and plans is not followed for them."""
    if folder.strip().lower() not in ("", "0", "off", "false", "no"):
        log.warning(
            "AUTOTP_CACHE=%s keeps no captures and plans, only what kernels measured. For a start without planning "
            "save the plan, plan.save(path), and give it again: autotp.compile(model, plan=autotp.Plan.load(path)).",
            folder,
        )


@dataclass(frozen=True)
class Staged:
    """A plan with what it was made from."""

    plan: Plan
    planned: Planned
    sharded: Sharded
    builder: Builder


def solve_plan(captured: Capture, notes: list[str], options: Options, name: str) -> Plan:
    """The plan of a captured model."""
    return plan_stages(captured, notes, options, name).plan


@uncollected()
def plan_stages(captured: Capture, notes: list[str], options: Options, name: str) -> Staged:
    """The plan of a captured model, the decisions, the program of the ranks, and what priced them.

    Args:
        captured: it stays as it is. notes: for the plan, of the capture. options: of the plan. name: the model's.
    """
    check_lengths(captured, options.objective)
    begun, odd = _begun(captured, options)
    captured = _ready(captured, options.tp)
    parts = None if begun is None else cache_parts(captured, begun.program, begun.like)
    with stage("plan"):
        builder = _builder(captured, options, parts=parts)
        planned = decide(builder)
    sharded = _sharded(planned, builder)
    shapes = tuple(f"{x.name}: {_shape(x.node)}" for x in captured.inputs)
    gathers = builder.states.leaves and not builder.prices.cached
    all_notes = [*notes, *without_rule(planned), *few_groups(planned), *([GATHERED] if gathers else []), *odd]
    cache = None if begun is None else _cache(begun, planned, options)
    plan = describe(planned, sharded, builder, name, options.objective.name, shapes, all_notes, cache)
    plan = described(plan, planned, builder, options.batch)
    plan = replace(with_regathering(plan, planned, sharded, builder), builder=builder)
    return Staged(plan, planned, sharded, builder)


def _begun(captured: Capture, options: Options) -> tuple[BegunCache | None, list[str]]:
    """The call that begins the model's own cache, where the program carries none, and a note where it is not known."""
    if options.objective.training or captured.has_states or options.batch.name == "cp":
        return None, []
    begun = begun_cache(captured, partial(prepare, request=CaptureRequest(dp=options.batch.size)))
    if isinstance(begun, BegunCache):
        return begun, []
    return None, [] if begun is None else [GUESSED.format(begun)]


def _cache(begun: BegunCache, planned: Planned, options: Options) -> Cache:
    """What a rank holds of a cache under a plan."""
    if not begun.program.has_states and not begun.plain:
        return Cache()
    weights = [x for x in planned.program.leaves if x.kind.weight]
    placements = {x.name: planned.decisions[x.node].outs[0] for x in weights}
    builder = _builder(_ready(begun.program, options.tp), replace(options, pins={}), placements)
    return cache_of(decide(builder), begun.program.hints, begun.times, begun.plain) or Cache()


def apply_plan(
    captured: Capture, plan: Plan, options: Options, outputs: str = "full", states: Mapping[str, Layout] | None = None
) -> tuple[Planned, Sharded]:
    """The program of a capture under a plan: by its own decisions where it was made for this graph, otherwise solved
    again with every parameter and state where the plan has it.

    Args:
        outputs: see `CaptureRequest`, and `rewrite`.
        states: layouts that programs made since the plan decided, by name; `Sharded.states` tells those of this one.
    """
    return applied(captured, plan, options, outputs, states)[:2]


def applied(
    captured: Capture, plan: Plan, options: Options, outputs: str = "full", states: Mapping[str, Layout] | None = None
) -> tuple[Planned, Sharded, Builder]:
    """Return what `apply_plan` gives, and what prices it.

    Args:
        captured, plan, options, outputs, states: see `apply_plan`.
    """
    captured = _ready(captured, plan.tp)
    if odd := plan.tables.keys() & set(captured.mutations.values()):
        raise PlanError(
            f"the plan splits the buffer {min(odd)}, which this call writes to. Plan with the model in the mode that "
            "it is called in here."
        )
    layouts = {**plan.states, **(states or {})}
    builder = _builder(captured, options, plan.placements, layouts)
    if captured.digest() == plan.digest:
        decisions = _decisions(plan, builder)
        planned = Planned(
            captured, plan.tp, decisions, builder.ops, builder.rules, builder.same, builder.grads,
            states={name: layouts[name] for names in builder.states.groups for name in names},
            ends=builder.ends,
        )  # fmt: skip
        _check_rules(planned)
    else:
        planned = decide(builder)
    with stage("rewrite"):
        sharded = _sharded(planned, builder, outputs)
    dump("sharded", sharded.graph)
    return planned, sharded, builder


def _ready(captured: Capture, tp: int) -> Capture:
    """The program that rules are asked of; the captured one stays, for it is planned for other degrees too."""
    program = replace(captured)
    if tp > 1:
        run_passes(program, schedule().planned)
    return program


def _sharded(planned: Planned, builder: Builder, outputs: str = "full") -> Sharded:
    """The program of all ranks. What forces or forbids sequence parallelism has decided the plan, and is no part of it:
    the program of a loaded plan has the same conversions.
    """
    prices = builder.prices if builder.prices.sequence is None else replace(builder.prices, sequence=None)
    program = ShardedProgram(planned, prices.convert)
    run_passes(program, schedule(CaptureRequest(outputs=outputs)).sharded)
    assert program.sharded is not None
    return program.sharded


def _decisions(plan: Plan, builder: Builder) -> dict[fx.Node, Decision]:
    """The plan's decisions by node; refused where they are not those that its graph needs."""
    nodes = {n.name: n for n in [*builder.leaves, *builder.calls]}
    output = builder.program.graph.output_node()  # decided where it is pinned
    odd = (set(plan.decisions) ^ set(nodes)) - {output.name}
    for name in set(plan.decisions) & set(nodes):
        decision, op = plan.decisions[name], builder.ops.get(nodes[name])
        if (len(decision.ins), len(decision.outs)) != ((len(op.slots), len(op.outs)) if op is not None else (0, 1)):
            odd.add(name)
    nodes[output.name] = output
    if odd:
        raise PlanError(
            f"the plan's decisions are not those that its graph needs, such as for {min(odd)}: it was changed after it "
            "was made. Plan again."
        )
    return {nodes[name]: decision for name, decision in plan.decisions.items()}


def _check_rules(planned: Planned) -> None:
    """Refuse a plan whose operators are split by rules that are not there: a user's, which he has yet to register."""
    for node, op in planned.ops.items():
        index, rule = planned.decisions[node].factor, planned.rules[node]
        if index is not None and (rule is None or index >= len(rule.factors)):
            raise PlanError(
                f"the plan splits {short_name(op.target)} by a rule that is not known here. Register the rules that it "
                "was made with (autotp.register_rule) on every rank before you use it, or plan again."
            )


def _builder(
    captured: Capture, options: Options, placements: Mapping[str, Layout] | None = None,
    states: Mapping[str, Layout] | None = None, parts: CacheParts | None = None,
) -> Builder:  # fmt: skip
    memory = None if placements else options.memory  # the plan has kept it already
    return Builder(
        captured,
        options.tp,
        options.cluster,
        placements or {},
        options.pins,
        options.sequence,
        options.objective,
        memory,
        states or {},
        band=options.band,
        cache_parts=parts,
    )


def _shape(node: Any) -> str:
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return repr(val)
    return f"{tuple(str(s) for s in val.shape)} {val.dtype}".replace("'", "")
