"""Capture of an `nn.Module` as a flat torch.fx graph of ATen operators, through `torch.export`.

Sizes are symbolic from the start: the first two dimensions of token inputs and the batch of all others are dynamic
where the model allows it. The model's weights are never touched: a skeleton of fake tensors is exported.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from autotp import compat
from autotp.errors import CaptureError
from autotp.inputs import Inputs, mapped
from autotp.ir.carried import carried_in, states_of
from autotp.ir.graph import (
    BUFFER,
    CONSTANT,
    INPUT,
    PARAMETER,
    STATE,
    TABLE,
    Capture,
    Leaf,
    LeafKind,
    Mutations,
    Symbols,
)
from autotp.ir.op import expression
from autotp.log import log, stage
from autotp.passes.analysis.ones import allow_ones
from autotp.passes.base import Pass, run_passes

from .attempts import ATTEMPTS, Change, Failure, attempt_errors, worth_trying
from .capture_errors import HiddenState, capture_error, refuse_hidden_state
from .copies import copied, tensors_of
from .export import Attempt, GradModeAnswers, lengths
from .repeated_blocks import Repeats
from .request import GRAD
from .selfcheck import Trial


def aliases(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in tensors_of(model, every_name=True).items()}


def skeleton(
    model: nn.Module, device: torch.device | str, dtypes: Mapping[str, torch.dtype] | None = None
) -> nn.Module:
    """Copy a module, with fake tensors in place of parameters and buffers.

    Args:
        model: stays as it is. device: that the fake tensors are on.
        dtypes: by name, of the tensors that are of another type by now.
    """
    mode, names = compat.fake_mode(), {id(t): n for n, t in tensors_of(model).items()}

    def fake(tensor: Tensor) -> Tensor:
        return compat.fake(mode, tensor, (dtypes or {}).get(names.get(id(tensor), ""), tensor.dtype), device)

    return copied(model, fake, lambda tensor: None if tensor.is_leaf else fake(tensor))


@torch.inference_mode(False)
def capture(
    bare: nn.Module,
    inputs: Inputs,
    device: torch.device | str = "cpu",
    passes: Sequence[Pass] = (),
    trial: Trial | None = None,
    state: tuple[Any, ...] = (),
    states: Collection[str] = (),
) -> Capture:
    """Capture the program of a skeleton for these inputs, by the first of `ATTEMPTS` that exports and is the model.

    Args:
        bare: the skeleton.
        inputs: of the call.
        device: of the tensors.
        passes: that make a capture canonical.
        trial: the model itself, to compare captures and the assumptions of attempts with.
        state: the mode that it is captured in, with the grad mode that a forward which asks is to find.
        states: arguments that come back from the call before, of which any dimension may grow.

    Raises:
        CaptureError: no attempt could be exported; the message shows the user's own line and the way out.
    """
    request = _Request(bare, inputs, device, passes, trial, state, frozenset(states))
    if (program := request.of_any_size()) is not None:
        return program
    failures: list[Failure] = []
    for changes, flat in itertools.product(ATTEMPTS, (False, True)):
        if not worth_trying(changes, flat, failures):
            continue
        # Where a block reads its place in the stack, say, one trace cannot stand for all of them.
        attempt = replace(request.attempt(inputs), repeats=None if flat else Repeats(bare))
        try:
            program = request.program(attempt, changes)
        except HiddenState:
            raise
        except Exception as error:  # whatever a user's forward and torch's tracer may raise
            log.debug("an attempt with %s: %s", [c.name for c in changes] or "no change", error)
            failures.append(Failure.of(changes, flat, error, attempt, failures))
            continue
        if program is not None:
            return program
    fails = trial.failure() if trial is not None and not trial.skip else ""
    errors = attempt_errors(failures)
    raise capture_error(bare, errors, fails) from errors[0][1]


def _twice(inputs: Inputs) -> Inputs:
    """Repeat the inputs' one sequence where they have only one: torch makes a constant of a size of 1."""

    def batched(x: Tensor) -> bool:
        return x.ndim > 1 and x.numel() > 0

    if {x.shape[0] for x in filter(batched, inputs.tensors)} != {1}:
        return inputs
    return mapped(inputs, lambda x: torch.cat([x.detach()] * 2) if batched(x) else x)


@dataclass(frozen=True)
class _Request:
    """Arguments of `capture`, which all attempts have in common."""

    bare: nn.Module
    inputs: Inputs
    device: torch.device | str
    passes: Sequence[Pass]
    trial: Trial | None
    state: tuple[Any, ...]
    states: frozenset[str]

    def of_any_size(self) -> Capture | None:
        """Capture a call with states for any batch and any length of these, 1 too; None where there are none, or it
        fails, or does not take the inputs."""
        attempt = self.attempt(_twice(self.inputs))
        try:
            attempt.short = bool(carried_in(attempt.args, attempt.kwargs)) or any(map(lengths, attempt.state_tensors()))
            program = self.program(attempt, ()) if attempt.short else None
            if program is None:
                return None
            allow_ones(program, attempt.branches)
            wrong = program.accepts(self.inputs.leaves)
            if wrong is None:
                return program
        except Exception as error:  # whatever a user's forward and torch's tracer may raise
            wrong = str(error)
        log.debug("an attempt with states of any size: %s", wrong)
        return None

    def program(self, attempt: Attempt, changes: tuple[Change, ...]) -> Capture | None:
        """Make the canonical capture of an attempt, and compare it with the model; None where a change changes
        nothing."""
        # What changes nothing for this model, as masks of ones where none is missing, was tried by another row.
        changes_made = [change.apply(attempt) for change in changes]
        applied = [change for change in changes_made if change is not None]
        if len(applied) < len(changes_made):
            return None
        proofs = [proof for _, proof in applied if proof is not None]
        skip = self.trial.skip if self.trial else ""
        compared = None if skip else self.trial
        # The model itself is asked before anything is traced: an assumption that it refutes rules out further attempts.
        attempt.assumes = True
        trials = [proof(compared) for proof in proofs if compared is not None]
        attempt.assumes = False
        program = self._exported(attempt)
        if compared is None:  # else the comparison shows it: the model itself is called twice
            refuse_hidden_state(self.bare, attempt.stores, replace(attempt, repeats=Repeats(self.bare)).run)
        # A reader of the plan is to know what was traced in the place of his model, and what nobody could prove.
        program.notes += [note for note, _ in applied if note]
        if proofs and skip:
            program.notes.append(f"that the model computes the same so was assumed, not proved: {skip}")
        run_passes(program, self.passes)
        if compared is not None:
            with stage("self-check"):
                program.error = compared.compare(program)
        # Once more on the inputs of each proof, for the example's may hide the difference.
        for trial in trials:
            trial.compare(program)
        return program

    def attempt(self, inputs: Inputs) -> Attempt:
        """Make an attempt without changes, on copies of tensors: an export that fails leaves marks of symbolic sizes
        on them."""
        copies = mapped(inputs, lambda t: _example(t, self.device))
        grad_mode = GradModeAnswers(self.state[2] if self.state else GRAD)
        return Attempt(
            self.bare, copies.args, copies.kwargs, repeats=Repeats(self.bare), grad_mode=grad_mode, states=self.states
        )

    def _exported(self, attempt: Attempt) -> Capture:
        """Run an attempt and read its capture, which is not canonical yet."""
        exported, state = attempt.run(), self.state
        program = _read(exported.program, self.bare.training, exported.writes)
        program.asks_grad_mode, program.asks_gradients = attempt.grad_mode.asks, attempt.grad_mode.tensors
        program.aliases, program.conditions = aliases(self.bare), exported.conditions
        if state:
            grad, trained = program.asks_grad_mode or None, program.asks_gradients or None
            program.state = (*state[:2], grad and state[2], trained and state[3], state[-1])
        return program


def _example(tensor: Tensor, device: torch.device | str) -> Tensor:
    # A part of a larger tensor gives torch one more symbol, and then other names for all: ranks would not agree.
    plain = tensor.clone() if tensor.is_inference() or tensor.storage_offset() else tensor.detach()
    here = torch.zeros_like(plain, device=device) if plain.is_meta else plain.to(device)  # sizes are enough to plan
    return here.requires_grad_(tensor.requires_grad)


def _read(program: torch.export.ExportedProgram, training: bool, writes: Mapping[int, str | int]) -> Capture:
    """Convert an ExportedProgram to a Capture.

    Args:
        training: whether the model was in training mode.
        writes: further writes of the forward, which the exporter does not say, as `Capture.mutations`.
    """
    leaves = _leaves(program)
    hints, ranges, guards = compat.read_shape_env(compat.shape_env(program.graph))
    capture = Capture(
        program.graph, leaves, _mutations(program, leaves), program.call_spec.in_spec, program.call_spec.out_spec,  # type: ignore[arg-type]
        dict(program.constants), _symbols(leaves), hints, ranges, guards, training,
    )  # fmt: skip
    capture.mutations |= writes
    _mark_tables(capture, {s.target for s in program.graph_signature.input_specs if s.persistent})
    capture.carried = _carried(program, capture)
    return capture


def _leaves(program: torch.export.ExportedProgram) -> list[Leaf]:
    """List the placeholders with their kinds; of the inputs, those are states that the description of them says."""
    kinds = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "CONSTANT_TENSOR": CONSTANT, "USER_INPUT": INPUT}
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    leaves = []
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        kind = kinds.get(spec.kind.name) or LeafKind(spec.kind.name)
        # Of what the model holds the exporter's target is the name that it has there.
        owned = None if kind.passed else spec.target
        leaves.append(Leaf(nodes[name], kind, owned or name))
    states = states_of(program.call_spec.in_spec)  # type: ignore[arg-type]
    inputs = [leaf for leaf in leaves if leaf.kind.passed]
    for i, leaf in enumerate(inputs):
        if i in states:
            leaf.kind, leaf.name = STATE, states[i]
    return leaves


def _symbols(leaves: Sequence[Leaf]) -> Symbols:
    """Map each symbol to the first dimension of a placeholder that is the symbol: its value is read there."""
    symbols = Symbols()
    for leaf in leaves:
        val = leaf.node.meta.get("val")
        shape = val.shape if isinstance(val, Tensor) else ()
        for d, size in enumerate(map(expression, shape)):
            if isinstance(size, sympy.Symbol):
                symbols.setdefault(size, (leaf.node, d))
    return symbols


def _carried(program: torch.export.ExportedProgram, capture: Capture) -> dict[int, str]:
    """Find the outputs that become states: those that the outputs' description says, and values written over a
    state."""
    specs = program.graph_signature.output_specs
    outputs = [i for i, spec in enumerate(specs) if spec.kind.name == "USER_OUTPUT"]
    states = states_of(program.call_spec.out_spec)  # type: ignore[arg-type]
    carried = {outputs[i]: name for i, name in states.items()}
    tensors = capture.tensor_inputs
    for position, taker in capture.mutations.items():
        if isinstance(taker, int) and tensors[taker].kind is STATE:
            carried[position] = tensors[taker].name
    return carried


def _mark_tables(program: Capture, persistent: set[str | None]) -> None:
    """Mark buffers that are weights: in the state dict, never written, of two dimensions or more, and no indices."""
    mutated = {name for name in program.mutations.values() if isinstance(name, str)}
    for leaf in program.leaves:
        val = leaf.node.meta.get("val")
        if leaf.kind is BUFFER and leaf.name in persistent - mutated and isinstance(val, Tensor):
            leaf.kind = TABLE if val.ndim > 1 and val.dtype not in (torch.int64, torch.bool) else BUFFER


def _mutations(program: torch.export.ExportedProgram, leaves: list[Leaf]) -> Mutations:
    """Read the writes of the forward: position of the output -> name of the buffer, or place among the input
    tensors."""
    tensors = [x.node.name for x in leaves if x.kind.passed and x.is_tensor]
    mutations: Mutations = {}
    for i, spec in enumerate(program.graph_signature.output_specs):
        target = str(spec.target)
        if spec.kind.name == "BUFFER_MUTATION":
            mutations[i] = target
        elif spec.kind.name == "USER_INPUT_MUTATION":
            mutations[i] = tensors.index(target)
        elif spec.kind.name == "PARAMETER_MUTATION":
            raise CaptureError(f"the forward writes to the parameter {target}")
    return mutations
