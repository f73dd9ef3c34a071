"""A model on simulated ranks of this process, in float64, call after call.

Beside the ranks runs the captured graph itself, unsharded. The caller's objects have its states, whole; what each rank
has of them goes from call to call beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autotp import compat
from autotp.capture.capture import skeleton
from autotp.capture.carrying import entering
from autotp.capture.request import CaptureRequest, mode_of
from autotp.driver.compile import apply_plan, further
from autotp.driver.options import Options
from autotp.errors import PlanError
from autotp.ir.graph import Capture
from autotp.ir.layouts import Layout
from autotp.ir.leaves import SEEDS
from autotp.ir.specs import Spec
from autotp.plans.plan import Plan
from autotp.proof.both import Both
from autotp.proof.simulate import double, real, weights_of
from autotp.runtime.call_key import form
from autotp.runtime.generation.arguments import Arguments
from autotp.runtime.generation.carrying import Carriers
from autotp.runtime.programs import Program

from .as_run import as_it_runs

CPU = torch.device("cpu")


@dataclass
class State:
    """A state after a call.

    Attributes:
        whole: as the unsharded program has it. parts: what each rank has, which lies as `spec` says.
        dtype: in the model, which computes in float64 here.
        tensor: of the caller's object, which a later call may write to.
    """

    whole: Tensor
    parts: list[Tensor]
    spec: Spec
    dtype: torch.dtype
    tensor: Tensor

    def put_together(self) -> Tensor | None:
        """The whole from each rank's part; None where there are none, or they do not fit."""
        try:
            return self.spec.recombine(self.parts) if self.parts else None
        except (RuntimeError, ValueError, IndexError, PlanError):
            return None


@dataclass
class Step:
    """One call of the model: what is compared of its outputs, the same on each rank, and all states by name."""

    outputs: list[Tensor]
    ranks: list[list[Tensor]]
    states: dict[str, State]


@dataclass
class Simulated:
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
    programs: list[Program] = field(default_factory=list)
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
        both = Both(program.capture, program.sharded, self._values(program.capture, tensors))
        whole = both.whole()
        every = both.ranks(self.plan.tp, self._parts(program.capture, tensors)) if self.ranks else []
        outputs = call.settle(self._outputs_after(both, whole, every, tensors, entry), program.returns)
        if not entry:
            at = {id(x): i for i, x in enumerate(whole)}
            rows = [x for x in self.rows(outputs) if id(x) in at]
            of_ranks = []
            for results in every:
                of_ranks.append([results[at[id(x)]] for x in rows])
            self.steps.append(Step(rows, of_ranks, self.states))
        return outputs

    # ---- programs --------------------------------------------------------------------------------------------------

    def _find(self, call: Arguments) -> tuple[Program, list[int]]:
        """The program of a call, and where its tensors lie among the call's leaves; captured where there is none."""
        mode = mode_of(self.bare.modules(), CPU)
        for _ in range(2):
            whole = self._as_in_the_model(call)
            call_form, _ = form(self.bare.get_submodule(call.entry), whole, call.spec)
            for program in self.programs:
                order = program.order(call_form, whole, mode) if program.entry == call.entry else None
                if order is not None:
                    return program, order
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
        """The leaves of a call with the dtypes that the model itself would give and take."""
        dtype_of = {id(x): dtype for x, dtype in self.output_dtypes.values()}
        dtype_of |= {id(s.tensor): s.dtype for s in self.states.values()}
        pairs = zip(call.flat, call.whole, strict=True)
        out = []
        for x, was in pairs:
            out.append(torch.empty(was.shape, dtype=dtype_of[id(x)], device="meta") if id(x) in dtype_of else was)
        return out

    # ---- values ----------------------------------------------------------------------------------------------------

    def _values(self, captured: Capture, tensors: Sequence[Tensor]) -> list[Any]:
        """Of all leaves, whole."""
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
        """What each rank has of the states that this call passes as the call before left them."""
        names = [x.name for x in captured.inputs if isinstance(x.node.meta.get("val"), Tensor)]
        states = {name: self.states[name] for name in names if name in self.states}
        return {name: states[name].parts for name, x in zip(names, tensors, strict=True) if _is(x, states.get(name))}

    def _outputs_after(
        self, both: Both, results: list[Any], every: list[list[Any]], tensors: Sequence[Tensor], entry: str
    ) -> list[Any]:
        """The outputs, after states, buffers and inputs are what they are afterwards."""
        captured, user_outputs, states = both.captured, [], dict(self.states)
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
                states[name] = State(whole, [r[i] for r in every], both.left_as(i), dtype, tensor)
            elif isinstance(value, Tensor) and entry:
                self.output_dtypes[id(value)] = value, output_nodes[i].meta["val"].dtype
        self.states = self.states if entry else states
        return user_outputs


def _is(tensor: Tensor, state: State | None) -> bool:
    return state is not None and tensor is state.tensor and bool(state.parts)
