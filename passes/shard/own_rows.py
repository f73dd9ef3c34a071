"""Mixtures of experts and lookups over the batch axis: a rank sorts and numbers the rows of its own examples alone.

A mixture sorts the rows of all examples by expert, computes row by row and by expert, and puts the rows back in their
places. Where the sort stands says nothing of the result, so each rank may sort its own rows: then nothing is gathered
over the axis. What is between the sort and the places, a *region*, is found by typing every value in it (`Kind`), and
stands in the program as one operator with a loop over tokens while it is sharded; then the region itself, which
is the same for the examples of one rank, is put back (`passes/shard/travel.py` sends its rows to their experts).

A lookup by the number of the example, `x[arange(batch), last]` as a model reads its last token or a mask, is such a
region too: `arange` counts the examples of one rank once it is put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from math import gcd
from typing import Any, cast

import torch
from torch import fx

from autotp.ir.graph import Capture, computed, copy_node, outputs_of, replace_node, shape_of, tensors
from autotp.ir.layouts import Size, divide
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import Carry, Factor, Op, Rule, aten, expression, factors_of, is_tensor, sizes, symbols_of
from autotp.rules.core import rule_of
from autotp.rules.local import Sizes


class Kind(Enum):
    """Kinds of a value in a region: what it is of the rows, however these are sorted within an expert."""

    SORT = "the sort of the rows' experts"
    KEYS = "number of each sorted row's expert"
    ROWS = "rows, sorted by expert"
    PLACES = "places of the sorted rows among the rows as they came, or among the tokens that they are of"
    COUNTS = "how many rows each expert has"
    ENDS = "row after each expert's last"
    EMPTY = "room for as many numbers as there are rows"
    INVERSE = "places of the rows as they came among the sorted ones"
    BACK = "rows, or sums of them, in the places that they came from"


SORTS = (aten.sort.default, aten.sort.stable)
SORTED = (Kind.ROWS, Kind.KEYS)
LOOKUPS = (aten.index.Tensor, aten.index_put.default)
# How many arguments stand before the end.
COUNTING: dict[Any, int] = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
# A number stays with its row, the first dimension of both sides.
KEEPING: set[Any] = {aten.unsqueeze.default, aten.expand.default, aten.view.default, aten.to.dtype, aten.to.device}


@dataclass
class Region:
    """Operators between a sort of rows by expert and their places.

    Attributes:
        sort: the first of them. rows: how many there are. kinds: of each node, in order. back: the last one.
        units: rows that a token has for each row of an operand from outside, or of each that is a place.
        products: those by expert, each with the node that says where its groups end, and with its weight.
    """

    sort: fx.Node
    rows: Size
    kinds: dict[fx.Node, Kind] = field(default_factory=dict)
    units: dict[fx.Node, int] = field(default_factory=dict)
    products: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    back: fx.Node | None = None

    @property
    def outside(self) -> list[fx.Node]:
        """List the tensors from outside that its operators read."""
        read = (i for n in self.kinds for i in n.all_input_nodes if i not in self.kinds and is_tensor(i))
        return list(dict.fromkeys(read))

    def has(self, x: Any, *kinds: Kind) -> bool:
        """Say whether an argument is a value of one of these kinds."""
        return isinstance(x, fx.Node) and self.kinds.get(x) in kinds

    def fits(self, table: fx.Node, at: fx.Node) -> bool:
        """Say whether a value from outside has a row for each of such places, and note it."""
        rows = self.units[at]
        same = table not in self.kinds and divide(self.rows, rows) == shape_of(table)[0]
        return same and self.units.setdefault(table, rows) == rows


def regions(program: Capture) -> list[Region]:
    """Find the regions of a program that have a product by expert."""
    candidates = (_region(n) for n in program.graph.nodes if n.target in SORTS)
    outputs = set(outputs_of(program))
    return [r for r in candidates if r is not None and r.products and outputs.isdisjoint({*r.kinds} - {r.back})]


def lookups(program: Capture, batch: Size) -> Iterator[Region]:
    """Find the lookups by the number of the example, each as a region."""
    for node in [*program.graph.nodes]:
        region = _by_example(node, batch) if node.target in LOOKUPS else None
        if region is not None:
            yield region


def _by_example(node: fx.Node, batch: Size) -> Region | None:
    """Read a lookup in each example's own row of a table; None where it reads others' rows, or may."""
    table, (numbers, *others), *values = cast(Any, node.args)
    counting = _counting(numbers, batch)
    if not counting or shape_of(table)[0] != batch or shape_of(node)[0] != batch:
        return None
    kinds = {**dict.fromkeys(counting, Kind.PLACES), node: Kind.BACK}
    region = Region(counting[0], batch, kinds, {table: 1}, back=node)
    wide, result = len(shape_of(numbers)), len(shape_of(node))
    if node.target is aten.index_put.default:  # its values are as wide as what is looked up there
        result = wide + len(shape_of(table)) - sum(i is not None for i in (numbers, *others))
    widths = {i: wide for i in others if i is not None} | dict.fromkeys(values[:1], result)
    for operand, dims in widths.items():
        shape = shape_of(operand)
        masking = operand in others and operand.meta["val"].dtype in (torch.bool, torch.uint8)
        # What counts examples says a column by their number in the whole batch.
        if len(shape) > dims or masking or operand in region.kinds:
            return None
        if len(shape) == dims and shape[0] != 1:  # of broadcast operands all examples read the same
            if shape[0] != batch:
                return None
            region.units[operand] = 1
    return region


def _counting(x: Any, batch: Size) -> list[fx.Node]:
    """List the nodes that make a tensor whose elements are the numbers of their rows, in order; none of any other."""
    nodes = []
    while isinstance(x, fx.Node) and is_tensor(x) and shape_of(x)[:1] == (batch,):
        nodes.append(x)
        args: Any = x.args
        if x.target in COUNTING:
            before = COUNTING[x.target]
            return nodes[::-1] if {*args[:before]} <= {0} and {*args[before + 1 :]} <= {1} else []
        same = x.target in KEEPING or x.target is aten.add.Tensor and args[1] == 0
        x = args[0] if same else None
    return []


def experts_of(program: Capture) -> int:
    """Find the largest number of ranks that have as many experts each, of every mixture; 1 where there is none."""
    numbers = [shape_of(weight)[0] for region in regions(program) for _, weight in region.products.values()]
    return gcd(*filter(lambda n: isinstance(n, int), numbers)) or 1  # type: ignore[arg-type]


def _region(sort: fx.Node) -> Region | None:
    """Find the region that a sort begins; None where a value that is read outside depends on how rows are sorted."""
    shape, args = shape_of(sort), Op.of(sort).args
    if len(shape) != 1 or args["descending"] or sort.meta["val"][0].is_floating_point():
        return None
    region = Region(sort, shape[0], {sort: Kind.SORT}, {sort.all_input_nodes[0]: 1})
    node = sort
    while (node := node.next).op != "root":
        read = {i for i in node.all_input_nodes if i in region.kinds}
        # What is read after the rows are in their places again is of the rest of the program.
        if not read or read == {region.back}:
            continue
        kind = _kind(region, node, node.args) if node.op == "call_function" else None
        # The number of rows, as any number of the whole batch, is another on one rank: no operator may read it.
        sized = not all(tensors(i) for i in node.all_input_nodes)
        if kind is None or sized or kind is Kind.BACK and region.back is not None:
            return None
        region.kinds[node] = kind
        region.back = node if kind is Kind.BACK else region.back
    return region if region.back is not None else None


def _kind(region: Region, node: fx.Node, args: Any) -> Kind | None:
    """Find the kind of what an operator makes of values of the region; None where it has none."""
    has, target = region.has, node.target
    first: Any = args[0] if args else None
    # A sort gives two values, and an operator on rows may: of a chunk for gate and up each is rows.
    if target is operator.getitem and has(first, Kind.SORT):
        region.units[node] = 1
        return Kind.PLACES if args[1] == 1 else Kind.KEYS
    if target is operator.getitem and has(first, Kind.ROWS):
        return Kind.ROWS
    if target is aten.to.dtype and has(first, Kind.KEYS, Kind.COUNTS, Kind.ENDS):
        return region.kinds[first]
    # Where groups end is known of the rows' own experts alone, counted from the first to the last.
    if target is aten.histc.default and has(first, Kind.KEYS):
        return Kind.COUNTS if args[2:] == (0, args[1] - 1) else None
    if target is aten.cumsum.default and has(first, Kind.COUNTS):
        return Kind.ENDS
    # Rows that follow each other as they came are a token's: of a place that is moved by one this would be another.
    if target is aten.floor_divide.default and has(first, Kind.PLACES) and isinstance(args[1], int) and args[1] > 0:
        region.units[node] = region.units[first] * args[1]
        return Kind.PLACES
    if target is aten.empty_like.default and has(first, Kind.PLACES):
        return Kind.EMPTY
    if target is aten.index_put.default and has(first, Kind.EMPTY) and len(args) == 3:
        return Kind.INVERSE if _inverts(region, *args[1:]) else None
    # Rows leave the region for where they came from: added up in any other order they would be of other tokens.
    if target is aten.index_add.default and args[1] == 0 and has(args[2], Kind.PLACES) and has(args[3], *SORTED):
        return Kind.BACK if len(args) == 4 and region.fits(first, args[2]) else None
    if target is aten.index.Tensor and len(args[1]) == 1:
        return _lookup(region, first, args[1][0])
    return _by_rule(region, node)


def _inverts(region: Region, at: Any, numbers: fx.Node) -> bool:
    """Say whether the number of each row is put at its place."""
    places = len(at) == 1 and region.has(at[0], Kind.PLACES) and region.units[at[0]] == 1
    counted = numbers.target is aten.arange.default and shape_of(numbers) == (region.rows,)
    if places and counted:
        region.kinds[numbers] = Kind.EMPTY
    return places and counted


def _lookup(region: Region, table: fx.Node, at: fx.Node) -> Kind | None:
    """Read a lookup: of rows from their places, of a table by expert, or of rows back in their places."""
    if region.has(table, *SORTED):
        return Kind.BACK if region.has(at, Kind.INVERSE) else None
    by_expert = table not in region.kinds and region.has(at, *SORTED) and isinstance(shape_of(table)[0], int)
    return Kind.ROWS if by_expert or region.has(at, Kind.PLACES) and region.fits(table, at) else None


def _by_rule(region: Region, node: fx.Node) -> Kind | None:
    """Find rows by the operator's rule: where it says that it works row by row, or by expert."""
    op = Op.of(node)
    rows = [x for x in op.slots if region.has(x, *SORTED)]
    others = [x for x in op.slots if x in region.kinds and x not in rows]
    for factor in factors_of(rule_of(op)):
        carries = dict(zip(op.slots, factor.ins, strict=True))
        ends = {op.slots[c.groups] for c in factor.carries if c is not None and c.groups is not None}
        grouped = all((c := carries[x]) is not None and c.dim == 0 and c.groups is not None for x in rows)
        if ends and grouped and [*ends] == others and region.has(others[0], Kind.ENDS):
            weight = next(x for x, c in carries.items() if c is not None and c.groups is None)
            region.products[node] = others[0], weight
            return Kind.ROWS
        by_row = all(carries[x] == Carry(0) for x in rows) and {*factor.outs} == {Carry(0)}
        # What comes from outside and has the loop too has a number for each row of the whole batch.
        if by_row and not others and all(x in rows or c is None for x, c in carries.items()):
            return Kind.ROWS
    return None


# ---- as one operator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnRows:
    """A region as one operator: the target of its call, while an axis is sharded; equal for equal regions.

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
        """Refuse: it stands for its region only while that is sharded."""
        raise NotImplementedError(f"{self.__name__} is no operator that runs")

    def rule(self, op: Op) -> Rule:
        """Give its rule: one loop, over tokens."""
        ins = []
        for x, shape in zip(self.region.outside, op.ins, strict=True):
            ins.append(self._carry(shape) if x in self.region.units else None)
        return Rule((Factor(self.tokens, tuple(ins), (self._carry(op.outs[0]),), contracted=False),))

    def _carry(self, shape: tuple[Size, ...]) -> Carry:
        unit = divide(shape[0], self.tokens)
        assert unit is not None
        return Carry(0, unit=unit)


def fold(program: Capture, symbol: Size) -> None:
    """Put one operator in the place of each region that has no other rows than those of its tokens, or examples.

    Args:
        program: is changed. symbol: of the batch.
    """
    for region in chain(regions(program), lookups(program, symbol)):  # what one reads may stand for another
        back, outside = region.back, region.outside
        assert back is not None
        tokens = divide(region.rows, max(region.units.values()))
        by_token = [*filter(region.units.__contains__, outside), back]
        if tokens is None or any(divide(shape_of(x)[0], tokens) is None for x in by_token):
            continue
        # Of what is no row the size is that of the whole batch, and would be taken for a rank's.
        shapes = [shape_of(x)[x in region.units :] for x in outside]
        shapes += [sizes(x)[1:] for n, kind in region.kinds.items() if kind in SORTED for x in tensors(n)]
        if any(symbol in symbols_of(n) for shape in shapes for n in shape):
            continue
        copy = _in_own_graph(region)
        with program.graph.inserting_before(back):
            target = OwnRows(copy, _key(copy), tokens)
            new = program.graph.create_node("call_function", target, tuple(outside), name=target.__name__)
        inherit(new, back)
        back.replace_all_uses_with(new)
        for node in reversed(region.kinds):
            if not node.users:
                program.graph.erase_node(node)


def _in_own_graph(region: Region) -> Region:
    """Copy the region into a graph of its own, with placeholders for all that it reads."""
    graph, env = fx.Graph(), {}
    for x in dict.fromkeys(i for n in region.kinds for i in n.all_input_nodes if i not in region.kinds):
        env[x] = graph.placeholder(x.name)
        env[x].meta = dict(x.meta)
    for node in region.kinds:
        env[node] = copy_node(node, graph, env.__getitem__)
    back = region.back and env[region.back]
    kinds = {env[n]: kind for n, kind in region.kinds.items()}
    units = {env[n]: rows for n, rows in region.units.items()}
    products = {env[n]: (env[ends], env[weight]) for n, (ends, weight) in region.products.items()}
    return Region(env[region.sort], region.rows, kinds, units, products, back)


def _key(region: Region) -> tuple[Any, ...]:
    """Give in text what a region computes, of which of its operands."""
    place = {n: f"#{i}" for i, n in enumerate([*region.outside, *region.kinds])}
    rows = []
    for node in region.kinds:
        read = fx.map_arg((node.args, node.kwargs), lambda n: place.get(n, str(n.meta["val"])))  # type: ignore
        rows.append((str(node.target), str(read)))
    return tuple(rows)


def calls(program: Capture, mixtures: bool = True) -> Iterator[fx.Node]:
    """List the regions that stand in a program as one operator; with `mixtures` those with products by expert alone."""
    folded = (n for n in program.graph.nodes if isinstance(n.target, OwnRows))
    return (n for n in folded if n.target.region.products or not mixtures)


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


Writer = Callable[[fx.Node, Read], fx.Node]


def unfold(program: Capture, writer: Callable[[Region], Writer]) -> None:
    """Put the regions back, of the rows of one rank.

    Args:
        program: of one rank, whose batch the symbol of the batch now means, so that sizes of rows stay as they are.
        writer: gives what writes the nodes of a region.
    """
    for call in [*calls(program, mixtures=False)]:
        region = call.target.region  # type: ignore[union-attr]
        write_node = (writer if region.products else copied)(region)
        with program.graph.inserting_before(call):
            last = call.prev
            read = Read(Sizes(program.graph, program.symbols), dict(zip(region.outside, call.args, strict=True)))
            for node in region.kinds:
                read.env[node] = write_node(node, read)
            _size_values(last, call)
        replace_node(call, read.env[region.back])


def copied(region: Region) -> Writer:
    """Write the nodes of a region as they are."""
    return lambda node, read: copy_node(node, read.sizes.graph, read)


def _size_values(first: fx.Node, last: fx.Node) -> None:
    """Give the sizes that were written between two nodes their values, and their module."""
    node = first
    while (node := node.next) is not last:
        if "val" not in node.meta:
            node.meta["val"] = computed(node)
            node.meta.setdefault("nn_module_stack", last.meta.get("nn_module_stack"))
            write(node, no_grad=mark(last).no_grad)
