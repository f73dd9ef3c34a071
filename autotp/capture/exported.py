"""What torch.export gave becomes functional and whole: the passes of an exported program, and their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx, nn
from torch.export import ExportedProgram

from autotp import compat
from autotp.errors import CaptureError
from autotp.passes.base import Changes, Pass
from autotp.passes.canonicalise.functionalise import functionalise, memory, mutates, regions

from .conditions import Conditions, state_places
from .functions import refuse_seen_writes
from .messages import line_of
from .refusals import refuse_higher_order
from .repeated_blocks import Repeats, expand, refuse_writes
from .retrace import traced_again


@dataclass
class Exported:
    """What torch.export gave for an attempt, on its way to a capture.

    Attributes:
        program: torch's own. bare: the skeleton. repeats: blocks that were traced once, where some were.
        draft: of a draft export whether sizes are symbolic; empty otherwise.
        conditions: what must hold of the values of the inputs.
        writes: further outputs -> the buffer's name, or the place among the input tensors of the state, that takes
            them; the program's own signature lacks these.
    """

    program: ExportedProgram
    bare: nn.Module
    repeats: Repeats | None = None
    draft: tuple[bool, ...] = ()
    conditions: Conditions | None = None
    writes: dict[int, str | int] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.program.graph


@dataclass(frozen=True)
class RetraceVmap(Pass[Exported]):
    """What `torch.vmap` does as steps becomes plain operators, by a second trace."""

    name: ClassVar[str] = "retrace-vmap"

    def idle(self, program: Exported) -> str:
        """Only where it is used."""
        return "" if compat.vmapped(program.graph) else "no torch.vmap"

    def run(self, program: Exported) -> Changes:
        program.program = traced_again(program.program)
        return Changes(1, "program is traced again")


@dataclass(frozen=True)
class CheckExport(Pass[Exported]):
    """Nothing is changed: what the passes after it would lose is refused, and what was decided by values is kept."""

    name: ClassVar[str] = "check-export"

    def run(self, program: Exported) -> Changes:
        refuse_higher_order(program.graph)
        for graph in (program.graph, *regions(program.graph)):
            refuse_seen_writes(graph)
        _refuse_writes_to_parameters(program.program)
        if program.repeats:
            refuse_writes(program.graph)
        if program.draft:
            program.conditions = Conditions.of(program.program, *program.draft)
        return Changes(0, "nothing that a graph cannot say")


@dataclass(frozen=True)
class Functionalise(Pass[Exported]):
    """In-place operators become functional ones: by rewriting each, otherwise by a second trace."""

    name: ClassVar[str] = "functionalise"

    def run(self, program: Exported) -> Changes:
        graphs = [program.graph, *regions(program.graph)]
        count = sum(mutates(n) for graph in graphs for n in graph.nodes)
        specs = program.program.graph_signature.input_specs
        takers: dict[str, str | int] = {s.arg.name: str(s.target) for s in specs if s.kind.name == "BUFFER"}
        takers |= state_places(program.program)
        outputs = functionalise(program.graph, takers.keys())
        if outputs is None:
            program.program = traced_again(program.program)
            return Changes(count, "operators in place, in a second trace")
        program.writes = {i: takers[name] for i, name in outputs.items()}
        return Changes(count, "operators in place")


@dataclass(frozen=True)
class RepeatBlocks(Pass[Exported]):
    """Calls of blocks that were traced once become copies of the first one's nodes."""

    name: ClassVar[str] = "repeat-blocks"

    def idle(self, program: Exported) -> str:
        """Only where blocks were."""
        return "" if program.repeats else "every block was traced"

    def run(self, program: Exported) -> Changes:
        repeats = program.repeats
        assert repeats is not None
        return Changes(expand(program.graph, repeats, *_holders(program)), "calls of blocks are copies of another's")


def _holders(exported: Exported) -> tuple[dict[int, fx.Node], set[fx.Node]]:
    """Id of a parameter or buffer -> its placeholder; and the placeholders of constants."""
    bare, program = exported.bare, exported.program
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    ids = {n: id(t) for n, t in [*bare.named_parameters(), *bare.named_buffers()]}
    specs = [(getattr(s.arg, "name", ""), s.target, s.kind.name) for s in program.graph_signature.input_specs]
    holders = {ids[target]: nodes[name] for name, target, _ in specs if target in ids}
    return holders, {nodes[name] for name, _, kind in specs if kind == "CONSTANT_TENSOR"}


def _refuse_writes_to_parameters(program: ExportedProgram) -> None:
    names = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind.name == "PARAMETER"}
    places_of = memory(program.graph)
    owner_of = {place: names[n.name] for n, places in places_of.items() if n.name in names for place in places}
    for graph in (program.graph, *regions(program.graph)):
        for node, places in memory(graph).items():
            if mutates(node) and (overlap := places & owner_of.keys()):
                raise CaptureError(f"the forward writes to the parameter {owner_of[min(overlap)]} ({line_of(node)})")


EXPORTED: tuple[Pass[Exported], ...] = (RetraceVmap(), CheckExport(), Functionalise(), RepeatBlocks())
