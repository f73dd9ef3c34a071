"""Capture: an `nn.Module` becomes a flat torch.fx graph of ATen operators through `torch.export`.

Sizes are symbolic from the start: the first two dimensions of token inputs and the batch of all others are dynamic
where the model allows it. The model's weights are never touched: a skeleton of fake tensors is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import sympy
import torch
from torch import Tensor, fx, nn

from autotp import compat
from autotp.errors import CaptureError
from autotp.inputs import Inputs
from autotp.ir.carried import states_of
from autotp.ir.graph import Capture, Leaf
from autotp.ir.leaves import BUFFER, CONSTANT, INPUT, PARAMETER, STATE, Kind
from autotp.ir.op import expression

from .attempts import climb
from .copies import copied
from .export import Attempt
from .grad_mode import GRAD, Asked
from .selfcheck import Trial


def aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name under which the same tensor is held."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(t), name) for name, t in named}


def skeleton(
    model: nn.Module, device: torch.device | str, dtypes: Mapping[str, torch.dtype] | None = None
) -> nn.Module:
    """A copy of the module that holds fake tensors on `device` in place of parameters and buffers.

    `dtypes` names tensors that are of another type by now.
    """
    mode, names = compat.fake_mode(), {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}

    def fake(tensor: Tensor) -> Tensor:
        return compat.fake(mode, tensor, (dtypes or {}).get(names.get(id(tensor), ""), tensor.dtype), device)

    return copied(model, fake, lambda tensor: None if tensor.is_leaf else fake(tensor))


@torch.inference_mode(False)
def capture(
    bare: nn.Module,
    inputs: Inputs,
    device: torch.device | str = "cpu",
    finish: Callable[[Capture], None] = lambda program: None,
    trial: Trial | None = None,
    mode: str = GRAD,
    states: Collection[str] = (),
) -> Capture:
    """Export a skeleton for these inputs, dynamic where the model allows it.

    Args:
        bare: the skeleton.
        inputs: what it is called with.
        device: where the tensors are to be.
        finish: called with each capture; where it raises `CaptureError`, the next rung of the ladder is tried.
        trial: the model itself, to prove what a rung of the ladder assumes.
        mode: the grad mode that a forward which asks is to find.
        states: arguments that come back from the call before, of which any dimension may grow.

    Raises:
        CaptureError: the model cannot be exported; the message shows the user's own line and the way out.
    """

    def start() -> Attempt:  # with tensors of its own: an export that fails leaves its marks of symbolic sizes on them
        given = (inputs.args, dict(inputs.kwargs))
        own = compat.tree_map_only(Tensor, lambda t: _example(t, device), given)
        return Attempt(bare, *own, asked=Asked(mode), states=frozenset(states))

    def export(attempt: Attempt) -> Capture:
        made = attempt.run()
        found = _read(made.program, bare.training, made.written)
        found.asks_grad_mode = attempt.asked.told
        found.aliases, found.conditions = aliases(bare), made.conditions
        return found

    return climb(start, export, finish, trial)


def _example(tensor: Tensor, device: torch.device | str) -> Tensor:
    # A part of a larger tensor gives torch one more symbol, and then other names for all: ranks would not agree.
    plain = tensor.clone() if tensor.is_inference() or tensor.storage_offset() else tensor.detach()
    here = torch.zeros_like(plain, device=device) if plain.is_meta else plain.to(device)  # sizes are enough to plan
    return here.requires_grad_(tensor.requires_grad)


def _read(program: torch.export.ExportedProgram, training: bool, written: Mapping[int, str | int]) -> Capture:
    signature, leaves = program.graph_signature, []
    kinds = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "CONSTANT_TENSOR": CONSTANT, "USER_INPUT": INPUT}
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", "")
        kind = kinds.get(spec.kind.name) or Kind(spec.kind.name)
        leaves.append(Leaf(nodes[name], kind, spec.target if not kind.passed and spec.target else name))
    environment = compat.shape_env(program.graph)
    symbols: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    for leaf in leaves:
        val = leaf.node.meta.get("val")
        for d, size in enumerate(val.shape if isinstance(val, Tensor) else ()):
            if isinstance(expression(size), sympy.Symbol):
                symbols.setdefault(expression(size), (leaf.node, d))  # type: ignore[arg-type]
    given = states_of(program.call_spec.in_spec)  # type: ignore[arg-type]
    for i, leaf in enumerate([x for x in leaves if x.kind.passed]):
        if i in given:
            leaf.kind, leaf.name = STATE, given[i]
    hints, ranges, guards = compat.read_shape_env(environment)
    found = Capture(
        program.graph, leaves, _mutations(program, leaves), program.call_spec.in_spec, program.call_spec.out_spec,  # type: ignore[arg-type]
        dict(program.constants), symbols, hints, ranges, guards, training,
    )  # fmt: skip
    found.mutations |= written
    tensors = [x for x in found.inputs if isinstance(x.node.meta.get("val"), Tensor)]
    outputs = [i for i, x in enumerate(signature.output_specs) if x.kind.name == "USER_OUTPUT"]
    found.carried = {outputs[i]: name for i, name in states_of(program.call_spec.out_spec).items()}  # type: ignore[arg-type]
    takers = {i: tensors[x] for i, x in found.mutations.items() if isinstance(x, int)}
    found.carried |= {i: leaf.name for i, leaf in takers.items() if leaf.kind is STATE}
    return found


def _mutations(program: torch.export.ExportedProgram, leaves: list[Leaf]) -> dict[int, str | int]:
    """What the forward writes to: position of the output -> name of the buffer, or place among the input tensors."""
    tensors = [x.node.name for x in leaves if x.kind.passed and isinstance(x.node.meta.get("val"), Tensor)]
    found: dict[int, str | int] = {}
    for i, spec in enumerate(program.graph_signature.output_specs):
        target = str(spec.target)
        if spec.kind.name == "BUFFER_MUTATION":
            found[i] = target
        elif spec.kind.name == "USER_INPUT_MUTATION":
            found[i] = tensors.index(target)
        elif spec.kind.name == "PARAMETER_MUTATION":
            raise CaptureError(f"the forward writes to the parameter {target}")
    return found
