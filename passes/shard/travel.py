"""Experts over the batch axis: rows travel to the rank that owns their expert, and what it makes of them back.

Between the first and the last product by expert a region (`own_rows.py`) is rewritten: what enters is sent by an uneven
all-to-all, the products read a rank's own experts, and what leaves is sent back. Counts go around first, so that all
ranks know how many rows go where, and refuse together what cannot be. Backward is by the table of conversions: the
exchange the other way. An expert's gradient then has the rows of all ranks in it, and zeros for experts of other
ranks: one summand over the axis as that of every weight, of which data parallelism takes the mean.

With experts over fewer than all ranks, ranks that follow each other have the same ones: each holds its part of them,
which they gather for their products, and rows go to the one that has the sender's place among such ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from autotp.errors import CaptureError, InputError
from autotp.ir.graph import Capture, Env, copy_node, shape_of, tensors, where
from autotp.ir.layouts import Copies, Groups, Layout, Partition, R, Shard, Travelled, dealt_by
from autotp.ir.marks import Axis, BatchConversion, inherit
from autotp.ir.op import EXPERTS, Carry, Op, Rule, aten, factors_of, sizes
from autotp.ir.specs import TravelledSpec
from autotp.rules.core import rule_of
from autotp.text import listed

from .own_rows import SORTED, Kind, OwnRows, Read, Region, calls

AXIS: Axis = "dp"
MEASURED: list[list[Tensor]] = []  # counts of each exchange, for those who measure


def counts_of(ends: Tensor, rows: int) -> Tensor:
    """Count rows of each expert on this rank, and all, [1, experts + 1], by the row after each's last, [experts]."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64)
    return torch.cat([counts, counts.new_full((1,), rows)]).unsqueeze(0)


def agreed_counts(counts: Tensor) -> Tensor:
    """Check that each rank has an expert for each of its rows, and give all ranks' counts, the same on every rank.

    Args:
        counts: rows of each expert on each rank, and all rows of each, [ranks, experts + 1].

    Returns: those of each expert, on the CPU: how much is sent where is asked for there.

    Raises:
        InputError: a rank has counted other rows than it has; on all ranks.
    """
    counts, rows = counts[:, :-1], counts[:, -1]
    if counts.is_meta:
        return counts
    counts, rows = counts.cpu(), rows.cpu()
    faulty = (counts.sum(1) != rows) | (counts < 0).any(1)
    if bool(faulty.any()):
        ranks = faulty.nonzero().flatten().tolist()
        raise InputError(
            f"with ep rows travel to their experts, and of {rows[faulty].tolist()} rows dp ranks {ranks} have an "
            f"expert for {counts.sum(1)[faulty].tolist()}: a router has named an expert that is not there, or counted "
            f"rows twice. Names of experts go from 0 to {counts.shape[1] - 1}."
        )
    for record in MEASURED:
        record.append(counts)
    return counts


def own_ends(travelled: TravelledSpec, dtype: torch.dtype, like: Tensor, *, rank: int, tp: int) -> Tensor:
    """Give the row after the last of each of this rank's experts, among the rows that it gets.

    Args:
        travelled: how rows are divided over the ranks of their experts. dtype: of the ends. like: on what device.
        rank, tp: this rank, of how many.
    """
    return travelled.of_owner(rank, tp).sum(0).cumsum(0).to(like.device, dtype)


for _function in (counts_of, agreed_counts, own_ends):
    _function.rule = lambda op: Rule()  # type: ignore[attr-defined]


def refuse_staying(program: Capture) -> None:
    """Refuse a program with products by expert that are in no region, or with none.

    Args:
        program: whose regions stand as one operator each.

    Raises:
        CaptureError: it is one.
    """
    staying = [n for n in program.graph.nodes if n.op == "call_function" and _by_expert(n)]
    if staying:
        raise CaptureError(
            f"with ep the rows of {where(staying[0])} do not travel to their experts: more than products by expert of "
            "rows that a sort of their experts' numbers has ordered, and their return to where they came from, depends "
            "on that order. Use ep=1."
        )
    if not any(calls(program)):
        raise CaptureError(
            "ep deals out experts, and this call of the model has no products by expert (grouped_mm) of rows that are "
            "sorted by it. Use ep=1, or of a transformers model config._experts_implementation = 'grouped_mm'."
        )


def own_experts(program: Capture, ranks: int) -> dict[fx.Node, Layout]:
    """Leave each rank its own part of weights that nothing but products by expert reads, where each has as many.

    Args:
        program: whose regions stand as one operator each; is changed. ranks: of the axis.

    Returns: the nodes that are a part now, from the weight to its products, with their layouts over the axis.
    """
    owned = {}
    for leaf in (x for x in program.leaves if x.kind.trained and x.is_tensor):
        for node in _way([leaf.node]):
            val = node.meta["val"]
            if len(val) % ranks:
                break
            owned[node] = Shard(0, Partition.plain(len(val), ranks))
            node.meta["val"] = val.narrow(0, 0, len(val) // ranks).detach().requires_grad_(val.requires_grad)
    return owned


def _way(way: list[fx.Node]) -> list[fx.Node]:
    """List a weight, and what is made of it by expert for products by expert alone; nothing where others read it."""
    for node in way:
        for user in node.users:
            if isinstance(user.target, OwnRows):
                region = user.target.region
                weights = {weight for _, weight in region.products.values()}
                if any(x not in weights for x, a in zip(region.outside, user.args, strict=True) if a is node):
                    return []
            elif _by_row(user):
                way.append(user)
            else:
                return []
    return way if way[0].users else []


def _by_row(node: fx.Node) -> bool:
    """Say whether an operator makes of each row of its one operand a row, and is told of no sizes."""
    rule = rule_of(Op.of(node)) if node.op == "call_function" and tensors(node) else None
    sized = any(isinstance(x, list | tuple) for x in node.args) and node.target is not aten.permute.default
    return not sized and any([*f.ins] == [*f.outs] == [Carry(0)] for f in factors_of(rule))


def travelling(regions: Iterable[fx.Node], ranks: int, ep: int) -> str:
    """Say which experts are sharded, in a note of the plan."""
    names = listed(list(dict.fromkeys(map(where, regions))))
    those = f"{ranks} ranks" if ep == ranks else f"{ep} groups of {ranks // ep} ranks"
    return f"over dp rows travel to their experts, of which each of {those} computes its own: {names}"


def _by_expert(node: fx.Node) -> bool:
    """Say whether a node is a product by expert."""
    if isinstance(node.target, OwnRows) or not tensors(node):
        return False
    return any(f.label == EXPERTS for f in factors_of(rule_of(Op.of(node))))


@dataclass
class Journey:
    """Writes the nodes of a region so that rows travel; called with each in order.

    Attributes:
        region: of a program. ranks: of the axis. ep: ranks or groups of them over which experts are sharded.
        owned: nodes of the program of which a rank has its own part.
        travelled: of each node whose rows travel, what a rank has of it.
        parts: of each weight, the rank's experts. ends: of its own experts; `counts`: of all ranks.
    """

    region: Region
    ranks: int
    ep: int
    owned: Collection[fx.Node] = ()
    travelled: Env = field(default_factory=dict)
    parts: Env = field(default_factory=dict)
    ends: fx.Node | None = None
    counts: fx.Node | None = None

    def __post_init__(self) -> None:
        region = self.region
        self.weights = {n: weight for n, (_, weight) in region.products.items()}
        self.name = where(next(iter(region.products)))
        experts = {shape_of(w)[0] for w in self.weights.values()}
        number = next(iter(experts))
        if len(experts) != 1 or not isinstance(number, int):
            raise CaptureError(f"with ep the products of {self.name} must be of the same experts, a number of them.")
        self.experts = number
        if number % self.ep:  # fewer than ranks too
            raise CaptureError(
                f"ep={self.ep} does not deal out the {number} experts of {self.name}: each rank has as many. "
                f"Choose an ep that divides {number}, or ep=1."
            )
        plain, copies = Partition.plain(number, self.ep), self.ranks // self.ep
        partition = plain if copies == 1 else Copies(plain, copies)
        self.of = dealt_by(0, partition)
        self.layouts = (
            Shard(0, Partition.plain(self.ranks * region.rows, self.ranks)),
            Travelled(0, Groups(0, partition)),
        )
        self.inside = _between(region)

    def __call__(self, node: fx.Node, read: Read) -> fx.Node:
        """Write a node; gives what the rest of the region reads."""
        graph = read.sizes.graph
        if node not in self.inside:
            return copy_node(node, graph, read)
        new = copy_node(node, graph, lambda x: self._operand(node, x, read))
        self.travelled[node] = new
        if _many(node) or all(u in self.inside for u in node.users):
            return new
        local, travelled = self.layouts
        return self._convert(new, travelled, local, read, new.meta["val"])

    def _operand(self, node: fx.Node, x: fx.Node, read: Read) -> Any:
        """Give the operand of a node whose rows travel, in place of the one on the rank that sorted them."""
        if x not in self.region.kinds:
            return self._experts(x, read) if x is self.weights.get(node) else read(x)
        self._count(read)
        if self.region.has(x, Kind.ENDS):
            return self.ends
        if x not in self.travelled:
            local = read(x)
            self.travelled[x] = self._convert(local, *self.layouts, read, local.meta["val"])
        return self.travelled[x]

    def _convert(self, x: fx.Node, a: Layout, b: Layout, read: Read, val: Tensor) -> fx.Node:
        """Write a conversion over the axis, in the module of the products."""
        new = read.sizes.convert(x, a, b, self.counts)
        over = BatchConversion(a, b, self.ranks, AXIS)
        inherit(new, next(iter(self.region.products)), val, batch=over, axis=AXIS, flops=None, saved=None)
        return new

    def _experts(self, weight: fx.Node, read: Read) -> fx.Node:
        """Give the rank's own experts of a weight."""
        x = read(weight)
        before = Shard(0, Partition.plain(self.experts, self.ranks)) if x in self.owned else R
        if before == self.of:
            return x
        if weight not in self.parts:
            val = x.meta["val"].new_empty((self.experts // self.ep, *x.meta["val"].shape[1:]))
            self.parts[weight] = self._convert(x, before, self.of, read, val)
        return self.parts[weight]

    def _count(self, read: Read) -> None:
        """Have all ranks know the rows of each expert on each."""
        if self.counts is not None:
            return
        ends = read(next(iter(self.region.products.values()))[0])
        val, rows = ends.meta["val"], read.sizes.of(self.region.rows)
        one, everyone = (val.new_empty((n, self.experts + 1), dtype=torch.int64) for n in (1, self.ranks))
        local = _call(ends, counts_of, (ends, rows), one)
        row_of_each = Shard(0, Partition.plain(self.ranks, self.ranks))
        gathered = self._convert(local, row_of_each, R, read, everyone)
        self.counts = _call(ends, agreed_counts, (gathered,), everyone[:, :-1])
        travelled = self.layouts[1].to_runtime(lambda n: self.counts if isinstance(n, Groups) else n)
        val_of_ends = val.new_empty((self.experts // self.ep,))
        self.ends = _call(ends, own_ends, (travelled, val.dtype, ends), val_of_ends, AXIS)


def _call(like: fx.Node, function: Any, args: tuple[Any, ...], val: Tensor, axis: Axis | None = None) -> fx.Node:
    """Write a call in the module of a node.

    Args:
        like: the node. function, args: of the call. val: what it gives.
        axis: whose rank it takes.
    """
    new = like.graph.call_function(function, args)
    inherit(new, like, val, axis=axis, batch=None, flops=None, saved=None)
    return new


def _many(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _between(region: Region) -> dict[fx.Node, None]:
    """List the nodes whose rows travel: products by expert, what is between them, and what is cheaper made there."""
    rows, products = [n for n in region.kinds if region.has(n, *SORTED)], region.products
    after, before = {*products}, {*products}
    for node in rows:
        if any(i in after for i in node.all_input_nodes):
            after.add(node)
    for node in reversed(rows):
        if any(u in before for u in node.users):
            before.add(node)
    inside = {n for n in rows if n in products or n in after and n in before}
    inside |= {u for n in inside if _many(n) for u in n.users}
    # A row of biases that is looked up by expert is wider than the name of the expert, which then travels.
    for node in reversed(rows):
        read = [i for i in node.all_input_nodes if i in region.kinds]
        by_row = all(region.has(i, *SORTED) and not _many(i) for i in read) and not _many(node)
        for_them = node not in inside and node.users and all(u in inside for u in node.users)
        if for_them and by_row and _width(node) > sum(map(_width, read)):
            inside.add(node)
    return {n: None for n in region.kinds if n in inside}


def _width(node: fx.Node) -> int:
    """Count the bytes of a row."""
    val = node.meta["val"]
    return prod(int(n) for n in sizes(val)[1:]) * val.element_size()
