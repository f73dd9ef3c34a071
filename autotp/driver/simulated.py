"""A model on simulated ranks of this process, in float64, call after call.

Beside the ranks runs the captured graph itself, unsharded. The caller's objects have its states, whole; what each rank
has of them goes from call to call beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.capture.request import CaptureRequest, mode_of
from autotp.capture.state_objects import entering
from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.ir.graph import Capture, copy_graph
from autotp.ir.layouts import Layout
from autotp.ir.leaves import SEEDS
from autotp.ir.program import MeshPlace, Sharded
from autotp.passes.optimise import RankProgram, Setting
from autotp.passes.optimise.cached_attention import CachedAttention
from autotp.plans.plan import Plan
from autotp.proof.differences import Gap, Parts, Rounding, differences
from autotp.proof.report import TOLERANCE
from autotp.proof.run import CallLayouts, Simulated, double, promoted, real, run, weights_of
from autotp.runtime.call_key import form
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.carriers import Carriers
from autotp.runtime.programs import Program, Programs

from .compile import apply_plan, further
from .options import Options

CPU = torch.device("cpu")


@dataclass
class State:
    """A state after a call.

    Attributes:
        whole: as the unsharded program has it. parts: what each rank has.
        dtype: in the model, which computes in float64 here.
        tensor: of the caller's object, which a later call may write to.
    """

    whole: Tensor
    parts: Parts
    dtype: torch.dtype
    tensor: Tensor


@dataclass
class Step:
    """One call of the model.

    Attributes:
        outputs: what is compared of them, unsharded. states: all of them by name.
        gap: the first state or output, by "a name" or a rank, that is another on the ranks; None where all agree.
        logits_error, cache_error: the largest differences of outputs and of states.
    """

    outputs: list[Tensor]
    states: dict[str, State]
    gap: Gap | None = None
    logits_error: float = 0.0
    cache_error: float = 0.0


@dataclass
class DecodedModel:
    """A model under a plan on simulated ranks. Programs are captured as calls want them, in eval mode.

    Attributes:
        rows: what is compared of a call's outputs.
        ranks: whether the ranks run too, not the unsharded graph alone.
        steps: the calls of the model, not those of its parts.
        states: as the call before left them, by name.
        rewritten: how many attentions of the programs read their cache as it is, as on the ranks.
    """

    model: nn.Module
    plan: Plan
    options: Options
    request: CaptureRequest
    rows: Callable[[Any], list[Tensor]]
    ranks: bool = True
    steps: list[Step] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    programs: Programs = field(default_factory=Programs)
    rewritten: int = 0

    def __post_init__(self) -> None:
        self.bare = skeleton(self.model, CPU).eval()
        self.carriers = Carriers.of(self.bare, state_names=self.request.states)
        self.layouts: dict[str, Layout] = dict(self.plan.states)
        self.weights: dict[str, Any] = {name: double(real(x)) for name, x in weights_of(self.model).items()}
        self.output_dtypes: dict[int, tuple[Tensor, torch.dtype]] = {}  # by parts of the model, such as an encoder

    def restart(self, ranks: bool) -> list[Step]:
        """Begin another sequence with the programs that are there; returns the calls of the one before."""
        steps, self.steps, self.states, self.ranks = self.steps, [], {}, ranks
        return steps

    @torch.no_grad()
    def call(self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model, or the module of it at this path, on the whole and on the simulated ranks.

        Args:
            entry: path of the module, "" for the model. args, kwargs: of the call.
        """
        call = Arguments(self.carriers, args, kwargs, entry)
        program, order = self._find(call)
        tensors = [call.flat[i] for i in order]
        values = [double(v) for v in self._values(program.capture, tensors)]
        leaves = {x.node: v for x, v in zip(program.capture.leaves, values, strict=True)}
        layouts = CallLayouts(program.capture, program.sharded, leaves, Simulated(self.plan.tp))
        whole, every = self._run(layouts, self._parts(program.capture, tensors))
        outputs = call.settle(self._outputs_after(layouts, whole, every, tensors, entry), program.returns)
        if not entry:
            at = {id(x): i for i, x in enumerate(whole)}
            rows = [x for x in self.rows(outputs) if id(x) in at]
            of_ranks = {(rank, i): out[at[id(x)]] for rank, out in enumerate(every) for i, x in enumerate(rows)}
            self.steps.append(self._step(rows, of_ranks))
        return outputs

    def _step(self, rows: list[Tensor], of_ranks: Mapping[tuple[int, int], Any]) -> Step:
        """Hold the outputs and the states of a call on the ranks against the unsharded ones."""
        step, logits, caches = Step(rows, self.states), Rounding(TOLERANCE), Rounding(TOLERANCE)
        if of_ranks:
            states = {name: x.parts for name, x in self.states.items() if x.parts.ranks}
            cache = differences(states, {name: self.states[name].whole for name in states}, caches)
            row = differences(of_ranks, {(rank, i): rows[i] for rank, i in of_ranks}, logits)
            step.gap = cache or row
            step.logits_error, step.cache_error = logits.worst, caches.worst
        return step

    def _run(self, call: CallLayouts, parts: Mapping[str, list[Tensor]]) -> tuple[list[Any], list[list[Any]]]:
        """Return the outputs of the whole, and those of each rank."""
        with promoted(call.captured.graph, call.sharded.graph):
            (whole,) = run(call.captured, {n: [v] for n, v in call.leaves.items()}).outputs
            if not self.ranks:
                return whole, []
            leaves = {n: parts.get(x.name) or call.dealt(x, n) for x, n in call.pairs()}
            return whole, run(call.sharded, leaves, call.on).outputs

    # ---- programs --------------------------------------------------------------------------------------------------

    def _find(self, call: Arguments) -> tuple[Program, list[int]]:
        """Find or capture the program of a call, and where its tensors lie among the call's leaves."""
        mode = mode_of(self.bare.modules(), CPU)
        for _ in range(2):
            whole = self._as_in_the_model(call)
            call_form, _ = form(self.bare.get_submodule(call.entry), whole, call.spec)
            if (match := self.programs.find(call_form, whole, mode, call.entry)) is not None:
                return match
            self._add(call)
        raise AssertionError("a program does not take the call that it was captured for")

    def _add(self, call: Arguments) -> None:
        captured = self._captured(call)
        while self.carriers.learn(captured):
            call.read()
            captured = self._captured(call)
        _, sharded = apply_plan(captured, self.plan, self.options, states=self.layouts)
        self.layouts |= sharded.states
        sharded, count = as_it_runs(sharded, self.plan.tp, self.options.objective)
        self.rewritten += count
        values = [x.node.meta.get("val") for x in captured.inputs]
        call_form, _ = form(self.bare.get_submodule(call.entry), values, captured.in_spec)
        self.programs.append(Program(captured, sharded, sharded.graph, len(self.programs), call_form, entry=call.entry))

    def _captured(self, call: Arguments) -> Capture:
        bare = skeleton(self.bare, CPU)
        inputs = form(self.bare.get_submodule(call.entry), self._as_in_the_model(call), call.spec)[1]
        with entering(bare, call.entry):
            return further(bare, inputs, CPU, mode_of(bare.modules(), CPU), self.request)

    def _as_in_the_model(self, call: Arguments) -> list[Any]:
        """Return the leaves of a call with the dtypes that the model itself would give and take."""
        dtype_of = {id(x): dtype for x, dtype in self.output_dtypes.values()}
        dtype_of |= {id(s.tensor): s.dtype for s in self.states.values()}
        pairs = zip(call.flat, call.whole, strict=True)
        out = []
        for x, was in pairs:
            out.append(torch.empty(was.shape, dtype=dtype_of[id(x)], device="meta") if id(x) in dtype_of else was)
        return out

    # ---- values ----------------------------------------------------------------------------------------------------

    def _values(self, captured: Capture, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the values of all leaves, whole."""
        arguments, values = iter(tensors), []
        for leaf in captured.leaves:
            val: Any = leaf.node.meta.get("val")
            if leaf.kind is SEEDS:
                values.append(torch.arange(len(val)))
            elif leaf.kind.passed:
                values.append(next(arguments) if isinstance(val, Tensor) else val)
            else:
                values.append(self.weights.get(leaf.name, captured.constants.get(leaf.name)))
        return values

    def _parts(self, captured: Capture, tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Return what each rank has of the states that this call passes as the call before left them."""
        names = [x.name for x in captured.inputs if isinstance(x.node.meta.get("val"), Tensor)]
        states = {name: self.states[name] for name in names if name in self.states}
        return {
            name: list(states[name].parts.ranks)
            for name, x in zip(names, tensors, strict=True)
            if _is(x, states.get(name))
        }

    def _outputs_after(
        self, call: CallLayouts, results: list[Any], every: list[list[Any]], tensors: Sequence[Tensor], entry: str
    ) -> list[Any]:
        """Return the outputs, after states, buffers and inputs are what they are afterwards."""
        captured, user_outputs, states = call.captured, [], dict(self.states)
        output_nodes = compat.tree_leaves(captured.graph.output_node().args[0])
        for i, value in enumerate(results):
            taker, name = captured.mutations.get(i), captured.becomes(i)
            if isinstance(taker, str):
                self.weights[taker] = value
            elif taker is None:
                user_outputs.append(value)
            if isinstance(value, Tensor) and name is not None:
                tensor = tensors[taker].copy_(value) if isinstance(taker, int) else value
                dtype = output_nodes[i].meta["val"].dtype
                whole = value.clone()  # a later call may write to what the caller's object has
                parts = Parts([r[i] for r in every], call.spec(call.output_layout(i)))
                states[name] = State(whole, parts, dtype, tensor)
            elif isinstance(value, Tensor) and entry:
                self.output_dtypes[id(value)] = value, output_nodes[i].meta["val"].dtype
        self.states = self.states if entry else states
        return user_outputs


def _is(tensor: Tensor, state: State | None) -> bool:
    return state is not None and tensor is state.tensor and bool(state.parts.ranks)


def as_it_runs(sharded: Sharded, tp: int, objective: Objective) -> tuple[Sharded, int]:
    """Rewrite attention over a cache as one call in the program of all ranks, which is proved as it runs.

    Args:
        sharded: the program before the rank is known; it stays as it is. tp: number of ranks.
        objective: what it is planned for.

    Returns:
        A copy, with layouts of its inputs and of what is left of the original's nodes, and how many attentions were
        rewritten.
    """
    graph, copies = copy_graph(sharded.graph.nodes)
    setting = Setting(MeshPlace(0, tp, ""), Cluster.resolve(None), objective, torch.device("cpu"))
    program = RankProgram(graph, setting)
    changes = CachedAttention().run(program)  # without the check of a rank's program: its rank is not known here
    there = set(program.graph.nodes)
    layouts = {copies[n]: layout for n, layout in sharded.layouts.items() if copies.get(n) in there}
    origin = {copies[n]: value for n, value in sharded.origin.items() if copies.get(n) in there}
    return Sharded(program.graph, layouts, origin, states=sharded.states), changes.count
