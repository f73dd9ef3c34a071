"""Savings of a rank's program on the sum of its calls: communication under products, all-reduces that are sent as one.

The solver sees what `overlap_products.py` and `gradient_bucket.py` of optimise do afterwards, by the same formulas
(`autotp.cost.overlap`): f and g under the gradients of the weights, g and g* in chunks, and the gradients of a block's
whole parameters in one call.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autotp.cost.collective_costs import call_seconds, mostly_start
from autotp.cost.overlap import LEAST_LAUNCHES, OverlapModel, Product, hidden_seconds
from autotp.cost.prices import Prices
from autotp.cost.solver.problem import Problem, Use, ValueId
from autotp.cost.solver.savings import Cap, ChoiceKey, Conversion, Saving, most
from autotp.ir.graph import Leaf, resolve, shape_of, tensor_at, tensors
from autotp.ir.layouts import I, Layout, P, R, Shard
from autotp.ir.op import Ops, dtype_name, packet_of
from autotp.ir.scopes import block_of
from autotp.passes.optimise.products import VIEWS, product_of

Reader = tuple[int, Product]  # number of the item, and the product that it is


@dataclass
class Savings:
    """The savings of a problem.

    Attributes:
        problem: without them. heads: the node of each item, as far as items have one.
        prices: of operators and conversions; ops: the calls by node; leaves: by node.
    """

    problem: Problem
    heads: Sequence[fx.Node]
    prices: Prices
    ops: Ops
    leaves: Mapping[fx.Node, Leaf]

    def __post_init__(self) -> None:
        self.makers: dict[ValueId, tuple[int, int]] = {}
        for i, item in enumerate(self.problem.items):
            self.makers |= {value: (i, k) for k, value in enumerate(item.outs)}
        self.by_value: dict[ValueId, list[Use]] = defaultdict(list)
        for use in self.problem.uses:
            self.by_value[use.value].append(use)
        prices = self.prices
        self.model = OverlapModel(prices.tp, prices.cluster, prices.objective.training)
        self.least = LEAST_LAUNCHES * prices.cluster.launch_overhead

    def all(self) -> list[Saving]:
        """Return what there is to save: nothing on one rank, or over an axis with prices of its own."""
        if self.prices.tp == 1 or self.prices.surcharge is not None:
            return []
        beside = [*self._hidden()] if self.prices.cluster.overlaps else []
        return [*beside, *self._bucketed()] if self.prices.objective.training else beside

    # ---- communication under products ------------------------------------------------------------------------------

    def _hidden(self) -> Iterator[Saving]:
        for k, use in enumerate(self.problem.uses):
            parts = [caps for caps in (*self._read(k, use), *self._dealt(k, use)) if most(caps) > 0]
            if parts:
                yield Saving("hidden", tuple(parts), use.count)

    def _read(self, k: int, use: Use) -> Iterator[tuple[Cap, ...]]:
        """Give the caps of f and g before products: backward under their weights' gradients, g in chunks forward."""
        readers = self._products(use)
        if not readers:
            return
        # Forward, an all-gather runs in chunks beside the products of the chunks before; backward, the gradient's
        # collective runs beside the products that make the weights' gradients.
        size, products = self._size(use.value), [p for _, p in readers]
        forward = self.model.gathering(size, self._rows(use.value), products).saved
        parts = sum(map(self.model.product, products))
        graded = self.prices.objective.training and use.value[0] in self.prices.grads  # type: ignore[index]
        seconds: dict[Conversion, float] = {}
        chunks: dict[Conversion, float] = {}
        for a in self._layouts(use):
            gathers = self._in_chunks(use.value, a)
            back = (self.prices.one_way(P, a.dual, size) or 0.0) if graded else 0.0
            # The optimisation takes every product for split, and leaves alone what then saves too little.
            if (a == I or gathers) and hidden_seconds(back, parts) + gathers * forward > self.least:
                seconds[k, a, R] = back
                chunks |= {(k, a, R): forward} if gathers else {}
        if not seconds:
            return
        # The arithmetic beside it is that of the choice that each reader takes: a split product computes its share.
        arithmetic: dict[ChoiceKey, float] = {}
        for i, product in readers:
            alone = OverlapModel(1, self.prices.cluster, True).product(product)
            arithmetic |= dict.fromkeys(self._whole(i), alone)
            arithmetic |= dict.fromkeys(self._whole(i, split=True), self.model.product(product))
        yield Cap(seconds), Cap(choices=arithmetic)
        # In chunks only if all readers are split: one that runs whole would wait for the last chunk.
        yield Cap(chunks), *(Cap(choices=dict.fromkeys(self._whole(i, split=True), forward)) for i, _ in readers)

    def _dealt(self, k: int, use: Use) -> Iterator[tuple[Cap, ...]]:
        """Give the caps of g* after a product that nothing else reads: in chunks."""
        producer = self._maker(use.value)
        if producer is None:
            return
        targets = [b for b in self._layouts(use) if self._in_chunks(use.value, b)]
        if not targets:
            return
        i, product = producer
        saved = self.model.dealing(self._size(use.value), self._rows(use.value), product).saved
        if saved <= self.least:
            return
        summed: dict[ChoiceKey, float] = {
            (i, c.ins, c.outs): saved for c in self.problem.items[i].choices if P in c.outs
        }
        others: dict[Conversion, float] = {(k, P, b): -saved for b in self._layouts(use) if b != P and b not in targets}
        seconds: dict[Conversion, float] = {(k, P, b): saved for b in targets}
        yield Cap(seconds), Cap(choices=summed), Cap(others, always=saved)

    def _products(self, use: Use) -> list[Reader]:
        """List the products by matrices that read a value, or its view as a matrix; none where others read it too."""
        nodes = [(i, self.heads[i]) for i, _ in use.consumers if i < len(self.heads)]
        if len(nodes) == 1 and self._flattens(nodes[0][1]):
            matrix, uses = len(shape_of(nodes[0][1])) == 2, self.by_value[nodes[0][1], 0]
            return self._products(uses[0]) if matrix and len(uses) == 1 else []
        out = []
        for (i, node), (_, slot) in zip(nodes, use.consumers, strict=False):
            product = product_of(node)
            if product is None or self.ops[node].slots[slot] is not product.x or product.weight is product.x:
                return []
            out.append((i, self._sized(node, product.x, product.weight)))
        return out if len(nodes) == len(use.consumers) else []

    def _flattens(self, node: fx.Node) -> bool:
        """Return whether it views rows of several dimensions as those of a matrix, or back."""
        if packet_of(node.target) not in VIEWS:
            return False
        before, after = shape_of(node.all_input_nodes[0]), shape_of(node)
        return len(before) > 0 and len(after) > 1 and before[-1] == after[-1]

    def _maker(self, value: ValueId) -> Reader | None:
        """Find the product that makes a value, through a view of its rows; None where another operator does."""
        node: fx.Node = value[0]  # type: ignore[index]
        if node in self.ops and self._flattens(node) and len(self.by_value[self._value(node)]) == 1:
            node = self._value(node)[0]
        product = product_of(node) if node in self.ops else None
        if product is None:
            return None
        return self.makers[node, 0][0], self._sized(node, product.x, product.weight)

    def _value(self, node: fx.Node) -> tuple[fx.Node, int]:
        """Find the class of the value that a view is of."""
        item = self.problem.items[self.makers[node, 0][0]]
        return next(iter(item.ins[0]))  # type: ignore[return-value]

    def _sized(self, node: fx.Node, x: fx.Node, weight: fx.Node) -> Product:
        operand, result, weight_size = (self.prices.bytes(tensor_at(resolve(n))) for n in (x, node, weight))
        return Product(operand, result, weight_size, self.prices.flops(node), dtype_name(tensors(node)[0].dtype))

    def _whole(self, i: int, split: bool = False) -> list[ChoiceKey]:
        """List choices of a product that read the value whole, as g and f leave it; with `split` those that split."""
        item, product = self.problem.items[i], product_of(self.heads[i])
        assert product is not None
        slot = self.ops[self.heads[i]].slots.index(product.x)
        fits = (c for c in item.choices if c.ins[slot] == R and (c.factor is not None or not split))
        return [(i, c.ins, c.outs) for c in fits]

    def _layouts(self, use: Use) -> list[Layout]:
        """Return what a value may be produced in or read in."""
        i, k = self.makers[use.value]
        outputs = [c.outs[k] for c in self.problem.items[i].choices]
        inputs = [c.ins[slot] for j, slot in use.consumers for c in self.problem.items[j].choices]
        return list(dict.fromkeys([*outputs, *inputs]))

    def _in_chunks(self, value: ValueId, layout: Layout) -> bool:
        """Return whether a layout shards by one run of rows, so that they can go in chunks."""
        if not isinstance(layout, Shard) or layout.sharded_dim is None:
            return False
        return layout.dim < tensor_at(value).ndim - 1 and layout.plain(self.prices.tp)

    def _size(self, value: ValueId) -> float:
        return self.prices.bytes(tensor_at(value))

    def _rows(self, value: ValueId) -> int:
        """Count the rows of a rank's slice of a value, all dimensions but the last together."""
        return math.prod(map(self.prices.hint, shape_of(value[0])[:-1])) // self.prices.tp  # type: ignore[index]

    # ---- all-reduces that are sent as one --------------------------------------------------------------------------

    def _bucketed(self) -> Iterator[Saving]:
        """Yield the savings of the gradients of a block's small parameters that are read whole."""
        ranks, cluster = self.prices.tp, self.prices.cluster
        groups: dict[tuple, list[int]] = defaultdict(list)
        for k, use in enumerate(self.problem.uses):
            leaf = self.leaves.get(use.value[0])  # type: ignore[index]
            if leaf is None or not leaf.kind.trained or leaf.node not in self.prices.grads:
                continue
            if mostly_start(self._size(use.value), ranks, cluster):
                groups[block_of(leaf.name), leaf.node.meta["val"].dtype, use.count].append(k)
        start = call_seconds("all_reduce", 0, ranks, cluster)
        for (*_, count), uses in groups.items():
            caps = []
            for j in uses:  # one start is paid, whichever of them is first
                caps.append(Cap({(k, I, R): start for k in uses if k != j}))
            if len(uses) > 1:
                yield Saving("bucketed", (tuple(caps),), count)
