"""What a draft export took for granted about the values of the inputs, as a small graph that every call evaluates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

from autotp import compat
from autotp.errors import CaptureError
from autotp.ir.carried import states_of
from autotp.ir.copying import copy_graph
from autotp.ir.op import aten
from autotp.passes.canonicalise.functionalise import memory, mutates, written_operand

from .messages import line_of

GUESSED = ("MISSING_FAKE_KERNEL", "MISMATCHED_FAKE_KERNEL")
GIVEN = ("USER_INPUT", "CONSTANT_TENSOR")  # kinds of placeholders that a condition may read


@dataclass(frozen=True)
class Conditions:
    """What must hold of a call's inputs for a captured program to be the model.

    Attributes:
        texts: each condition in words, in the order of the outputs of `module`.
        module: takes the flat inputs of a call, gives a truth value for each condition.
    """

    texts: tuple[str, ...]
    module: fx.GraphModule = field(repr=False)

    @classmethod
    def of(cls, program: ExportedProgram, symbolic: bool) -> Conditions | None:
        """Those of a draft export that depend on the inputs; None where there are none.

        Raises:
            CaptureError: an operator was guessed at; or something was decided by weights, by random numbers or (with
                `symbolic` sizes) by sizes alone.
        """
        guessed = [f for f in compat.draft_failures(program) if f.failure_type.name in GUESSED]
        if guessed:
            raise CaptureError(f"the operator {guessed[0].data['op']} has no fake kernel, or a wrong one")
        decided = compat.decided_by_values(program)
        checks = [n for n in program.graph.nodes if n.target is aten._assert_scalar.default]
        check_of = {text: n for n in checks for text in decided if f"expression {text} on node" in str(n.args[1])}
        lost = decided - check_of.keys()
        if lost or (compat.draft_failures(program) and not decided):
            raise CaptureError(f"the condition {min(lost, default='')} cannot be evaluated from the inputs")
        of_inputs = {text: n for text, n in check_of.items() if _reads_inputs(program, text, n, symbolic)}
        return cls(tuple(of_inputs), _extract(program, list(of_inputs.values()))) if of_inputs else None

    def broken(self, values: Sequence[Any]) -> str | None:
        """The first condition that these flat inputs do not meet."""
        copies: list[Any] = []
        for v in values:
            copies.append(v.detach().clone() if isinstance(v, Tensor) else v)
        with torch.no_grad():
            flags = self.module(*copies)
        return next((text for text, holds in zip(self.texts, flags, strict=True) if not holds), None)


def _reads_inputs(program: ExportedProgram, text: str, check: fx.Node, symbolic: bool) -> bool:
    """Whether a condition depends on the inputs of a call; refused where it depends on anything else that may vary."""
    operands = _operands_of(check)
    lines = [line for n in [*check.all_input_nodes, *operands] if (line := line_of(n))]
    what = f"the branch that needs {text}" + (f" ({lines[0]})" if lines else "")
    kinds = {n: _kind(program, n) for n in operands if n.op == "placeholder"}
    other = [n.name for n, kind in kinds.items() if kind not in GIVEN]
    if other:
        raise CaptureError(f"{what} depends on weights ({other[0]}), not only on the inputs")
    if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in operands):
        raise CaptureError(f"{what} depends on random numbers")
    inputs = [n for n, kind in kinds.items() if kind == "USER_INPUT"]
    readers = [(n, u) for n in inputs for u in n.users if u in operands and u.target is not aten.sym_size.int]
    states = state_places(program)
    if state := next((n.name for n, _ in readers if n.name in states and n.meta["val"].ndim), ""):
        raise CaptureError(f"{what} depends on the values of the state {state}, of which a rank may have a part only")
    if inputs and not readers and symbolic:
        raise CaptureError(f"{what} depends on sizes, which are symbolic")
    return bool(inputs)


def state_places(program: ExportedProgram) -> dict[str, int]:
    """Placeholders of states -> their place among the input tensors."""
    inputs = [s.arg for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    states = {inputs[i].name for i in states_of(program.call_spec.in_spec)}  # type: ignore[arg-type]
    tensors = [x.name for x in inputs if isinstance(x, TensorArgument)]
    return {name: i for i, name in enumerate(tensors) if name in states}


def _kind(program: ExportedProgram, node: fx.Node) -> str:
    return next(s.kind.name for s in program.graph_signature.input_specs if getattr(s.arg, "name", "") == node.name)


def _operands_of(check: fx.Node) -> set[fx.Node]:
    """All that a check is computed from, with what was written before to the memory that it reads."""
    places_of, order = memory(check.graph), {n: i for i, n in enumerate(check.graph.nodes)}
    writes = {n: places_of[written_operand(n) or n] for n in order if mutates(n) and order[n] < order[check]}
    operands: set[fx.Node] = set()
    todo = list(check.all_input_nodes)
    while todo:
        node = todo.pop()
        if node not in operands:
            operands.add(node)
            todo += [*node.all_input_nodes, *(w for w, places in writes.items() if places & places_of[node])]
    return operands


def _extract(program: ExportedProgram, checks: list[fx.Node]) -> fx.GraphModule:
    """The checks alone, as a module that takes the program's inputs."""
    operands: set[fx.Node] = set().union(*(_operands_of(c) for c in checks))
    names = {getattr(s.arg, "name", ""): s.target for s in program.graph_signature.input_specs}
    graph, env, root = fx.Graph(), {}, {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and _kind(program, node) == "USER_INPUT":
            env[node] = graph.placeholder(node.name)
        elif node.op == "placeholder" and node in operands:
            root[node.name] = program.constants[str(names[node.name])]
            env[node] = graph.get_attr(node.name)
        elif node in operands and node.op == "get_attr":
            root[str(node.target)] = getattr(program.graph_module, str(node.target))
    copy_graph([n for n in program.graph.nodes if n in operands], env, graph)
    graph.output(tuple(env[c.args[0]] for c in checks))  # type: ignore[index]
    return fx.GraphModule(root, graph)
