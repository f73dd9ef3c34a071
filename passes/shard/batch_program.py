"""The batch axis of the mesh: the program that one data-parallel rank runs on its slice of the batch.

The captured program speaks of the whole batch. Planned over the dp ranks by the rules and the solver that tp has, with
inputs Shard(0) and weights Replicate, it becomes a program on local batches with the conversions that the dp ranks
need, such as the reduction of a mean loss. That is an ordinary program again, and tensor parallelism plans it as any
other: layouts are per mesh axis, one axis after the other. What a gradient of a weight lacks, the sum over the dp
ranks, is no operator of the program: it comes with the backward (`autotp.runtime.data_parallel`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, cast

import sympy
import torch
from torch import Tensor, fx

from autotp import compat
from autotp.cost import Cluster, size_hint
from autotp.errors import CaptureError
from autotp.inputs import Inputs
from autotp.ir.graph import BUFFER, TABLE, Capture, Leaf, outputs_of, resolve, shape_of, where
from autotp.ir.layouts import Layout, Size
from autotp.ir.marks import KEY, Axis, BatchConversion, Mark, mark
from autotp.ir.op import expression, sizes
from autotp.ir.program import Planned
from autotp.ir.sizes import substitute
from autotp.passes.base import Changes, Pass
from autotp.passes.decompose.loss_sums import take_sums_apart
from autotp.rules.local import ARITHMETIC
from autotp.text import listed

from .batch_axis import BatchRules, BatchWriter
from .decide import decide
from .planner import Builder
from .rewrite import Rewriter

AXIS: Axis = "dp"


def two_examples(inputs: Inputs, dp: int) -> Inputs:
    """The inputs, their one example twice where they have only one: that would be captured as no batch at all."""
    leaves = [x for x in compat.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(x, Tensor) and x.ndim]
    if dp == 1 or not leaves or leaves[0].shape[0] != 1:
        return inputs

    def repeat(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[0] != 1:
            return x
        return torch.cat([x.detach()] * 2).requires_grad_(x.requires_grad)

    args, kwargs = compat.tree_map(repeat, (inputs.args, dict(inputs.kwargs)))
    return Inputs(*args, **kwargs)


@dataclass(frozen=True)
class BatchAxis(Pass[Capture]):
    """The program of one dp rank in place of the whole batch's; its batch symbols then mean the local batch.

    Attributes:
        dp: number of ranks on the axis.
    """

    name: ClassVar[str] = "batch-axis"
    dp: int = 1

    def idle(self, program: Capture) -> str:
        """One rank has the whole batch."""
        return "dp=1" if self.dp == 1 else ""

    def run(self, program: Capture) -> Changes:
        """Plan the program over the dp ranks, and write one rank's.

        Raises:
            CaptureError: the capture has no symbolic batch.
        """
        rules = BatchRules(_one_batch(program))
        take_sums_apart(program)
        deal(program, rules, self.dp, Cluster.resolve(None))
        over = [(n, mark(n).batch) for n in program.graph.nodes]
        converted = [(n, conversion) for n, conversion in over if conversion is not None]
        gathered = [n.args[0] for n, conversion in converted if conversion.source.sharded_dim is not None]
        if gathered:
            places = listed(where(n) for n in gathered)
            program.notes.append(f"over dp the whole batch is gathered after: {places}. What reads it mixes examples")
        return Changes(len(converted), "conversions over dp")


def deal(
    program: Capture, rules: BatchRules, ranks: int, cluster: Cluster, axis: Axis = AXIS, inner: int = 1
) -> tuple[Planned, tuple[Layout, ...]]:
    """Plan a program over an axis beside tp, and put one rank's in its place.

    Args:
        program: of whole inputs; is changed. rules: of the axis; `batch` is the symbol of what is dealt.
        ranks: of the axis, on machines `cluster`. axis: its name. inner: see `BatchConversion`.

    Returns:
        The decisions, and how outputs lie over the axis, with whole sizes.
    """
    builder = Builder(program, ranks, cluster, axis=rules)
    planned, goals = decide(builder), builder.goals()
    layouts = dict(zip(map(resolve, outputs_of(program)), goals, strict=True))
    sharded = Rewriter(planned, builder.prices.convert, BatchWriter(rules.batch, ranks, layouts)).run()
    Localised(program, sharded.graph, ranks, rules.batch, axis, inner).run()
    return planned, goals


def _one_batch(program: Capture) -> sympy.Symbol:
    """The symbol of the batch: the first input's first dimension. Sizes that are the same then become one symbol."""
    firsts = [leaf for leaf in program.inputs if shape_of(leaf.node)]
    batch = shape_of(firsts[0].node)[0] if firsts else None
    if not isinstance(batch, sympy.Symbol):
        raise CaptureError(
            "with dp the first dimension of the first input is the batch, of any size, and this model was captured for "
            f"one size of it ({batch}; the plan's notes say why). Use dp=1, and a data parallelism around the module."
        )
    for leaf in firsts[1:]:
        batch, other = cast(sympy.Symbol, shape_of(firsts[0].node)[0]), shape_of(leaf.node)[0]
        if isinstance(other, int) and other == program.hints[batch]:
            raise CaptureError(
                f"with dp the batch may have any size, and this model was captured for {other} of the input "
                f"{leaf.name!r} alone. Use dp=1 and a data parallelism around the module; or where that is not the "
                "batch's dimension, example inputs with another batch size."
            )
    return one_symbol(program, firsts, 0)


def one_symbol(program: Capture, leaves: Sequence[Leaf], dim: int) -> sympy.Symbol:
    """Sizes of this dimension that are the same become one symbol, that of the first; and what guards say is equal.

    Args:
        program: is changed. leaves: inputs with that dimension, the first of which has a symbol there.
    """
    for leaf in leaves[1:]:
        own, other = cast(sympy.Symbol, shape_of(leaves[0].node)[dim]), shape_of(leaf.node)[dim]
        if other != own and isinstance(other, sympy.Symbol) and program.hints[other] == program.hints[own]:
            _unify(program, other, own)
    while (pair := next(_equal_symbols(program), None)) is not None:
        _unify(program, *pair)
    return cast(sympy.Symbol, shape_of(leaves[0].node)[dim])


def _equal_symbols(program: Capture) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Symbols that a guard says are equal, such as Eq(batch * length, batch * length of the labels)."""
    for guard in program.guards:
        if isinstance(guard, sympy.Eq):
            sides: Any = guard
            above, below = sympy.cancel(sides.lhs / sides.rhs).as_numer_denom()
            if {above, below} <= program.symbols.keys():
                yield below, above


def _unify(program: Capture, one: sympy.Symbol, other: sympy.Symbol) -> None:
    """Two symbols of equal sizes become one of them, in all values of the program."""
    sides = [node.meta["val"].shape[d] for node, d in (program.symbols[one], program.symbols[other])]
    torch._check(sides[0] == sides[1])
    survivor: Any = expression(sides[0])
    duplicate = other if survivor == one else one
    program.symbols.pop(duplicate)
    program.hints.pop(duplicate)
    guards = [g.subs(duplicate, survivor) for g in program.guards]
    program.guards[:] = [g for g in guards if g != sympy.true]


def _strided(val: Tensor, shape: list[Any]) -> Tensor:
    """A fake tensor of this shape that lies in memory as `val` does: so it is known what copies it, and keeps that.

    Args:
        val: expanded dimensions have stride 0. shape: of as many dimensions.
    """
    strides = [size_hint(n) for n in val.stride()]
    order = sorted(range(val.ndim), key=lambda d: -strides[d])
    sizes = []
    for d in order:
        sizes.append(shape[d] if strides[d] else 1)  # an expanded dimension has stride 0, and one element in memory
    empty = val.new_empty(sizes)
    return empty.permute([order.index(d) for d in range(val.ndim)]).expand(shape)


class Localised:
    """Gives the nodes of a dp rank's graph their local values, and puts it in the place of the whole batch's.

    Args:
        program: of whole inputs. graph: of one rank, as it was written. dp: ranks.
        batch: the symbol of what is dealt. axis: its name. inner: see `BatchConversion`.
    """

    def __init__(
        self, program: Capture, graph: fx.Graph, dp: int, batch: sympy.Symbol, axis: Axis = AXIS, inner: int = 1
    ) -> None:
        self.program, self.graph, self.dp, self.batch, self.inner = program, graph, dp, batch, inner
        self.axis: Axis = axis
        self.whole: Mapping[Any, int] = {batch: dp * batch}  # type: ignore[dict-item]
        self.symints = {s: node.meta["val"].shape[d] for s, (node, d) in program.symbols.items()}

    def run(self) -> None:
        for node in self.graph.nodes:
            self._value(node)
        program = self.program
        before = program.graph.find_nodes(op="placeholder")
        env = dict(zip(before, self.graph.find_nodes(op="placeholder"), strict=True))
        low, high = program.ranges.get(self.batch, (1, 2**62))
        program.graph = self.graph
        leaves = []
        for leaf in program.leaves:
            kind = BUFFER if leaf.kind is TABLE else leaf.kind
            leaves.append(replace(leaf, node=env[leaf.node], kind=kind))
        program.leaves = leaves
        program.symbols = {s: (env[node], d) for s, (node, d) in program.symbols.items()}
        program.ranges = {**program.ranges, self.batch: (-(-low // self.dp), high // self.dp)}
        program.guards = [substitute(g, self.whole) for g in program.guards]

    def _value(self, node: fx.Node) -> None:
        """The mark and the local value of one node, in the place of those of the whole batch."""
        own = mark(node)
        layout = own.layout
        batch, axis = own.batch, own.axis
        # The layouts over dp are done with: what is left of them is that a call converts over dp, an operator for tp.
        if own.conversion is not None:
            batch = BatchConversion(*own.conversion, self.dp, self.axis, self.inner)
        if axis == "tp":  # as planner and rewriter say for every axis
            axis = self.axis
        # A new mark, without layout, flops and saved bytes: the tp plan would take those of the whole batch for its
        # own.
        node.meta[KEY] = Mark(no_grad=own.no_grad, batch=batch, axis=axis, scope=own.scope)
        if node.op in ("placeholder", "output"):
            return
        val = node.meta.get("val")
        # A size that the rewrite counts, such as 2 * batch, has no value yet; of the others the shape is the whole
        # batch's.
        if layout is not None and isinstance(val, Tensor):
            node.meta["val"] = self._tensor(val, layout)
        elif val is None:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif isinstance(val, torch.SymInt):
            node.meta["val"] = self._size(expression(val), True)
        elif isinstance(val, list | tuple):
            node.meta["val"] = self._results(node, list(val))

    def _results(self, node: fx.Node, values: list[Any]) -> list[Any]:
        """The results of a node with several; those that something reads have their layouts."""
        for item in (u for u in node.users if u.target is operator.getitem):
            self._value(item)
            values[int(item.args[1])] = item.meta["val"]  # type: ignore[arg-type]
        return values

    def _tensor(self, val: Tensor, layout: Layout) -> Tensor:
        shape = list(sizes(val))
        local: list[Any] = [self._size(n, True) for n in shape]
        dim, distribution = layout.sharded_dim, layout.distribution
        if dim is not None and distribution is not None:
            share = substitute(sympy.sympify(distribution.length), self.whole) / self.dp
            local[dim] = self._size(sympy.cancel(share), False)
        same = all(a is b or expression(a) == b for a, b in zip(local, shape, strict=True))
        return val if same else _strided(val, local)

    def _size(self, size: Size, whole: bool) -> Any:
        """The (symbolic) int of an expression; with `whole` of one that speaks of the whole batch."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        size = substitute(size, self.whole) if whole else size

        def read(e: Any) -> Any:
            if e.is_Integer:
                return int(e)
            return self.symints[e] if e in self.symints else reduce(ARITHMETIC[type(e).__name__], map(read, e.args))

        return read(size)
