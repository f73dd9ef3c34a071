"""The sequence axis of the mesh: the program that one context-parallel rank runs on its part of each sequence.

As with the batch (`batch_program.py`), the captured program speaks of whole sequences. Planned over the cp ranks, with
inputs dealt along the sequence and weights Replicate, it becomes a program of parts, with the conversions that
operators between tokens need. That is an ordinary program again, which tensor parallelism plans as any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
from torch import fx

from autotp.cost import Cluster
from autotp.errors import CaptureError
from autotp.ir.graph import Capture, draws, shape_of, where
from autotp.ir.layouts import Layout
from autotp.ir.marks import BatchConversion, mark
from autotp.ir.op import Op
from autotp.ir.program import Planned
from autotp.passes.base import Changes, Pass
from autotp.passes.decompose.loss_sums import take_sums_apart
from autotp.passes.optimise.masks import causal
from autotp.text import listed

from .batch_program import deal, one_symbol
from .sequence_axis import SDPA, SequenceRules


@dataclass(frozen=True)
class SequenceAxis(Pass[Capture]):
    """The program of one cp rank in place of that of whole sequences, whose symbol then means a rank's length.

    Attributes:
        cp: number of ranks on the axis. tp: of those that each of them has, which split heads first.
        cluster: the machines that it is priced on; None for h100.
    """

    name: ClassVar[str] = "sequence-axis"
    cp: int = 1
    tp: int = 1
    cluster: Cluster | None = None

    def idle(self, program: Capture) -> str:
        """One rank has whole sequences."""
        return "cp=1" if self.cp == 1 else ""

    def run(self, program: Capture) -> Changes:
        """Plan the program over the cp ranks, and write one rank's.

        Raises:
            CaptureError: no symbolic sequence, one that cannot be dealt, or random numbers for what is not dealt.
        """
        dealt = deal_sequence(program, self.cp, self.tp, self.cluster)
        program.notes += dealt.notes
        return Changes(len(_conversions(program)), "conversions over cp")


@dataclass(frozen=True)
class Dealt:
    """Layouts over cp of what a call passes and gives, with the sizes of whole sequences.

    Attributes:
        inputs: those that come in parts. outputs: all tensors, in order. notes: of it, in words.
    """

    inputs: Mapping[str, Layout]
    outputs: tuple[Layout, ...]
    notes: list[str]


def own_copy(program: Capture) -> Capture:
    """A record of the program that may be changed while the other stays."""
    copied = replace(
        program, notes=[*program.notes], guards=[*program.guards], hints=dict(program.hints),
        symbols=dict(program.symbols), ranges=dict(program.ranges),
    )  # fmt: skip
    copied.own_graph()
    return copied


def deal_sequence(program: Capture, cp: int, tp: int, cluster: Cluster | None = None) -> Dealt:
    """Put the program of one cp rank in the place of that of whole sequences.

    Args:
        program: is changed. cp, tp: ranks of both axes. cluster: see `SequenceAxis`.

    Raises:
        CaptureError: see `SequenceAxis.run`.
    """
    sequence = _one_sequence(program)
    take_sums_apart(program)
    _causal_by_index(program)
    rules = SequenceRules.of(program, sequence, cp, tp)
    machines = Cluster.resolve(cluster)
    between = replace(machines, devices_per_node=max(machines.devices_per_node // tp, 1))  # neighbours are tp apart
    dealt = {leaf.name: rules.leaf(leaf, False, cp) for leaf in program.inputs if rules.sliced(leaf)}
    planned, goals = deal(program, rules, cp, between, "cp", tp)
    _refuse_draws(planned)
    even: sympy.Basic = sympy.Eq(sympy.Mod(sequence, 2), 0)
    program.guards.append(even)
    note = f"over cp each rank has two chunks of the sequence of {listed(dealt)}"
    return Dealt(dealt, goals, [note, *_notes(program)])


def _causal_by_index(program: Capture) -> None:
    """Attention says that it is causal where its mask says no more: then no rank makes a mask of its queries."""
    masks: dict[fx.Node, bool] = {}
    for node in [n for n in program.graph.nodes if n.target is SDPA]:
        args = Op.of(node).args
        mask = args["attn_mask"]
        if mask is None or shape_of(args["query"])[-2] != shape_of(args["key"])[-2]:
            continue
        if mask not in masks:
            masks[mask] = mask.op != "placeholder" and causal(mask)
        if masks[mask]:
            kwargs = {k: v for k, v in args.items() if k in ("scale", "enable_gqa")}
            node.args = args["query"], args["key"], args["value"], None, args["dropout_p"], True
            node.kwargs = kwargs
    program.graph.eliminate_dead_code()


def _refuse_draws(planned: Planned) -> None:
    """Random numbers are drawn for slices."""
    for node, op in planned.ops.items():
        if draws(node) and all(x.sharded_dim is None for x in planned.decisions[node].outs):
            raise CaptureError(
                f"{where(op.node)} draws random numbers for a value that every cp rank has whole, and each would draw "
                "others. Use cp=1, or a model without dropout there."
            )


def _one_sequence(program: Capture) -> sympy.Symbol:
    """The symbol of the sequence: the first input's second dimension. Sizes that are the same become one symbol."""
    if any(leaf.kind.carried for leaf in program.leaves):
        raise CaptureError(
            "with cp sequences are dealt, and what this call carries to the next, such as a cache, is not. Call it "
            "with use_cache=False, and decode with a module that is compiled without cp."
        )
    if program.conditions is not None:
        raise CaptureError(
            "this forward decides by the values of its inputs, which differ between parts of a sequence: the cp ranks "
            "would run different programs. Use cp=1, or rewrite the branch with torch.where."
        )
    seconds = [leaf for leaf in program.inputs if len(shape_of(leaf.node)) > 1]
    sequence = shape_of(seconds[0].node)[1] if seconds else None
    if not isinstance(sequence, sympy.Symbol):
        raise CaptureError(
            "with cp the second dimension of the first input is the sequence, of any length, and this model was "
            f"captured for one length of it ({sequence}; the plan's notes say why). Use cp=1."
        )
    sequence = one_symbol(program, seconds, 1)
    if program.hints[sequence] % 2:
        raise CaptureError(
            f"with cp a rank's part of a sequence is two chunks of one length, and the example's has "
            f"{program.hints[sequence]} tokens. Pad sequences to a multiple of 2 x cp."
        )
    for leaf in program.inputs:
        if sum(size == sequence for size in shape_of(leaf.node)) > 1:
            raise CaptureError(
                f"with cp the input {leaf.name!r} has the sequence in two dimensions, as a mask of pairs has, and a "
                "rank's part of it is not known. Leave it out: a model makes its mask from what is padding."
            )
    return sequence


def _conversions(program: Capture) -> list[tuple[fx.Node, BatchConversion]]:
    """List the conversions over cp; a program that dp has dealt has some of that axis too."""
    over = [(n, mark(n).batch) for n in program.graph.nodes]
    return [(n, b) for n, b in over if b is not None and b.axis == "cp"]


def _notes(program: Capture) -> list[str]:
    """List the values that change hands, for the plan's notes."""
    dealt = [(n, b.source.sharded_dim, b.target.sharded_dim) for n, b in _conversions(program)]
    gathered: list[Any] = [n.args[0] for n, a, b in dealt if a is not None and b is None]
    turned: list[Any] = [n.args[0] for n, a, b in dealt if a is not None and b is not None]
    lists = [("gathered", gathered), ("sent from tokens to another dimension or back, by all-to-all,", turned)]
    return [f"over cp {what} after: {listed(dict.fromkeys(map(_in_blocks, x)))}" for what, x in lists if x]


def _in_blocks(node: fx.Node) -> str:
    """An operator with its module, the same for all repeated blocks."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", where(node))
