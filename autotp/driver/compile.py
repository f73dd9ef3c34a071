"""Pipeline of `autotp.compile`: from a model to its capture, to a plan, and to the source of a `ShardedModule`.

`Compilation` is the whole of it, in order and the same on all ranks; the functions below are its steps on one rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autotp.capture.capture import aliases, capture, skeleton
from autotp.capture.capture_errors import refuse_unsaid
from autotp.capture.copies import plain_weights, with_histories
from autotp.capture.rank0 import Untold, capture_once, model_key
from autotp.capture.request import DEFAULT_CAPTURE, CaptureRequest, Mode, recording_mode
from autotp.capture.selfcheck import Trial
from autotp.capture.stand_in import trial_of
from autotp.comm.ranks import Ranks, agree, machine, of_first, together, versions
from autotp.cost.cache import Cache, cache_of
from autotp.cost.decode import check_lengths
from autotp.errors import InputError, PlanError
from autotp.inputs import Inputs, first_part, without_cache
from autotp.ir.graph import TABLE, Capture, draws
from autotp.ir.layouts import Layouts, Replicate
from autotp.ir.named_states import check_names, name_states
from autotp.ir.precision import DELAYED
from autotp.ir.program import Decided, Planned, Sharded
from autotp.log import dump, stage, uncollected
from autotp.passes.base import run_passes
from autotp.passes.shard.batch_axis import two_examples
from autotp.passes.shard.decide import decide, problem_of, take
from autotp.passes.shard.past import CacheParts, cache_parts
from autotp.passes.shard.planner import Builder, Reading
from autotp.passes.shard.rewrite import ShardedProgram
from autotp.plans.describe.describe import describe, with_regathering
from autotp.plans.describe.dp_costs import with_axis
from autotp.plans.describe.reasons import stopped, without_rule
from autotp.plans.estimates import Axes
from autotp.plans.plan import Plan
from autotp.runtime import state
from autotp.runtime.call_message import few
from autotp.runtime.lower.lower import EAGER, Lowering
from autotp.runtime.lower.measured import FOLDER, warn_of_cache
from autotp.runtime.programs import Source, hosts_of
from autotp.runtime.storage import ShardState
from autotp.text import message_of

from .begun_cache import BegunCache, begun_cache
from .options import Options
from .schedule import ready, schedule
from .shares import Staged, find_shares, refuse_full, unlike

ModuleSource = tuple[nn.Module, Plan, Source]  # arguments of `ShardedModule`
Captured = tuple[Capture, list[str]]  # a graph, and what the user should know of it

GATHERED = (
    "what is carried from call to call is gathered in every call: another program of the plan splits it as an operator "
    "of this one cannot read it"
)
GUESSED = "the cache is a guess, keys and values as they enter the attentions: a call with one cannot be captured ({})"
WEIGHTS = (
    "the weights that the model has (a few values of each are compared; give every rank the same ones, by one seed or "
    "one file, or check=False where they are loaded afterwards)"
)

# ---- all of it, on all ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """Compilation of a model once its inputs are known: called with them, it returns the arguments of `ShardedModule`.

    Attributes:
        model: as `plain` gives it. ranks: of tp.
        options: of planning; of a given plan those that it was made for.
        request: of captures; `lowering`: of programs.
        plan: None to solve one for the inputs.
        check: compare values between the ranks; `check_capture`: compare the captured graph with the model.
        captured: the model's graph for the inputs and its notes, where they exist already.
        hosts: processes that share the ranks of the plan on each axis, which are virtual; none where each is a process.
    """

    model: nn.Module
    ranks: Ranks
    options: Options
    request: CaptureRequest
    lowering: Lowering
    plan: Plan | None = None
    check: bool | None = None
    check_capture: bool | None = None
    captured: Captured | None = None
    hosts: Mapping[str, int] = field(default_factory=dict)

    @uncollected()
    def __call__(self, inputs: Inputs) -> ModuleSource:
        inputs = first_part(inputs, self.options.batch.dp // self.hosts["dp"] if "dp" in self.hosts else 1)
        captured, notes = self.captured or self.capture(inputs)
        return self.source(self.solve(captured, notes), captured)

    @property
    def every(self) -> Ranks:
        """Ranks of all axes, which capture and plan together."""
        return self.ranks.planners

    def capture(self, inputs: Inputs) -> Captured:
        """Capture the model's graph for these inputs, and its notes: rank 0's on every rank, where all models are
        equal."""
        ranks, device = self.every, self.ranks.device

        def take(captured: Capture, notes: list[str]) -> Captured:
            captured.origin = skeleton(self.model, device), without_cache(self.model, inputs)[0]
            return captured, notes

        of = self.model, inputs, device, self.check_capture, self.request
        agreed = schedule(ranks=ranks).agreed
        return capture_once(ranks, agreed, partial(capture_key, *of), partial(capture_model, *of), take)

    def solve(self, captured: Capture, notes: list[str]) -> Plan:
        """Return the plan, given or solved, once all ranks have the same model.

        It is solved on one rank: equally good plans would otherwise differ between ranks.
        """
        ranks = self.every
        agree(ranks, "the model", {**versions(), "graph": captured.digest(), **_parameters(self.model, self.check)})
        if self.plan is not None:
            return self.plan
        solve = partial(solve_plan, captured, notes, self.options, type(self.model).__name__)
        return of_first(ranks, "planning", solve)

    def source(self, plan: Plan, captured: Capture | None) -> ModuleSource:
        """Return the arguments of `ShardedModule` under this plan; `captured` is then ready to run."""
        together(self.every, "fitting the plan to the model", lambda: _fits(self.model, plan))
        digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
        facts = {**versions(), "plan": digest, "wanted": self.request, **_parameters(self.model, None)}
        if self.hosts:
            facts |= machine(self.ranks.device)
        agree(self.every, "the plan", facts)
        self.compare_weights()
        make = partial(_program, plan=plan, options=self.options)
        virtual = {**plan.batch.degrees, "tp": plan.tp} if self.hosts else {}
        shards = ShardState(
            skeleton(self.model, self.ranks.device), self.ranks, self.hosts.get("tp", plan.tp), aliases(self.model),
            Axes(self.hosts.get("dp", 1)) if virtual else plan.batch, hosts=hosts_of(self.ranks, virtual, self.hosts),
        )  # fmt: skip
        again = partial(_anew, ranks=self.ranks, options=self.options, request=self.request, lowering=self.lowering)
        origin = captured.origin[1] if captured is not None and captured.origin is not None else None
        source = self.source_of(shards, plan, make, check=bool(self.check), again=again, origin=origin)
        if captured is not None:
            sharded = together(self.every, "rewriting the graph", lambda: make(captured, {}, self.request.outputs))
            source.ready.append((captured, sharded))
        return self.model, plan, source

    def source_of(self, shards: ShardState, plan: Plan, make: Callable[..., Sharded], **others: Any) -> Source:
        """Make the source of programs; it holds no part of `self`, for the module lives on with it.

        Args:
            shards: of this rank. plan: of the programs. make: rewrites a capture. others: attributes of a `Source`.
        """
        return Source(
            shards, decide=partial(decided_for, plan=plan, options=self.options), make=make,
            capture=further, agreed=schedule(ranks=self.ranks).agreed, want=self.request,
            sample=self.check is not False,
            lowering=self.lowering.priced(self.options.cluster, self.options.objective, schedule().rank), **others,
        )  # fmt: skip

    def compare_weights(self) -> None:
        """Make sure that all ranks have the same weights, by a few values of each, where `check` is left open."""
        if self.check is None:
            weights = [*self.model.named_parameters(), *self.model.named_buffers()]
            agree(self.every, WEIGHTS, {name: few(value) for name, value in weights})


def _anew(
    model: nn.Module, inputs: Inputs, tp: int, axes: Axes, *, ranks: Ranks, options: Options,
    request: CaptureRequest, lowering: Lowering,
) -> ModuleSource:  # fmt: skip
    """Return the arguments of `ShardedModule` for other degrees over the same ranks, all else as of the one before.

    Args:
        model: on the meta device. inputs, tp, axes: to plan for. ranks, options, request, lowering: of the one before.
    """
    mesh = ranks.planners.over(axes.degrees | {"tp": tp})
    ranks = replace(Ranks.find(tp, mesh, axes.dp), device=ranks.device)  # one plain process stays where it was
    options, request = replace(options, tp=tp, batch=axes), replace(request, dp=axes.dp, ep=axes.ep)
    return Compilation(model, ranks, options, request, lowering, check_capture=False)(inputs)


def plain(model: nn.Module, request: CaptureRequest, lowering: Lowering | None = None) -> nn.Module:
    """Return the model with plain tensors for weights, and with the histories that its precision needs.

    Args:
        model: it stays as it is. request: with the precision. lowering: that programs run by.

    Raises:
        InputError: a backward writes to a buffer, which a compiled program would leave out.
    """
    precision = request.precision
    if precision is not None and precision.recipe == DELAYED and lowering is not None and lowering.backend != EAGER:
        raise InputError(
            f"precision: with delayed scaling a backward leaves the largest values of its gradients to the next call, "
            f"which torch's AOTAutograd, that backend={lowering.backend!r} goes through, does not keep (its error: "
            "Node copy was invalid, but is output). Use backend='eager', or the recipe 'tensorwise'."
        )
    return with_histories(plain_weights(model), precision)


def _program(
    captured: Capture, states: Layouts, outputs: str, decided: Decided | None = None, *, plan: Plan,
    options: Options,
) -> Sharded:  # fmt: skip
    """Make the program of all ranks."""
    return applied(captured, plan, options, outputs, states, decided)[1]


def _fits(model: nn.Module, plan: Plan) -> None:
    have = {n: tuple(p.shape) for n, p in model.named_parameters()}
    want = {p.name: tuple(p.shape) for p in plan.parameters}
    if have != want:
        differing = sorted(set(have.items()) ^ set(want.items()))[:5]
        raise PlanError(
            f"the plan was made for {plan.model} with other parameters than this {type(model).__name__} has, such as "
            f"{', '.join(f'{n} {s}' for n, s in differing)}. Plan again for this model."
        )


def _parameters(model: nn.Module, check: bool | None) -> dict[str, str]:
    """Describe the parameters by shape and dtype; with `check` by a hash of the values too."""
    out = {}
    for n, p in model.named_parameters():
        values = state.fingerprint(p) if check and not p.is_meta else ""
        out[f"parameter {n}"] = f"{tuple(p.shape)} {p.dtype} {values}".strip()
    return out


# ---- capture ---------------------------------------------------------------------------------------------------------


def prepare(
    bare: nn.Module,
    inputs: Inputs,
    device: torch.device,
    mode: Mode,
    trial: Trial | None = None,
    request: CaptureRequest = DEFAULT_CAPTURE,
) -> Capture:
    """Capture and canonicalise a skeleton, and compare the result with the model itself where `trial` has it.

    Args:
        bare: the model with fake tensors in place of weights.
        inputs: of one call; with dp > 1 a slice of the batch, and the capture is that of one data-parallel rank.
        device: that the weights are on. mode: of the model now, as `mode_of` reads it.
        trial: the model with its weights, to be run beside the capture; None: the capture is not compared.
        request: of the capture.
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
    """Capture a stand-in, and compare the capture with it."""
    mode, bare = recording_mode(trial.model, trial.device), skeleton(trial.model, trial.device)
    return capture(bare, trial.inputs, trial.device, schedule().canonical, trial, mode, states)


def capture_key(
    model: nn.Module, inputs: Inputs, device: torch.device, check: bool | None, request: CaptureRequest
) -> tuple[str | None, str]:
    """Return a digest of all that `capture_model` with these arguments depends on, or None and the reason.

    Args:
        model, inputs, device, check, request: see `capture_model`.
    """
    try:
        mode = recording_mode(model, device)
        real = any(not p.is_meta for p in model.parameters())
        call = inputs.args, inputs.kwargs
        return model_key(skeleton(model, device), call, mode, check, repr(request), real), ""
    except Untold as error:
        return None, str(error)
    except Exception as error:  # whatever a user's class may raise: the capture itself then says what is wrong
        return None, message_of(error)


@uncollected()
def capture_model(
    model: nn.Module,
    inputs: Inputs,
    device: torch.device,
    check: bool | None = None,
    request: CaptureRequest = DEFAULT_CAPTURE,
) -> Captured:
    """Capture a model's graph for these inputs as the model is now, with notes for the user.

    Args:
        model: with its weights, or on the meta device. inputs: of one call. device: that the weights are on.
        check: `check_capture` of the public functions.
        request: of the capture.
    """
    warn_of_cache(os.environ.get(FOLDER, ""))
    inputs, note = without_cache(model, inputs)
    model = plain(model, request)
    refuse_unsaid(model, inputs)
    small = partial(_small, states=request.states)
    trial = trial_of(model, two_examples(inputs, request.dp), device, check, small)
    bare = skeleton(model, device)
    check_names(bare.forward, request.states)
    captured = prepare(bare, inputs, device, recording_mode(model, device), trial, request)
    captured.origin = bare, inputs
    captured.unproved = trial.skip
    if trial.skip:
        captured.notes.append(f"the capture was not compared with the model: {trial.skip}")
    elif trial.ground:
        captured.notes.append(f"the capture was compared with the model on {trial.ground}")
    captured.notes += [trial.remark] if trial.remark else []
    notes = [*([note] if note else []), *captured.notes]
    if draw_count := sum(map(draws, captured.graph.nodes)):
        notes.append(
            f"{draw_count} operators draw random numbers by torch: they run whole, so that every rank draws the same"
        )
    return captured, notes


# ---- plan ------------------------------------------------------------------------------------------------------------


def solve_plan(captured: Capture, notes: list[str], options: Options, name: str) -> Plan:
    """Plan a captured model; refuse it where unlike ranks cannot hold their shares."""
    return refuse_full(plan_stages(captured, notes, options, name).plan)


@uncollected()
def plan_stages(
    captured: Capture, notes: list[str], options: Options, name: str, before: Staged | None = None
) -> Staged:
    """Plan a captured model; return the plan with its decisions, the program of the ranks, and the prices.

    Args:
        captured: it stays as it is. notes: for the plan, of the capture. options: of the plan. name: the model's.
        before: the result for the same with another `memory`.
    """
    if before is None and unlike(options):
        return find_shares(partial(_stages, captured, notes, name=name), options)
    return _stages(captured, notes, options, name, before)


def _stages(captured: Capture, notes: list[str], options: Options, name: str, before: Staged | None = None) -> Staged:
    """Do what `plan_stages` does, by given shares."""
    check_lengths(captured, options.objective)
    begun, cache_notes = _begun(captured, options)
    reading = ready(captured, options.tp)
    parts = None if begun is None else cache_parts(reading.program, begun.program, begun.like)
    with stage("plan"):
        builder = _builder(reading, options, parts=parts) if before is None else copy(before.builder)
        builder.memory = options.memory
        problem = problem_of(builder) if before is None else before.problem
        planned = decide(builder, problem)
    sharded = _sharded(planned, builder)
    shapes = tuple(f"{x.name}: {_shape(x.node)}" for x in captured.inputs)
    gathers = builder.states.leaves and not builder.prices.cached
    all_notes = [*notes, *without_rule(planned), *stopped(planned), *([GATHERED] if gathers else []), *cache_notes]
    cache = None if begun is None else _cache(begun, planned, options)
    plan = describe(planned, sharded, builder, name, options.objective.name, shapes, all_notes, cache)
    plan = with_axis(plan, planned, sharded, builder, options.batch)
    plan = replace(with_regathering(plan, planned, sharded, builder), builder=builder)
    return Staged(plan, planned, sharded, builder, problem)


def _begun(captured: Capture, options: Options) -> tuple[BegunCache | None, list[str]]:
    """Capture the call that begins the model's own cache, where the program carries none; or note why it is unknown."""
    if options.objective.training or captured.has_states or options.batch.cp > 1:
        return None, []
    begun = begun_cache(captured, partial(prepare, request=CaptureRequest(dp=options.batch.dp)))
    if isinstance(begun, BegunCache):
        return begun, []
    return None, [] if begun is None else [GUESSED.format(begun)]


def _cache(begun: BegunCache, planned: Planned, options: Options) -> Cache:
    """Return the cache of one rank under a plan."""
    if not begun.program.has_states and not begun.plain:
        return Cache()
    weights = [x for x in planned.program.leaves if x.kind.weight]
    placements = {x.name: planned.decisions[x.node].outs[0] for x in weights}
    builder = _builder(ready(begun.program, options.tp), replace(options, pins={}), placements)
    return cache_of(decide(builder), begun.program.hints, begun.times, begun.plain) or Cache()


# ---- program of the ranks --------------------------------------------------------------------------------------------


def apply_plan(
    captured: Capture, plan: Plan, options: Options, outputs: str = "full", states: Layouts | None = None
) -> tuple[Planned, Sharded]:
    """Apply a plan to a capture: by its own decisions where it was made for this graph, otherwise solved again with
    every parameter and state where the plan has it.

    Args:
        outputs: see `CaptureRequest`, and `rewrite`.
        states: layouts that programs made since the plan decided, by name; `Sharded.states` tells those of this one.
    """
    return applied(captured, plan, options, outputs, states)[:2]


def applied(
    captured: Capture, plan: Plan, options: Options, outputs: str = "full",
    states: Layouts | None = None, decided: Decided | None = None,
) -> tuple[Planned, Sharded, Builder]:  # fmt: skip
    """Apply a plan as `apply_plan` does, and return the builder that prices it too.

    Args:
        captured, plan, options, outputs, states: see `apply_plan`.
        decided: the result of `decided_for` for the same; None to decide here.
    """
    builder = _under(captured, plan, options, states)
    planned = _planned(builder, plan, decided)
    with stage("rewrite"):
        sharded = _sharded(planned, builder, outputs)
    dump("sharded", sharded.graph)
    return planned, sharded, builder


def decided_for(captured: Capture, states: Layouts, *, plan: Plan, options: Options) -> Decided:
    """Decide a capture under a plan, for every rank to take; arguments as of `apply_plan`."""
    planned = _planned(_under(captured, plan, options, states), plan)
    return Decided({n.name: how for n, how in planned.decisions.items()}, planned.states)


def _under(captured: Capture, plan: Plan, options: Options, states: Layouts | None) -> Builder:
    """Make the builder of a capture's problem, with weights and states where a plan and later programs have them."""
    if writes := plan.tables.keys() & set(captured.mutations.values()):
        raise PlanError(
            f"the plan splits the buffer {min(writes)}, which this call writes to. Plan with the model in the mode "
            "that it is called in here."
        )
    options = replace(options, shares=plan.shares, units=plan.units)
    # What the plan does not split is whole on a rank, also what its own program wrote to and this one does not.
    whole = {x.name: Replicate() for x in captured.leaves if x.kind is TABLE}
    return _builder(ready(captured, plan.tp), options, whole | plan.placements, {**plan.states, **(states or {})})


def _planned(builder: Builder, plan: Plan, decided: Decided | None = None) -> Planned:
    """Decide a capture: by given decisions, by the plan's where it was made for this graph, or by the solver."""
    if decided is None and builder.reading.digest != plan.digest:
        with stage("decide"):
            return decide(builder)
    if decided is None:
        decided = Decided(plan.decisions, {n: builder.carried[n] for names in builder.states.groups for n in names})
    return take(builder, decided)


def _sharded(planned: Planned, builder: Builder, outputs: str = "full") -> Sharded:
    """Rewrite a planned program for all ranks, without the option of sequence parallelism: it has decided the plan and
    is no part of it, so that the program of a loaded plan has the same conversions."""
    prices = builder.prices if builder.prices.sequence is None else replace(builder.prices, sequence=None)
    program = ShardedProgram(planned, prices.convert)
    run_passes(program, schedule(CaptureRequest(outputs=outputs)).sharded)
    assert program.sharded is not None
    return program.sharded


def _builder(
    reading: Reading, options: Options, placements: Layouts | None = None,
    states: Layouts | None = None, parts: CacheParts | None = None,
) -> Builder:  # fmt: skip
    memory = None if placements else options.memory  # the plan has kept it already
    return Builder(
        reading.program, options.tp, options.cluster, placements or {}, options.pins, options.sequence,
        options.objective, memory, states or {}, band=options.band, seconds=options.seconds, cache_parts=parts,
        read_before=reading, groups=options.groups, shares=options.shares, units=options.units,
        imbalance=options.batch.imbalance,
    )  # fmt: skip


def _shape(node: Any) -> str:
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return repr(val)
    return f"{tuple(str(s) for s in val.shape)} {val.dtype}".replace("'", "")
