"""Calls of operators as rules see them, and rules: the factors (independent loops) of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from .layouts import Reduction, Size, simplify

Shape = tuple[Size, ...]
aten = torch.ops.aten
EXPERTS = "experts"  # the label of a loop over experts


@dataclass(frozen=True)
class Carry:
    """Place of a factor in a slot: dimension `dim` holds the loop `repeat` times, `unit` elements a step.

    With `piece`, the dimension holds only that piece of a loop that is cut up (`Factor.pieces`). With `groups`, the
    loop runs over groups, the dimension holds their rows, sorted by group, and operand slot `groups` holds their ends.
    """

    dim: int
    repeat: Size = 1
    unit: Size = 1
    piece: int | None = None
    groups: int | None = None


@dataclass(frozen=True)
class Factor:
    """A loop of an operator: its length, and per operand slot and per result the `Carry`, or None.

    `contracted` says whether the loop may be split where results lack it; they are then partial, by `reduction`: sums,
    or maxima, which carry no gradient. `label` is its letter in an einsum string, or its name. `copies`: how often
    operands and results are copied to split it, beside what the operator itself reads and writes. `alike`: results
    that lack the loop and are no summands: every rank has them whole. `maxima`: operand slots that lack the loop, and
    whose gradients are the largest over the ranks, not the sum.
    """

    size: Size
    ins: tuple[Carry | None, ...]
    outs: tuple[Carry | None, ...]
    pieces: tuple[Size, ...] = ()
    contracted: bool = True
    label: str = field(default="", compare=False)
    copies: int = 0
    reduction: Reduction = "sum"
    alike: frozenset[int] = frozenset()
    maxima: frozenset[int] = frozenset()

    @property
    def carries(self) -> tuple[Carry | None, ...]:
        """Places in each operand slot, then in each result."""
        return *self.ins, *self.outs

    @property
    def contracts(self) -> bool:
        """Say whether some result lacks the loop: split, that result is partial."""
        return any(c is None and i not in self.alike for i, c in enumerate(self.outs))


# Takes the call and its `autotp.rules.local.ShardCall`; returns target and arguments for a rank's shards, or a node.
Localise = Callable[["Op", Any], tuple[Any, tuple[Any, ...], dict[str, Any]] | fx.Node]


@dataclass(frozen=True)
class Rule:
    """Rule of one call of an operator: its factors, and what else sharding must know.

    `linear`: sets of operand slots; with those partial (sums) and the others replicated, all results are partial.
    `addends`: slots added to the result after the contraction (a bias): partial where the result is.
    `localise`: rewrites target and arguments for a rank's shards, where the literals must change.
    `empty`: whether the operator, and its backward, run on shards without elements, which many of torch's kernels
    refuse; or the labels of the loops of which they do.
    `summed`: whether the backward of a sum is the sum of the backwards, as it is of every derivative; a backward that
    somebody wrote may clip. Then the results' gradients never arrive as summands.
    """

    factors: tuple[Factor, ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    localise: Localise | None = None
    empty: bool | tuple[str, ...] = True
    summed: bool = True

    def runs_without(self, factor: Factor) -> bool:
        """Say whether a rank may have no step of this loop."""
        return self.empty if isinstance(self.empty, bool) else factor.label in self.empty


def factors_of(rule: Rule | None) -> tuple[Factor, ...]:
    """Return the loops of a call, none of an operator without a rule."""
    return rule.factors if rule is not None else ()


def sizes(value: Any) -> Shape:
    """Return the shape of a tensor (fake or real) as ints and sympy expressions."""
    return tuple(expression(s) for s in value.shape)


def expression(size: Any) -> Size:
    """Convert an int or SymInt to an int or sympy expression."""
    return simplify(size.node.expr) if isinstance(size, torch.SymInt) else int(size)


def symbols_of(size: Size) -> set[Any]:
    """Return the symbols in a size; none in a number."""
    return set() if isinstance(size, int) else set(size.free_symbols)


class Argument(NamedTuple):
    """Argument of a schema: its name, its default where it `has_default`, and whether it is passed by name alone."""

    name: str
    default: object
    has_default: bool
    by_name: bool


def packet_of(target: Any) -> Any:
    """Return the operator of which this is an overload; None for a Python function."""
    return getattr(target, "overloadpacket", None)


def operator_name(target: Any) -> str:
    """Return `aten.linear` for every overload of it; a function's own name otherwise."""
    return str(packet_of(target) or getattr(target, "__name__", ""))


def gives_views(target: Any) -> bool:
    """Say whether an operator returns views of its operands, by its schema."""
    returns = getattr(getattr(target, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@cache
def arguments_of(target: Any) -> tuple[Argument, ...]:
    """Return the arguments of an operator with a schema, cached, for torch makes them anew at every read."""
    arguments = target._schema.arguments
    return tuple(Argument(a.name, a.default_value, a.has_default_value(), a.kwarg_only) for a in arguments)


@dataclass
class Op:
    """One call in the captured graph, as rules see it: named arguments, tensor slots, and shapes."""

    node: fx.Node
    args: dict[str, Any] = field(default_factory=dict)
    slots: list[fx.Node] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ins: list[Shape] = field(default_factory=list)
    outs: list[Shape] = field(default_factory=list)

    @classmethod
    def of(cls, node: fx.Node) -> Op:
        """Read a `call_function` node; every operator of torch has a schema, Python functions have none."""
        op = cls(node)
        schema = getattr(node.target, "_schema", None)
        positional = dict(enumerate(node.args))
        if schema is None:
            op.args = {f"arg{i}": a for i, a in positional.items()} | dict(node.kwargs)
        else:
            for i, a in enumerate(arguments_of(node.target)):
                op.args[a.name] = positional.get(i, node.kwargs.get(a.name, a.default))
        for name, value in op.args.items():
            for item in several(value):
                if is_tensor(item):
                    op.slots.append(item)
                    op.names.append(name)
                    op.ins.append(sizes(item.meta["val"]))
        for v in several(node.meta.get("val")):
            op.outs.append(sizes(v) if isinstance(v, torch.Tensor) else ())
        return op

    @property
    def target(self) -> Any:
        return self.node.target

    def slot(self, name: str) -> int | None:
        """Return the slot of the (first) tensor given for the schema argument `name`."""
        return self.names.index(name) if name in self.names else None

    def size(self, name: str) -> Size:
        """Return the argument of this name, a number or a node whose value is one."""
        value = self.args[name]
        return expression(value.meta["val"]) if isinstance(value, fx.Node) else value

    def dim(self) -> int:
        """Return the argument `dim`, a dimension of the first operand, counted from the front."""
        return self.args["dim"] % max(len(self.ins[0]), 1)


Ops = Mapping[fx.Node, Op]  # the calls of a graph


def several(value: Any) -> Sequence[Any]:
    """Return the items of a list; any other value as the one item."""
    return value if isinstance(value, list | tuple) else [value]


def is_tensor(item: Any) -> bool:
    """Say whether an argument of a node is a node with a tensor value."""
    return isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor)
