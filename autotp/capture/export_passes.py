"""Passes of an exported program, in order, which make it functional and whole."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from autotp import compat
from autotp.errors import CaptureError
from autotp.ir.carried import states_of
from autotp.ir.graph import Mutations, copy_graph, reached
from autotp.ir.op import aten
from autotp.passes.base import Changes, Pass
from autotp.passes.canonicalise.functionalise import functionalise, memory, mutates, regions, written_operand
from autotp.passes.canonicalise.no_grad_regions import detach_regions

from .autograd_functions import refuse_seen_writes
from .capture_errors import line_of, refuse_higher_order
from .copies import tensors_of
from .repeated_blocks import Repeats, expand, refuse_writes


@dataclass
class Exported:
    """An attempt's exported program, on its way to a capture.

    Attributes:
        program: torch's own. bare: the skeleton. repeats: blocks that were traced once, where some were.
        draft: of a draft export whether sizes are symbolic; empty otherwise.
        conditions: on the values of the inputs.
        writes: further outputs -> the buffer's name, or the place among the input tensors of the state, that takes
            them; the program's own signature lacks these.
    """

    program: ExportedProgram
    bare: nn.Module
    repeats: Repeats | None = None
    draft: tuple[bool, ...] = ()
    conditions: Conditions | None = None
    writes: Mutations = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.program.graph


class RetraceVmap(Pass[Exported]):
    """Pass that makes steps of `torch.vmap` plain operators, by a second trace."""

    name = "retrace-vmap"

    def idle(self, program: Exported) -> str:
        """Skip the pass where it is not used."""
        return "" if compat.vmapped(program.graph) else "no torch.vmap"

    def run(self, program: Exported) -> Changes:
        program.program = traced_again(program.program)
        return Changes(1, "program is traced again")


class CheckExport(Pass[Exported]):
    """Pass of checks, which change nothing: it refuses parts that later passes would lose, and keeps decisions on
    values as conditions."""

    name = "check-export"

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


class Functionalise(Pass[Exported]):
    """Pass that makes in-place operators functional: by rewriting each, otherwise by a second trace."""

    name = "functionalise"

    def run(self, program: Exported) -> Changes:
        graphs = [program.graph, *regions(program.graph)]
        count = sum(mutates(n) for graph in graphs for n in graph.nodes)
        takers: dict[str, Any] = {**targets(program.program, "BUFFER"), **state_places(program.program)}
        outputs = functionalise(program.graph, takers.keys())
        if outputs is None:
            program.program = traced_again(program.program)
            return Changes(count, "operators in place, in a second trace")
        program.writes = {i: takers[name] for i, name in outputs.items()}
        return Changes(count, "operators in place")


class RepeatBlocks(Pass[Exported]):
    """Pass that replaces calls of blocks that were traced once by copies of the first one's nodes."""

    name = "repeat-blocks"

    def idle(self, program: Exported) -> str:
        """Skip the pass where every block was traced."""
        return "" if program.repeats else "every block was traced"

    def run(self, program: Exported) -> Changes:
        repeats = program.repeats
        assert repeats is not None
        return Changes(expand(program.graph, repeats, *_holders(program)), "calls of blocks are copies of another's")


def _holders(exported: Exported) -> tuple[dict[int, fx.Node], set[fx.Node]]:
    """Map the id of each parameter or buffer to its placeholder; and collect the placeholders of constants."""
    bare, program = exported.bare, exported.program
    nodes = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    ids = {n: id(t) for n, t in tensors_of(bare).items()}
    holders = {ids[target]: nodes[name] for name, target in targets(program).items() if target in ids}
    return holders, {nodes[name] for name in targets(program, "CONSTANT_TENSOR")}


def _refuse_writes_to_parameters(program: ExportedProgram) -> None:
    names = targets(program, "PARAMETER")
    places_of = memory(program.graph)
    owner_of = {place: names[n.name] for n, places in places_of.items() if n.name in names for place in places}
    for graph in (program.graph, *regions(program.graph)):
        for node, places in memory(graph).items():
            if mutates(node) and (overlap := places & owner_of.keys()):
                raise CaptureError(f"the forward writes to the parameter {owner_of[min(overlap)]} ({line_of(node)})")


SLICE = "slice("


def name_slices(graph: fx.Graph, model: nn.Module) -> None:
    """Give modules that were called in a slice of a list their own paths.

    Where a model has one module in two places, torch makes up a path for the slice, at which there is no module.
    """
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(SLICE in path for path, _ in stack.values()):
            modules = [(key, path, kind) for key, (path, kind) in stack.items() if path[-1:] != ")"]
            node.meta["nn_module_stack"] = {key: (path_in_lists(model, path), kind) for key, path, kind in modules}


def path_in_lists(root: nn.Module, path: str) -> str:
    """Return the path of a module without slices, such as `layers.2` of `layers.slice(1, None, None).1`."""
    module, steps, names = root, [], list[str]()
    for step in path.split("."):
        names = names or list(module._modules)
        if step.startswith(SLICE):
            names = names[slice(*literal_eval(step.removeprefix("slice")))]
            continue
        # A slice of a ModuleList counts again; one of a Sequential keeps the names.
        steps.append(names[int(step)] if isinstance(module, nn.ModuleList) else step)
        module, names = module.get_submodule(steps[-1]), []
    return ".".join(steps)


EXPORTED: tuple[Pass[Exported], ...] = (RetraceVmap(), CheckExport(), Functionalise(), RepeatBlocks())


# ---- conditions on values --------------------------------------------------------------------------------------------

# Assumptions of a draft export about the values of the inputs, as a small graph that every call evaluates.

GUESSED = ("MISSING_FAKE_KERNEL", "MISMATCHED_FAKE_KERNEL")
INPUT = "USER_INPUT"
GIVEN = (INPUT, "CONSTANT_TENSOR")  # kinds of placeholders that a condition may read


@dataclass(frozen=True)
class Conditions:
    """Conditions on a call's inputs under which a captured program is the model.

    Attributes:
        texts: each condition in words, in the order of the outputs of `module`.
        module: takes the flat inputs of a call, gives a truth value for each condition.
    """

    texts: tuple[str, ...]
    module: fx.GraphModule = field(repr=False)

    @classmethod
    def of(cls, program: ExportedProgram, symbolic: bool) -> Conditions | None:
        """Collect those of a draft export that depend on the inputs; None where there are none.

        Raises:
            CaptureError: an operator was guessed at; or something was decided by weights, by random numbers or (with
                `symbolic` sizes) by sizes alone.
        """
        # A guessed shape would be planned for as if it were known.
        guessed = [f for f in compat.draft_failures(program) if f.failure_type.name in GUESSED]
        if guessed:
            raise CaptureError(f"the operator {guessed[0].data['op']} has no fake kernel, or a wrong one")
        # The graph asserts what was decided: each condition is found in the text of its assertion.
        decided = compat.decided_by_values(program)
        checks = [n for n in program.graph.nodes if n.target is aten._assert_scalar.default]
        check_of = {text: n for n in checks for text in decided if f"expression {text} on node" in str(n.args[1])}
        # One without an assertion could not be asked of a later call, which would run the wrong branch.
        lost = decided - check_of.keys()
        if lost or (compat.draft_failures(program) and not decided):
            raise CaptureError(f"the condition {min(lost, default='')} cannot be evaluated from the inputs")
        of_inputs = {text: n for text, n in check_of.items() if _reads_inputs(program, text, n, symbolic)}
        return cls(tuple(of_inputs), _extract(program, list(of_inputs.values()))) if of_inputs else None

    def broken(self, values: Sequence[Any]) -> str | None:
        """Return the first condition that these flat inputs do not meet."""
        copies: list[Any] = []
        for v in values:
            copies.append(v.detach().clone() if isinstance(v, Tensor) else v)
        with torch.no_grad():
            flags = self.module(*copies)
        return next((text for text, holds in zip(self.texts, flags, strict=True) if not holds), None)


def _reads_inputs(program: ExportedProgram, text: str, check: fx.Node, symbolic: bool) -> bool:
    """Say whether a condition depends on the inputs of a call; refused where it depends on anything else that may
    vary."""
    operands = _operands_of(check)
    # The line of the branch itself where torch noted it, otherwise of what it is computed from.
    lines = [line for n in [*check.all_input_nodes, *operands] if (line := line_of(n))]
    what = f"the branch that needs {text}" + (f" ({lines[0]})" if lines else "")
    read, allowed = [n for n in operands if n.op == "placeholder"], targets(program, *GIVEN)
    # Weights change by training, and a rank has a part of them: no call could ask again what was decided.
    other = [n.name for n in read if n.name not in allowed]
    if other:
        raise CaptureError(f"{what} depends on weights ({other[0]}), not only on the inputs")
    # Drawn again, they would be others than those that the draft decided by.
    if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in operands):
        raise CaptureError(f"{what} depends on random numbers")
    inputs = [n for n in read if n.name in targets(program, INPUT)]
    # Sizes are read off inputs too: only what reads values counts as a condition on values.
    readers = [(n, u) for n in inputs for u in n.users if u in operands and u.target is not aten.sym_size.int]
    # A state of no dimensions, such as a count, is whole on every rank; of a cache a rank has its heads.
    states = state_places(program)
    if state := next((n.name for n, _ in readers if n.name in states and n.meta["val"].ndim), ""):
        raise CaptureError(f"{what} depends on the values of the state {state}, of which a rank may have a part only")
    # With fixed sizes such a branch is settled; with symbolic ones the program would have the example's.
    if inputs and not readers and symbolic:
        raise CaptureError(f"{what} depends on sizes, which are symbolic")
    return bool(inputs)


def targets(program: ExportedProgram, *kinds: str) -> dict[str, Any]:
    """Map placeholders of these kinds, or of all, by name to torch's names of their values."""
    specs = program.graph_signature.input_specs
    return {getattr(s.arg, "name", ""): s.target for s in specs if not kinds or s.kind.name in kinds}


def state_places(program: ExportedProgram) -> dict[str, int]:
    """Map placeholders of states to their place among the input tensors."""
    inputs = [s.arg for s in program.graph_signature.input_specs if s.kind.name == INPUT]
    states = {inputs[i].name for i in states_of(program.call_spec.in_spec)}  # type: ignore[arg-type]
    tensors = [x.name for x in inputs if isinstance(x, TensorArgument)]
    return {name: i for i, name in enumerate(tensors) if name in states}


def _operands_of(check: fx.Node) -> set[fx.Node]:
    """Collect all operands of a check, with earlier writes to the memory that it reads."""
    places_of = memory(check.graph)
    writes = {n: places_of[written_operand(n) or n] for n in places_of if mutates(n) and n < check}

    def step(node: fx.Node) -> list[fx.Node]:
        return [*node.all_input_nodes, *(w for w, places in writes.items() if places & places_of[node])]

    return set(reached(check.all_input_nodes, step))


def _extract(program: ExportedProgram, checks: list[fx.Node]) -> fx.GraphModule:
    """Extract the checks alone, as a module that takes the program's inputs."""
    operands: set[fx.Node] = set().union(*(_operands_of(c) for c in checks))
    names, inputs = targets(program), targets(program, INPUT)
    graph, env, root = fx.Graph(), {}, {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            env[node] = graph.placeholder(node.name)
        elif node.op == "placeholder" and node in operands:
            root[node.name] = program.constants[str(names[node.name])]
            env[node] = graph.get_attr(node.name)
        elif node in operands and node.op == "get_attr":
            root[str(node.target)] = getattr(program.graph_module, str(node.target))
    copy_graph([n for n in program.graph.nodes if n in operands], env, graph)
    graph.output(tuple(env[c.args[0]] for c in checks))  # type: ignore[index]
    return fx.GraphModule(root, graph)


# ---- a second trace --------------------------------------------------------------------------------------------------

# A program traced a second time, by torch's own functionalisation: for what `functionalise` does not rewrite.

OTHER = "autotp_"  # prefix of a name that a graph module has for itself


def traced_again(program: ExportedProgram) -> ExportedProgram:
    """Make the program without in-place operators; regions under no_grad lose their frame, and not their meaning.

    Raises:
        CaptureError: something without a gradient is written into a value that carries one.
    """
    specs = program.graph_signature.input_specs
    # A region under no_grad loses its frame below; what detaches it must then stand in the graph, behind every value
    # that has a gradient.
    leaves = {*targets(program, "PARAMETER")}
    leaves |= {
        n.name for n in program.graph.find_nodes(op="placeholder") if getattr(n.meta.get("val"), "requires_grad", False)
    }
    write = detach_regions(program.graph, leaves)
    if write is not None:
        raise CaptureError(f"a write that has no gradient changes a value that has one ({line_of(write)})")
    # The second trace runs the modules' code, which does not yet have what was put into their graphs.
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    # The trace holds every tensor as an attribute of a graph module, where a buffer called `graph` cannot be.
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
    """Redirect reads to the first of a tensor's several names, and have the others hold another tensor.

    Torch's second trace takes each name for an argument, and fails where one that is written to comes twice.

    Returns: the other names -> the tensors that they held.
    """
    places = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
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


def _other(name: str) -> str:
    """Return a name that a graph module can hold: `code` and `graph` are attributes of its own."""
    path, _, last = name.rpartition(".")
    if last != "graph" and not hasattr(fx.GraphModule, last):
        return name
    return f"{path}{'.' if path else ''}{OTHER}{last}"


def _rename(program: ExportedProgram, names: dict[str, str]) -> None:
    """Rename parameters, buffers and constants."""
    signature = program.graph_signature
    for spec in [*signature.input_specs, *signature.output_specs]:
        spec.target = names.get(str(spec.target), spec.target)
    for table in (program.state_dict, program.constants):
        for name in [n for n in table if n in names]:
            table[names[name]] = table.pop(name)
