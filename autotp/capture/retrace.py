"""A program traced a second time, by torch's own functionalisation: for what `functionalise` does not rewrite."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
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
    _rename(program, others)
    made = program.run_decompositions({})
    _rename(made, {other: name for name, other in others.items()})
    return made


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _other(name: str) -> str:
    """A name that a graph module can hold: `code` and `graph` are attributes of its own."""
    path, _, last = name.rpartition(".")
    return f"{path}{'.' if path else ''}{OTHER}{last}" if hasattr(fx.GraphModule, last) or last == "graph" else name


def _rename(program: ExportedProgram, names: dict[str, str]) -> None:
    """Other names for parameters, buffers and constants."""
    signature = program.graph_signature
    for spec in [*signature.input_specs, *signature.output_specs]:
        spec.target = names.get(str(spec.target), spec.target)
    for held in (program.state_dict, program.constants):
        for name in [n for n in held if n in names]:
            held[names[name]] = held.pop(name)
