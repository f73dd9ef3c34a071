"""Mixtures of experts over the batch axis: a rank sorts the rows of its own examples by expert, and no others.

A mixture sorts the rows of all examples by expert, computes row by row and by expert, and puts the rows back in their
places. Where the sort stands says nothing of the result, so each rank may sort its own rows: then nothing is gathered
over the axis. What is between the sort and the places, a *region*, is found by typing every value in it (`Kind`), and
stands in the program as one operator whose loop are the tokens while the axis is dealt; then the region itself, which
is the same for the examples of one rank, is put back (`passes/shard/travel.py` sends its rows to their experts).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import fx

from autotp.ir.graph import Capture, copy_node, outputs_of, shape_of
from autotp.ir.layouts import Size, divide
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import EXPERTS, Carry, Factor, Op, Rule, aten, expression, is_tensor
from autotp.rules.core import rule_of
from autotp.rules.local import Sizes


class Kind(Enum):
    """Kinds of a value in a region: what it is of the rows, however these are sorted within an expert."""

    SORT = "the sort of the rows' experts"
    ROWS = "rows, sorted by expert"
    PLACES = "places of the sorted rows among the rows as they came, or among the tokens that they are of"
    COUNTS = "a sum over the rows, as how many each expert has"
    ENDS = "row after each expert's last"
    EMPTY = "room for as many numbers as there are rows"
    RANGE = "number of each row"
    INVERSE = "places of the rows as they came among the sorted ones"
    BACK = "rows, or sums of them, in the places that they came from"


@dataclass(frozen=True)
class Typed:
    """A kind of value, and of places how many rows each token has."""

    kind: Kind
    rows: int = 1


SORTS = (aten.sort.default, aten.sort.stable)
LOOKUPS = (aten.index.Tensor, aten.index_select.default)
RANGES = (aten.arange.default, aten.arange.start)
SAME = (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)


@dataclass
class Region:
    """Operators between a sort of rows by expert and their places.

    Attributes:
        sort: the first of them. rows: how many there are. kinds: of each node, in order. back: the last one.
        units: rows that an operand from outside has for each token: of those that have any.
        products: those by expert, each with the node that says where its groups end.
    """

    sort: fx.Node
    rows: Size
    kinds: dict[fx.Node, Typed] = field(default_factory=dict)
    units: dict[fx.Node, int] = field(default_factory=dict)
    back: fx.Node | None = None
    products: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def outside(self) -> list[fx.Node]:
        """Tensors from outside that its operators read."""
        read = {i: None for n in self.kinds for i in n.all_input_nodes if i not in self.kinds and is_tensor(i)}
        return list(read)

    def of(self, kind: Kind) -> list[fx.Node]:
        """List the nodes of a kind."""
        return [n for n, typed in self.kinds.items() if typed.kind is kind]

    def has(self, x: Any, *kinds: Kind) -> bool:
        """Say whether an argument is a value of one of these kinds."""
        return isinstance(x, fx.Node) and x in self.kinds and self.kinds[x].kind in kinds


def regions(program: Capture) -> list[Region]:
    """Find the regions of a program that have a product by expert."""
    found = (_region(n) for n in program.graph.nodes if n.target in SORTS)
    outputs = set(outputs_of(program))
    return [r for r in found if r is not None and r.products and outputs.isdisjoint({*r.kinds} - {r.back})]


def _region(sort: fx.Node) -> Region | None:
    """The region that a sort begins; None where a value that is read outside depends on how rows are sorted."""
    shape = shape_of(sort)
    if len(shape) != 1 or sort.meta["val"][0].is_floating_point():
        return None
    region = Region(sort, shape[0])
    region.kinds[sort] = Typed(Kind.SORT)
    region.units[sort.all_input_nodes[0]] = 1
    node = sort
    while (node := node.next).op != "root":
        if not any(i in region.kinds for i in node.all_input_nodes):
            continue
        # What is read after the rows are in their places again is of the rest of the program.
        if {i for i in node.all_input_nodes if i in region.kinds} == {region.back}:
            continue
        typed = _typed(region, node)
        if typed is None or typed.kind is Kind.BACK and region.back is not None:
            return None
        region.kinds[node] = typed
        region.back = node if typed.kind is Kind.BACK else region.back
    return region if region.back is not None else None


def _typed(region: Region, node: fx.Node) -> Typed | None:
    """The kind of what an operator makes of values of the region; None where it has none."""
    if node.op != "call_function":
        return None
    for rule in (_item, _place, _lookup, _inverse, _return, _count):
        if (typed := rule(region, node)) is not None:
            return typed
    return _by_rule(region, node)


def _item(region: Region, node: fx.Node) -> Typed | None:
    if node.target is not operator.getitem:
        return None
    if region.has(node.args[0], Kind.SORT):
        return Typed(Kind.PLACES if node.args[1] == 1 else Kind.ROWS)
    return Typed(Kind.ROWS) if region.has(node.args[0], Kind.ROWS) else None


def _place(region: Region, node: fx.Node) -> Typed | None:
    """Places of rows become those of their tokens, each of which has so many rows."""
    args = node.args
    if node.target is not aten.floor_divide.default or not region.has(args[0], Kind.PLACES):
        return None
    known = isinstance(args[1], int) and args[1] > 0
    return Typed(Kind.PLACES, region.kinds[args[0]].rows * args[1]) if known else None  # type: ignore[index, operator]


def _lookup(region: Region, node: fx.Node) -> Typed | None:
    """Rows from their places, rows of a table by expert, or rows back in their places."""
    if node.target not in LOOKUPS:
        return None
    table, at = node.args[0], node.args[-1]
    if node.target is aten.index.Tensor:
        if len(at) != 1:  # type: ignore[arg-type]
            return None
        at = at[0]  # type: ignore[index]
    elif node.args[1] != 0:
        return None
    if region.has(table, Kind.ROWS):
        return Typed(Kind.BACK) if region.has(at, Kind.INVERSE) else None
    if table in region.kinds:
        return None
    if region.has(at, Kind.PLACES) and _fits(region, table, region.kinds[at].rows):  # type: ignore[index, arg-type]
        return Typed(Kind.ROWS)
    known = region.has(at, Kind.ROWS) and isinstance(shape_of(table)[0], int)  # type: ignore[arg-type]
    return Typed(Kind.ROWS) if known else None


def _fits(region: Region, table: fx.Node, rows: int) -> bool:
    """Say whether a value from outside has one row for each so many rows, and note it."""
    unit = divide(region.rows, rows)
    return unit is not None and unit == shape_of(table)[0] and region.units.setdefault(table, rows) == rows


def _inverse(region: Region, node: fx.Node) -> Typed | None:
    """Places of the rows among the sorted ones: sorted by where they came from, or numbers put there."""
    args: Any = node.args
    if node.target is aten.empty_like.default and region.has(args[0], Kind.PLACES):
        return Typed(Kind.EMPTY)
    first = len(args) > 0 and region.has(args[0], Kind.PLACES) and region.kinds[args[0]].rows == 1
    if node.target is aten.argsort.default and first:
        return Typed(Kind.INVERSE)
    if node.target is not aten.index_put.default or not region.has(args[0], Kind.EMPTY) or len(args) > 3 and args[3]:
        return None
    at, numbers = args[1], args[2]
    whole = len(at) == 1 and region.has(at[0], Kind.PLACES) and region.kinds[at[0]].rows == 1
    if not whole or not _counts_up(numbers, region.rows):
        return None
    region.kinds[numbers] = Typed(Kind.RANGE)
    return Typed(Kind.INVERSE)


def _counts_up(node: Any, rows: Size) -> bool:
    """Say whether this is the number of each row."""
    if not isinstance(node, fx.Node) or node.target not in RANGES:
        return False
    return node.args[:-1] in ((), (0,)) and shape_of(node) == (rows,)


def _return(region: Region, node: fx.Node) -> Typed | None:
    """Rows added to their tokens."""
    if node.target is not aten.index_add.default or node.args[1] != 0:
        return None
    into, _, at, rows = node.args[:4]
    fits = region.has(at, Kind.PLACES) and region.has(rows, Kind.ROWS) and into not in region.kinds
    return Typed(Kind.BACK) if fits and _fits(region, into, region.kinds[at].rows) else None  # type: ignore


def _count(region: Region, node: fx.Node) -> Typed | None:
    """How many rows each expert has, and where its last is."""
    args = node.args
    if node.target is aten.histc.default and region.has(args[0], Kind.ROWS):
        return Typed(Kind.COUNTS)
    if node.target is aten.sum.dim_IntList and args[1] == [0] and region.has(args[0], Kind.ROWS):
        return Typed(Kind.COUNTS)
    if node.target is aten.cumsum.default and region.has(args[0], Kind.COUNTS) and len(shape_of(node)) == 1:
        return Typed(Kind.ENDS)
    same = node.target in SAME and region.has(args[0], Kind.COUNTS, Kind.ENDS)
    return region.kinds[args[0]] if same else None  # type: ignore[index]


def _by_rule(region: Region, node: fx.Node) -> Typed | None:
    """Rows, where the operator's rule says that it works row by row, or by expert."""
    op = Op.of(node)
    rule = rule_of(op)
    for factor in () if rule is None else rule.factors:
        carries = dict(zip(op.slots, factor.ins, strict=True))
        rows = [x for x in op.slots if region.has(x, Kind.ROWS)]
        others = [x for x in op.slots if x in region.kinds and x not in rows]
        if factor.label == EXPERTS:
            ends = {op.slots[c.groups] for c in factor.carries if c is not None and c.groups is not None}
            if [*ends] == others and region.has(others[0], Kind.ENDS) and all(_by_group(carries[x]) for x in rows):
                region.products[node] = others[0]
                return Typed(Kind.ROWS)
            continue
        by_row = all(c == (Carry(0) if x in rows else None) for x, c in carries.items())
        if by_row and not others and {*factor.outs} == {Carry(0)}:
            return Typed(Kind.ROWS)
    return None


def _by_group(carry: Carry | None) -> bool:
    return carry is not None and carry.dim == 0 and carry.groups is not None


# ---- as one operator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnRows:
    """A region as one operator: the target of its call, while an axis is dealt; equal for equal regions.

    Attributes:
        region: it. key: what it computes. tokens: how many there are, each with so many rows.
    """

    region: Region
    key: tuple[Any, ...]
    tokens: Size

    __name__ = "own_rows"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnRows) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, *args: Any) -> Any:
        """Refuse: it stands for its region only while that is dealt."""
        raise NotImplementedError(f"{self.__name__} is no operator that runs")

    def rule(self, op: Op) -> Rule:
        """Each token is for itself."""
        ins = []
        for x, shape in zip(self.region.outside, op.ins, strict=True):
            ins.append(self._carry(shape) if x in self.region.units else None)
        return Rule((Factor(self.tokens, tuple(ins), (self._carry(op.outs[0]),), contracted=False),))

    def _carry(self, shape: tuple[Size, ...]) -> Carry:
        unit = divide(shape[0], self.tokens)
        assert unit is not None
        return Carry(0, unit=unit)


def fold(program: Capture) -> None:
    """Put one operator in the place of each region that has no other rows than those of its tokens."""
    for region in regions(program):
        back, outside = region.back, region.outside
        assert back is not None
        tokens = divide(region.rows, max(region.units.values()))
        if tokens is None or any(divide(shape_of(x)[0], tokens) is None for x in (*region.units, back)):
            continue
        kept = _apart(region)
        with program.graph.inserting_before(back):
            target = OwnRows(kept, _key(kept), tokens)
            new = program.graph.create_node("call_function", target, tuple(outside), name=target.__name__)
        inherit(new, back)
        back.replace_all_uses_with(new)
        for node in reversed(region.kinds):
            if not node.users:
                program.graph.erase_node(node)


def _apart(region: Region) -> Region:
    """The region in a graph of its own, with placeholders for all that it reads."""
    graph, env = fx.Graph(), {}
    for x in dict.fromkeys(i for n in region.kinds for i in n.all_input_nodes if i not in region.kinds):
        env[x] = graph.placeholder(x.name)
        env[x].meta = dict(x.meta)
    for node in region.kinds:
        env[node] = copy_node(node, graph, env.__getitem__)
    return Region(
        env[region.sort], region.rows, {env[n]: typed for n, typed in region.kinds.items()},
        {env[n]: unit for n, unit in region.units.items()}, region.back and env[region.back],
        {env[n]: env[ends] for n, ends in region.products.items()},
    )  # fmt: skip


def _key(region: Region) -> tuple[Any, ...]:
    """What a region computes, of which of its operands."""
    place: Mapping[fx.Node, str] = {n: f"#{i}" for i, n in enumerate([*region.outside, *region.kinds])}
    rows = []
    for node in region.kinds:
        read = fx.map_arg((node.args, node.kwargs), lambda n: place.get(n, str(n.meta["val"])))  # type: ignore
        rows.append((str(node.target), str(read)))
    return tuple(rows)


def calls(program: Capture) -> Iterator[fx.Node]:
    """List the regions that stand in a program as one operator."""
    return (n for n in program.graph.nodes if isinstance(n.target, OwnRows))


@dataclass
class Read:
    """Values of a program that the nodes of a region read, when it is put back.

    Attributes:
        sizes: of one rank. env: of each node of the region, and of what it reads, the program's.
    """

    sizes: Sizes
    env: dict[fx.Node, Any]

    def __call__(self, n: fx.Node) -> Any:
        return self.env[n] if n in self.env else self.sizes.of(expression(n.meta["val"]))


Writer = Callable[[fx.Node, Read, fx.Graph], fx.Node]


def unfold(program: Capture, writer: Callable[[Region], Writer]) -> None:
    """Put the regions back, of the rows of one rank.

    Args:
        program: dealt, so that the symbol of the batch is that of a rank's: of its rows the same is said by the same
            sizes. writer: gives what writes the nodes of a region.
    """
    for call in [*calls(program)]:
        region = call.target.region  # type: ignore[union-attr]
        each = writer(region)
        with program.graph.inserting_before(call):
            last = call.prev
            read = Read(Sizes(program.graph, program.symbols), dict(zip(region.outside, call.args, strict=True)))
            for node in region.kinds:
                read.env[node] = each(node, read, program.graph)
            _size_values(last, call)
        call.replace_all_uses_with(read.env[region.back])
        program.graph.erase_node(call)


def copied(region: Region) -> Writer:
    """Write the nodes of a region as they are."""
    return lambda node, read, graph: copy_node(node, graph, read)


def _size_values(first: fx.Node, last: fx.Node) -> None:
    """Give the sizes that were written between two nodes their values, and their module."""
    node = first
    while (node := node.next) is not last:
        if "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
            node.meta.setdefault("nn_module_stack", last.meta.get("nn_module_stack"))
            write(node, no_grad=mark(last).no_grad)
