"""A program traced a second time, by torch's own functionalisation: for what `functionalise` does not rewrite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from autotp.errors import CaptureError
from autotp.passes.canonicalise.no_grad_regions import detach_regions

from .messages import line_of

OTHER = "autotp_"  # what a name is given that a graph module has for itself


def traced_again(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place operators; regions under no_grad lose their frame, and not their meaning.

    Raises:
        CaptureError: something without a gradient is written into a value that carries one.
    """
    specs = program.graph_signature.input_specs
    leaves = {s.arg.name for s in specs if s.kind.name == "PARAMETER"}
    leaves |= {n.name for n in program.graph.nodes if n.op == "placeholder" and _wants_gradient(n.meta.get("val"))}
    odd = detach_regions(program.graph, leaves)
    if odd is not None:
        raise CaptureError(f"a write that has no gradient changes a value that has one ({line_of(odd)})")
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    names = {str(s.target): _other(str(s.target)) for s in specs if s.target is not None}
    others = {name: other for name, other in names.items() if name != other}
    shared = _apart(program)
    _rename(program, others)
    traced = program.run_decompositions({})
    _rename(traced, {other: name for name, other in others.items()})
    for table in (traced.state_dict, traced.constants):
        table.update({name: shared[name] for name in table.keys() & shared.keys()})
    return traced


def _apart(program: ExportedProgram) -> dict[str, Any]:
    """Of a tensor that a model has under several names only the first is read, and the others hold another tensor.

    Torch's second trace takes each name for an argument, and fails where one that is written to comes twice.

    Returns: the other names -> what they held.
    """
    places = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    first: dict[int, fx.Node] = {}
    shared: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        name = str(spec.target)
        table = program.state_dict if name in program.state_dict else program.constants
        if spec.kind.name not in ("PARAMETER", "BUFFER") or name not in table:
            continue
        place, value = places[spec.arg.name], table[name]
        if first.setdefault(id(value), place) is place:
            continue
        place.replace_all_uses_with(first[id(value)])
        assert isinstance(value, Tensor)
        shared[name], fresh = value, torch.empty_like(value)
        table[name] = nn.Parameter(fresh, value.requires_grad) if isinstance(value, nn.Parameter) else fresh
    return shared


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _other(name: str) -> str:
    """A name that a graph module can hold: `code` and `graph` are attributes of its own."""
    path, _, last = name.rpartition(".")
    if last != "graph" and not hasattr(fx.GraphModule, last):
        return name
    return f"{path}{'.' if path else ''}{OTHER}{last}"


def _rename(program: ExportedProgram, names: dict[str, str]) -> None:
    """Other names for parameters, buffers and constants."""
    signature = program.graph_signature
    for spec in [*signature.input_specs, *signature.output_specs]:
        spec.target = names.get(str(spec.target), spec.target)
    for table in (program.state_dict, program.constants):
        for name in [n for n in table if n in names]:
            table[names[name]] = table.pop(name)
