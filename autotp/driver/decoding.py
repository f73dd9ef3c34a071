"""A proof of decoding with a cache: each call of the model is proved as one call on simulated ranks.

The inputs of a call, the cache among them, are the outputs of the call before. So it is enough that the ranks give the
captured graph's outputs in every call, that this graph is the model, and that a state is left in the layout that the
next call takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.capture.request import CaptureRequest, mode_of
from autotp.capture.selfcheck import Trial
from autotp.capture.state_objects import entering
from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.errors import InputError
from autotp.inputs import CACHES, Inputs, bind
from autotp.ir.carried import describe, is_carrier
from autotp.ir.graph import Capture, copy_graph
from autotp.ir.layouts import Layout
from autotp.ir.named_states import Names, follow
from autotp.ir.program import MeshPlace, Planned, Sharded
from autotp.passes.optimise import RankProgram, Setting
from autotp.passes.optimise.cached_attention import CachedAttention
from autotp.plans.estimates import Axes
from autotp.plans.plan import Plan
from autotp.proof.differences import Rounding, differences
from autotp.proof.equality import compare
from autotp.proof.report import Decoded, Difference
from autotp.proof.run import Values, leaf_values, real, run, weights_of
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.carriers import Carriers
from autotp.runtime.generation.generate_methods import calling
from autotp.runtime.programs import Program, Programs, form
from autotp.text import counts, failure, listed

from .compile import apply_plan, further
from .options import Options

CPU = torch.device("cpu")
NO_CACHE = (
    "autotp.verify(generate={count}): {name} carries nothing from call to call that could be compared. Its class has "
    "no generate(), and carried= names no output that comes back as an input. Leave generate out, or give carried, "
    "such as {{1: 'past_k', 2: 'past_v'}}."
)
FAILS = (
    "autotp.verify(generate={count}): the model itself fails while it decodes: {error}. Give shorter example inputs, "
    "or others."
)
SPOILT = (*CACHES, "use_cache", "return_dict", "labels", "output_attentions", "output_hidden_states")
Call = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]  # of the module at this path


class _FailedError(Exception):
    """An error of the model itself."""


def decoded(
    model: nn.Module, inputs: Inputs, plan: Plan, options: Options, request: CaptureRequest, count: int
) -> Decoded:
    """Generate tokens, and prove every call on simulated ranks.

    Args:
        inputs: the prompt. plan: made with these `options`. request: says which states a user named.
        count: of tokens after the prompt.

    Raises:
        InputError: nothing comes back from call to call, or the model itself fails.
        CaptureError, PlanError: a call cannot be captured, or not run under the plan.
    """
    trial = Trial.of(model, inputs, CPU)
    proof = Decoding(trial.copied.eval(), plan, options, request, trial.tolerance())
    try:
        generate(proof.bare, trial.mapped(), count, request.carried, proof.call)
    except _FailedError as failed:
        error: Any = failed.__cause__
        raise InputError(FAILS.format(count=count, error=failure(error))) from error
    return proof.summary(count)


def generate(bare: nn.Module, inputs: Inputs, count: int, names: Names, call: Call) -> None:
    """Prefill and decode tokens, by calls that another function makes.

    Args:
        bare: the model's skeleton. inputs: the prompt. count: of tokens after it.
        names: of the states that a user named; none: the model's own `generate()` makes the calls.
        call: of the module at a path, with arguments.
    """
    bound = bind(bare.forward, inputs)
    arguments = {**bound.arguments, **inputs.kwargs}
    variadic = {n for n, p in bound.signature.parameters.items() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    arguments = {name: x for name, x in arguments.items() if name not in variadic}
    if names:
        return _by_names(arguments, count, names, call)
    prompt = {name: x for name, x in arguments.items() if name not in SPOILT and x is not None}
    # One token more: what is chosen last is in no call.
    calling(bare, call).generate(
        **prompt, max_new_tokens=count + 1, min_new_tokens=count + 1, do_sample=False, num_beams=1, use_cache=True,
        return_dict_in_generate=False,
    )  # fmt: skip


def _by_names(inputs: dict[str, Any], count: int, names: Names, call: Call) -> None:
    """Call a module some of whose outputs come back as inputs; new tokens are the prompt's again."""
    states = {name for _, name in names}
    tokens = {n: x for n, x in inputs.items() if n not in states and isinstance(x, Tensor) and x.ndim > 1}
    length = next((x.shape[1] for x in tokens.values()), 0)
    outputs = call("", (), inputs)
    for at in range(count):
        new = {n: x[:, at % length, None] for n, x in tokens.items() if x.shape[1] == length}
        outputs = call("", (), {**inputs, **new, **{name: follow(outputs, path) for path, name in names}})


def check_count(model: nn.Module, count: Any, names: Names, axes: Axes) -> None:
    """Refuse a wrong number of tokens, a model that has nothing to decode with, and axes beside tp.

    Args:
        model: that decodes. count: tokens. names: of states that calls carry. axes: beside tp.

    Raises:
        InputError: it says which; or the model is on another device than the CPU.
    """
    if not counts(count):
        raise InputError(f"generate={count!r}: give how many tokens to decode after the example inputs, such as 16.")
    if axes.size > 1:
        raise InputError(f"generate= with {axes.name}: a cache is not sharded over that. Leave out one of them.")
    if away := {x.device.type for x in model.parameters()} - {"cpu", "meta"}:
        raise InputError(f"generate= calls the model too, on the CPU, and it is on {listed(away)}: pass model.cpu().")
    if not names and not callable(getattr(type(model), "generate", None)):
        raise InputError(NO_CACHE.format(count=count, name=type(model).__name__))


@dataclass
class Decoding:
    """Calls of a model that decodes, each of them proved. Programs are captured as calls want them, in eval mode.

    Attributes:
        tolerance: allowed of the difference between a captured graph and the model, in its own dtype.
        programs: with the decisions of each. calls: of the model, not of its parts.
        error, model_error: largest differences of the ranks, in float64, and of the captured graphs from the model.
        values: compared on the ranks. difference: the first, None where all agree.
    """

    model: nn.Module
    plan: Plan
    options: Options
    request: CaptureRequest
    tolerance: float
    programs: Programs = field(default_factory=Programs)
    planned: list[Planned] = field(default_factory=list)
    calls: int = 0
    error: float = 0.0
    model_error: float = 0.0
    values: int = 0
    difference: Difference | None = None

    def __post_init__(self) -> None:
        self.bare = skeleton(self.model, CPU).eval()
        self.carriers = Carriers.of(self.bare, state_names=self.request.states)
        self.layouts: dict[str, Layout] = dict(self.plan.states)

    def summary(self, count: int) -> Decoded:
        """Return the result of decoding so many tokens."""
        states = len({name for p in self.programs for name in p.sharded.states})
        off = self.model_error if self.request.precision is None else None
        return Decoded(count, self.calls, states, self.values, self.error, off, self.difference)

    @torch.no_grad()
    def call(self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the captured graph of the model, or of the module of it at this path; prove it once it has run.

        Args:
            entry: path of the module, "" for the model. args, kwargs: of the call.
        """
        call = Arguments(self.carriers, args, kwargs, entry)
        copies = copy.deepcopy((args, kwargs))  # with states of their own, to which the model itself writes
        program, order = self._find(call)
        captured, tensors = program.capture, [call.flat[i] for i in order]
        leaves = self._leaves(captured, tensors)
        try:
            theirs = self.model.get_submodule(entry)(*copies[0], **copies[1])
        except Exception as error:  # whatever a user's forward may raise
            raise _FailedError from error
        (results,) = run(captured, {n: [_clone(v)] for n, (v,) in leaves.nodes.items()}).outputs
        for i, taker in captured.mutations.items():
            if isinstance(taker, int):
                tensors[taker].copy_(results[i])
        results = [x for i, x in enumerate(results) if i not in captured.mutations]
        outputs = call.settle(results, program.returns)
        self._prove(program, leaves, outputs, theirs)
        self.calls += not entry
        return outputs

    def _prove(self, program: Program, leaves: Values, ours: Any, theirs: Any) -> None:
        """Compare the ranks with the captured graph, and the graph's outputs with the model's."""
        if self.difference is not None:  # of which later calls are made
            return
        what = "the prompt" if self.calls == 0 else f"decoded token {self.calls}"
        report = compare(self.planned[program.key], program.sharded, leaves)
        self.error, self.values = max(self.error, report.output_error), self.values + report.values
        if report.difference is not None:
            detail = f"in the call of {what}, {report.difference.detail}"
            self.difference = replace(report.difference, direction="decoding", detail=detail)
            return
        if self.request.precision is not None:  # in which the model itself has no products
            return
        rounding = Rounding(self.tolerance)
        gap = differences(_tensors(ours), _tensors(theirs), rounding)
        self.model_error = max(self.model_error, rounding.worst)
        if gap is not None:
            detail = f"what the captured graph gives for {what} is off by {gap.error:.1e} from the model itself"
            self.difference = Difference("capture", f"tensor {gap.key} of the outputs", "", "", gap.error, detail)

    def _leaves(self, captured: Capture, tensors: Sequence[Tensor]) -> Values:
        """Take copies of the model's weights and of these inputs as the leaves."""
        state = {**captured.constants, **weights_of(self.model)}
        values = leaf_values(captured, tensors, lambda name: real(state[name]))
        return Values({node: [_clone(value)] for node, value in values.items()})

    # ---- programs --------------------------------------------------------------------------------------------------

    def _find(self, call: Arguments) -> tuple[Program, list[int]]:
        """Find or capture the program of a call, and the positions of its tensors among the call's leaves."""
        for _ in range(2):
            call_form, _ = form(self.bare.get_submodule(call.entry), call.whole, call.spec)
            match = self.programs.find(call_form, call.whole, mode_of(self.bare.modules(), CPU), call.entry)
            if match is not None:
                return match
            self._add(call)
        raise AssertionError("a program does not take the call that it was captured for")

    def _add(self, call: Arguments) -> None:
        captured = self._captured(call)
        while self.carriers.learn(captured):
            call.read()
            captured = self._captured(call)
        planned, sharded = apply_plan(captured, self.plan, self.options, states=self.layouts)
        for name in sharded.states.keys() & self.layouts.keys():
            # The next call shards whole states anew, so that it could not tell.
            if sharded.states[name] != self.layouts[name]:
                detail = f"one call leaves it {self.layouts[name]}, and another takes it {sharded.states[name]}"
                self.difference = self.difference or Difference("decoding", name, "", "", float("inf"), detail)
        self.layouts |= sharded.states
        sharded = as_it_runs(sharded, self.plan.tp, self.options.objective)
        values = [x.node.meta.get("val") for x in captured.inputs]
        call_form, _ = form(self.bare.get_submodule(call.entry), values, captured.in_spec)
        self.planned.append(planned)
        self.programs.append(
            Program(planned.program, sharded, sharded.graph, len(self.programs), call_form, entry=call.entry)
        )

    def _captured(self, call: Arguments) -> Capture:
        bare = skeleton(self.bare, CPU)
        inputs = form(self.bare.get_submodule(call.entry), call.whole, call.spec)[1]
        with entering(bare, call.entry):
            return further(bare, inputs, CPU, mode_of(bare.modules(), CPU), self.request)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(outputs: Any) -> dict[int, Tensor]:
    """Number the tensors of a call's outputs, those in a cache among them."""
    leaves: list[Any] = []
    for x in compat.tree_leaves(outputs):
        leaves += describe(x, "").tensors if is_carrier(x) else [x]
    return dict(enumerate(x for x in leaves if isinstance(x, Tensor)))


def as_it_runs(sharded: Sharded, tp: int, objective: Objective) -> Sharded:
    """Rewrite attention over a cache as one call in the program of all ranks, which is proved as it runs.

    Args:
        sharded: the program before the rank is known; it stays as it is. tp: number of ranks.
        objective: that it is planned for.

    Returns:
        A copy, with layouts of its inputs and of the original's nodes that are left.
    """
    graph, copies = copy_graph(sharded.graph.nodes)
    setting = Setting(MeshPlace(0, tp, ""), Cluster.resolve(None), objective, torch.device("cpu"))
    program = RankProgram(graph, setting)
    CachedAttention().run(program)  # without the check of a rank's program: its rank is not known here
    present = set(program.graph.nodes)
    node_of = {old: new for old, new in copies.items() if new in present}
    layouts = {node_of[n]: layout for n, layout in sharded.layouts.items() if n in node_of}
    origin = {node_of[n]: value for n, value in sharded.origin.items() if n in node_of}
    ends = {node_of[n]: copies[end] for n, end in sharded.ends.items() if n in node_of}
    return Sharded(program.graph, layouts, origin, ends, sharded.states)
