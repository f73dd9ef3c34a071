"""Capture: an `nn.Module` becomes a flat torch.fx graph of ATen operators through `torch.export`.

Sizes are symbolic from the start: the first two dimensions of token inputs and the batch of all others are dynamic
where the model allows it. The model's weights are never touched: a skeleton of fake tensors is exported.
"""

from __future__ import annotations

import copy
import inspect
import linecache
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from autotp.passes.functionalise import functionalise
from autotp.rules.core import expression

from . import compat
from .errors import CaptureError
from .graph import Capture, Leaf
from .inputs import Inputs

HERE = Path(__file__).parent
NOT_THE_USERS = (  # files of torch, of this library (two folders are links), and generated code
    f"{Path(torch.__file__).parent}/", f"{HERE}/", *(f"{(HERE / room).resolve()}/" for room in ("passes", "cost")), "<",
)  # fmt: skip


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
    mode = compat.fake_mode()
    memo: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kind = (dtypes or {}).get(name, tensor.dtype)
        with mode:
            fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
        memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


@torch.inference_mode(False)
def capture(bare: nn.Module, inputs: Inputs, device: torch.device | str = "cpu") -> Capture:
    """Export a skeleton for these inputs, dynamic where the model allows it.

    Raises:
        CaptureError: the model cannot be exported; the message shows the user's own line.
    """
    args, kwargs = compat.tree_map_only(Tensor, lambda t: _example(t, device), (inputs.args, dict(inputs.kwargs)))
    dynamic = compat.tree_map(_dims, (args, kwargs))
    failures: list[Exception] = []
    for shapes in ((dynamic[0], dynamic[1]), None):
        try:
            program = _export(bare, args, kwargs, shapes)
            break
        except Exception as e:
            failures.append(e)
    else:
        raise _capture_error(bare, failures[-1]) from failures[-1]
    found = _read(program, bare.training)
    found.aliases = aliases(bare)
    if len(failures) == 1:
        found.notes.append("captured for one batch size and length only: the model does not export with symbolic sizes")
    return found


def _example(tensor: Tensor, device: torch.device | str) -> Tensor:
    plain = tensor.clone() if tensor.is_inference() else tensor.detach()
    return plain.to(device).requires_grad_(tensor.requires_grad)


def _dims(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    free = 2 if value.ndim <= 3 else 1
    return dict.fromkeys(range(min(value.ndim, free)), Dim.AUTO)


def _export(bare: nn.Module, args: Any, kwargs: Any, shapes: Any) -> torch.export.ExportedProgram:
    with ExitStack() as stack:
        stack.enter_context(_named(bare, kwargs))
        if shapes is not None:
            shapes = dict(inspect.signature(bare.forward).bind(*shapes[0], **shapes[1]).arguments)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(compat.quiet_export())
        stack.enter_context(torch.enable_grad())  # else the model's own no_grad regions would not be seen
        program = torch.export.export(bare, args, kwargs, dynamic_shapes=shapes, strict=False)
        buffers = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "BUFFER"}
        if not functionalise(program.graph, buffers):
            program = program.run_decompositions({})
    return program


@contextmanager
def _named(bare: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Names what `**kwargs` takes in forward's signature: without, torch.export refuses symbolic sizes."""
    own, signature = bare.forward, inspect.signature(bare.forward)
    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in kwargs if n not in signature.parameters]
    if not more:
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    *named, rest = signature.parameters.values()
    forward.__signature__ = signature.replace(parameters=[*named, *more, rest])  # type: ignore[attr-defined]
    held = vars(bare).get("forward")
    bare.forward = forward
    try:
        yield
    finally:
        del bare.forward
        if held is not None:
            bare.forward = held


def _read(program: torch.export.ExportedProgram, training: bool) -> Capture:
    signature, leaves = program.graph_signature, []
    kinds = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", "")
        kind = kinds.get(spec.kind.name, spec.kind.name)
        leaves.append(Leaf(nodes[name], kind, spec.target if kind != "input" and spec.target else name))
    mutations = {
        i: s.target for i, s in enumerate(signature.output_specs) if s.kind.name == "BUFFER_MUTATION" and s.target
    }
    environment = compat.shape_env(program.graph)
    symbols: dict[sympy.Symbol, tuple[fx.Node, int]] = {}
    for leaf in leaves:
        val = leaf.node.meta.get("val")
        for d, size in enumerate(val.shape if isinstance(val, Tensor) else ()):
            if isinstance(expression(size), sympy.Symbol):
                symbols.setdefault(expression(size), (leaf.node, d))  # type: ignore[arg-type]
    hints, ranges, guards = compat.read_shape_env(environment)
    return Capture(
        program.graph, leaves, mutations, program.call_spec.in_spec, program.call_spec.out_spec,  # type: ignore[arg-type]
        dict(program.constants), symbols, hints, ranges, guards, training,
    )  # fmt: skip


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    """Name the innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(NOT_THE_USERS)]
    where = ""
    if own:
        f = own[-1]
        where = (
            f"\n  at {f.filename}:{f.lineno} in {f.name}\n    {linecache.getline(f.filename, f.lineno or 0).strip()}"
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return CaptureError(
        f"{type(model).__name__} cannot be captured as one graph: {type(error).__name__}: {first}{where}\n"
        "torch.export traces the forward once, so it cannot follow Python branches on tensor values (`if x.sum() > 0`, "
        "`x.item()`, `x.tolist()`). Rewrite that line with tensor operations (torch.where), pass the value as an "
        "argument, or shard the submodule without it."
    )
