"""Verification between passes: `verify` reads the marks and layouts that each stage has to write.

It runs after every pass and rewrite where `AUTOTP_VERIFY=1` is set, as in all tests, so a mark that a pass forgot is an
error that names the pass and the node. Otherwise it does not run: it takes some percent of planning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, fx

from autotp.comm import conversions
from autotp.errors import SchemaError
from autotp.ir.graph import Capture, resolve
from autotp.ir.marks import Mark, mark
from autotp.ir.program import Planned, Sharded
from autotp.text import BESIDE

ADVICE = {
    "no_grad": "Without it the planner would take a value that carries no gradient for one that does, or the reverse. "
    "Write it (`write(node, no_grad=...)`), or take it over from the node that this one stands for (`inherit`).",
    "batch": "Tensor parallelism would take the conversion over dp for an operator of the model.",
    "layout": "What reads the value must know which part of it a rank has.",
    "conversion": "The plan would not count it, and the simulation would run it as an operator of the model.",
    "axis": "`specialise` fills in rank and size of the axis that is written there.",
    "scope": "The module tree would run it in another module, or outside of its checkpointed region.",
    "flops": "It is remembered of another size, and would be priced with that.",
    "saved": "It is remembered of another size, and would be counted with that.",
}


class Fault(NamedTuple):
    """Fault of one field of one node's mark."""

    node: fx.Node
    field: str
    what: str


def enabled() -> bool:
    """Say whether programs are verified between passes."""
    return os.environ.get("AUTOTP_VERIFY", "0") not in ("", "0")


def verify(program: Capture | Sharded | fx.Graph, step: str, **marks: Any) -> None:
    """Check marks and layouts of a program, where `AUTOTP_VERIFY` asks for it.

    Args:
        program: a captured program, the program of all ranks, or one rank's graph.
        step: the pass or rewrite that has just run, for the message.
        marks: of a captured program `priced` (whether it may have been planned before), of all ranks' program
            `planned`, its decisions, of a rank's graph `before`, the nodes that it had before the step.

    Raises:
        SchemaError: a node lacks what its stage must have written, or says what cannot be; step, node and field are in
            the message.
    """
    if not enabled():
        return
    if isinstance(program, Capture):
        faults = captured(program, **marks)
    elif isinstance(program, Sharded):
        faults = sharded(program, **marks)
    else:
        faults = of_rank(program, **marks)
    for node, field, what in faults:
        raise SchemaError(
            f"after {step}: {node.format_node()}: its mark's {field!r} {what}. {ADVICE[field]} "
            "This is a fault of that step; please report it with the model."
        )


def captured(program: Capture, priced: bool = False) -> Iterator[Fault]:
    """Find the faults of a captured program, of the whole batch or of one data-parallel rank."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)]
    stated = any(mark(n).no_grad is not None for n in calls)  # from the first canonical form on
    for node in calls:
        node_mark = mark(node)
        if stated and node_mark.no_grad is None:
            yield Fault(node, "no_grad", "is not written")
        yield from _on_axis(node, node_mark, "dp")
        # A conversion over dp without its mark would be planned over tp as an operator of the model.
        if converts(node) != (node_mark.batch is not None):
            yield Fault(node, "batch", "is not written" if node_mark.batch is None else "stands on no conversion")
        for field in ("layout", "conversion"):
            if getattr(node_mark, field) is not None:
                yield Fault(node, field, "is left from another program")
        # A plan before this one priced the same calls, of the same sizes: with `priced` what it remembers holds.
        for field in ("flops", "saved"):
            if getattr(node_mark, field) is not None and not priced:
                yield Fault(node, field, "is left from another program")


def sharded(program: Sharded, planned: Planned) -> Iterator[Fault]:
    """Find the faults of the program of all ranks: of marks, and of values whose layouts are not those decided."""
    for node in program.graph.nodes:
        node_mark = mark(node)
        yield from _on_axis(node, node_mark, "tp")
        yield from _conversion(node, node_mark)
        if node not in program.origin:
            continue
        layout = program.layouts.get(node)
        if node_mark.layout is None or node_mark.layout != layout:
            yield Fault(node, "layout", f"is {node_mark.layout or 'not written'}, and the program has {layout}")
        elif node_mark.conversion is not None:
            source = program.layouts.get(node.args[0])  # type: ignore[call-overload]
            if node_mark.conversion != (source, layout):
                yield Fault(
                    node, "conversion", f"is {_conversion_text(node_mark)}, and it reads {source} and gives {layout}"
                )
        else:
            yield from _decided(node, program, planned)


def _decided(node: fx.Node, program: Sharded, planned: Planned) -> Iterator[Fault]:
    """Check that an operator's result, and the operands that its call reads directly, have the layouts decided."""
    maker, index = program.origin[node]
    decision = planned.decisions[maker]
    if program.layouts[node] != decision.outs[index]:
        yield Fault(node, "layout", f"is {program.layouts[node]}, decided is {decision.outs[index]}")
    if maker not in planned.ops:
        return
    slots = [resolve(slot) for slot in planned.ops[maker].slots]
    for operand in resolve(node)[0].all_input_nodes:
        if operand not in program.origin:
            continue
        layouts = {x for x, value in zip(decision.ins, slots, strict=True) if value == program.origin[operand]}
        if layouts and program.layouts[operand] not in layouts:
            text = " or ".join(map(str, layouts))
            yield Fault(
                operand, "layout", f"is {program.layouts[operand]}, and {maker.name} was decided to read {text}"
            )


def of_rank(graph: fx.Graph, before: Set[fx.Node] | None = None) -> Iterator[Fault]:
    """Find the faults of one rank's graph; with `before`, what an optimisation has put in says where it belongs."""
    for node in graph.nodes:
        node_mark = mark(node)
        yield from _on_axis(node, node_mark, "tp")
        yield from _conversion(node, node_mark)
        if _takes_rank(node.target) and not {"rank", "tp"} <= node.kwargs.keys():
            yield Fault(node, "axis", "is written, and the call has no rank")
        if node_mark.conversion is not None and node_mark.layout != node_mark.conversion[1]:
            yield Fault(node, "layout", f"is {node_mark.layout}, and the conversion is {_conversion_text(node_mark)}")
        fresh = before is not None and node not in before and node.op == "call_function"
        if fresh and node_mark.scope is None:
            yield Fault(node, "scope", "is not written")


def converts(node: fx.Node) -> bool:
    """Say whether this calls a conversion; the table may have grown since this file was imported."""
    return node.target in conversions.FUNCTIONS.values()


def _conversion(node: fx.Node, node_mark: Mark) -> Iterator[Fault]:
    """Check that calls of conversions over tp, and no others, are marked so, with their layouts and scope."""
    moves = converts(node) and node_mark.batch is None
    if moves != (node_mark.conversion is not None):
        yield Fault(node, "conversion", "is not written" if moves else "stands on no conversion")
    elif node_mark.conversion is not None:
        specs: Any = node.args[1:3]
        kinds = tuple(x.mark for x in node_mark.conversion)
        if kinds != tuple(spec.mark for spec in specs):
            yield Fault(node, "conversion", f"is {_conversion_text(node_mark)}, and the call has {specs}")
        if node_mark.scope is None:
            yield Fault(node, "scope", "is not written")


def _on_axis(node: fx.Node, node_mark: Mark, axis: str) -> Iterator[Fault]:
    """Check that calls that take their rank, and no others, name its axis: that of the conversion, or this one."""
    axis = node_mark.batch.axis if node_mark.batch is not None else axis
    expected_axis = axis if node.op == "call_function" and _takes_rank(node.target) else None
    # The program may have been planned over the axes beside tp before.
    if node_mark.axis not in (expected_axis, *(BESIDE if expected_axis else ())):
        yield Fault(node, "axis", f"is {node_mark.axis or 'not written'}, should be {expected_axis or 'empty'}")


def _conversion_text(node_mark: Mark) -> str:
    assert node_mark.conversion is not None
    source, target = node_mark.conversion
    return f"{source} -> {target}"


@cache
def _takes_rank(target: Any) -> bool:
    """Say whether a function has an argument for its rank."""
    code = getattr(target, "__code__", None)
    return code is not None and "rank" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
