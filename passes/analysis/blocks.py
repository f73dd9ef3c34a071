"""Name the parts of a model by the structure of its graph: attention, MLP, norms, embeddings, head, experts.

No name of a model or parameter is read. An attention is a softmax between two products of activations, or the fused
operator; an MLP is weight contractions joined by pointwise operators only; a norm multiplies a value by a statistic of
itself; an adapter is trained beside a frozen product, which is named as it would be without.
"""

from __future__ import annotations

import networkx as nx
from torch import fx

from autotp import compat
from autotp.cost.prices import LOOKUPS
from autotp.ir.graph import Alike, short_name
from autotp.ir.layouts import divide
from autotp.ir.op import Shape, factors_of, packet_of
from autotp.ir.program import GraphPart, HeadDims, Heads
from autotp.ir.scopes import innermost, module_path
from autotp.rules.core import product
from autotp.text import counted

from .dataflow import Dataflow, names

SOFTMAX = {"aten.softmax.int", "aten._softmax", "aten._safe_softmax"}
FUSED = ("aten.scaled_dot_product_attention", "dealt_attention")


def find_blocks(flow: Dataflow, same: Alike) -> list[GraphPart]:
    """Find the named parts of a captured and canonical graph, in the order of the graph.

    Args:
        flow: of the graph.
        same: node -> the equal node of the first repeated block (`autotp.passes.analysis.fold`).

    Returns:
        Disjoint sets of operators; operators without parameters may be in none, every parameter that is read is in one.
        `GraphPart.first` is an index of this list.
    """
    return _Finder(flow, same).run()


class _Finder:
    def __init__(self, flow: Dataflow, same: Alike) -> None:
        self.flow, self.same = flow, same
        self.claimed: set[fx.Node] = set()
        self.parts: list[tuple[str, str, list[fx.Node], Heads | None]] = []
        self.beside: dict[fx.Node, fx.Node] = {}  # first operator of an adapter -> the frozen product

    def run(self) -> list[GraphPart]:
        self._adapters()
        self._attentions()
        self._chains()
        self._norms()
        self._rest()
        placed = sorted(self.parts, key=lambda p: p[2][0])
        first: dict[object, int] = {}
        parts = []
        for i, (kind, detail, nodes, heads) in enumerate(placed):
            readers = [n for n in nodes if self.flow.parameters(n)]
            key = (kind, detail, tuple(self.same.get(n, n).name for n in readers))
            base = [self.beside[nodes[0]]] if kind == "adapter" else []
            frozen_leaves = {leaf for n in base for leaf in self.flow.parameters(n)}  # these are the product's
            parameters = dict.fromkeys(x for n in readers for x in self.flow.parameters(n))
            leaves = tuple(x for x in parameters if x not in frozen_leaves)
            module, equal = _module([*(readers or nodes), *base]), first.setdefault(key, i)
            parts.append(GraphPart(kind, detail, tuple(nodes), module, leaves, equal, heads))
        return parts

    def _claim(self, kind: str, detail: str, nodes: list[fx.Node], heads: Heads | None = None) -> None:
        free = sorted({*nodes} - self.claimed)
        self.claimed.update(free)
        self.parts.append((kind, detail, free, heads))

    # adapters

    def _adapters(self) -> None:
        """Claim what is trained beside or before a frozen product, with its rank."""
        flow = self.flow
        for adapter in flow.adapted.values():
            nodes = [n for n in adapter.nodes if n not in self.claimed]
            if not nodes:  # one whose result goes to two products
                continue
            module = _module([adapter.base, *(n for n in adapter.nodes if flow.parameters(n))])
            name = flow.program.names[flow.parameters(adapter.base)[0]]
            inside = name.startswith(f"{module}.")
            target = name.removeprefix(f"{module}.") if inside else ".".join(name.split(".")[-2:])
            rank = f"rank {adapter.rank} " if adapter.rank is not None else ""
            self._claim("adapter", f"{rank}{adapter.where} {target}", nodes)
            self.beside[nodes[0]] = adapter.base

    # attention

    def _attentions(self) -> None:
        """Claim fused attentions, and those that are spelled out: a softmax between two products without a weight."""
        for n in self.flow.ops:
            name = short_name(n.target)
            if n in self.claimed or n not in self.flow.roots:
                continue
            if name in FUSED:
                self._attention(n, n)
            elif name in SOFTMAX:
                _, behind = self.flow.back(self.flow.inputs(n))
                _, ahead = self.flow.ahead(n.users)
                # The softmax of a router stands between products with weights, and attends to nothing.
                scores = [p for p in behind if not self.flow.parameters(p)]
                sums = [p for p in ahead if not self.flow.parameters(p)]
                if scores and sums:
                    self._attention(scores[0], sums[0])

    def _attention(self, scores: fx.Node, sums: fx.Node) -> None:
        """Claim the operators from the projections of query, key and value to the output projection."""
        nodes = {scores, sums} | self._behind(scores) | self._behind(sums)
        between, outs = self.flow.ahead(sums.users)
        out = [p for p in outs if self.flow.weighted(p)]
        nodes |= set(out) | (set(between) if out else set())
        heads = self._heads(scores, sums, out[0] if out else None)
        kv = "" if heads.kv == heads.count else f", {counted(heads.kv, 'kv head')}"
        detail = f"{counted(heads.count, 'head')}{kv}, {heads.width} wide"
        self._claim("attention", detail, list(nodes), heads)

    def _behind(self, node: fx.Node) -> set[fx.Node]:
        """Collect operators behind `node`, up to its weight contractions; a low-rank pair of these counts as one."""
        between, products = self.flow.back(self.flow.inputs(node))
        nodes = {*between, *products} if products else set()
        work = list(products)
        while work:
            at = work.pop()
            between, products = self.flow.back(self.flow.inputs(at))
            if products and all(set(n.users) <= {*nodes, *between} for n in (*between, *products)):
                nodes |= {*between, *products}
                work += products
        return nodes

    def _heads(self, scores: fx.Node, sums: fx.Node, out: fx.Node | None) -> Heads:
        flow, op = self.flow, self.flow.ops[scores]
        # A fused attention has batch and heads before its last two dimensions; of a product of queries and keys its
        # rule says which loops are heads.
        if short_name(scores.target) in FUSED:
            dims = _before_last_two(op.ins[0]), _before_last_two(op.ins[1])
            width, value = op.ins[0][-1], op.ins[2][-1]
        else:
            dims, width = self._product_heads(scores), flow.width(scores)
            value = flow.ops[sums].outs[0][-1]
        count, kv = (product(map(op.ins[i].__getitem__, dims[i])) for i in (0, 1))
        if not dims[0] and out is not None:  # heads folded into the batch dimension: the output projection counts them
            count = kv = divide(flow.width(out), value) or 1
            dims = ((0,), (0,))
        # With grouped queries the keys are repeated on their way here. Each view of the keys alone that makes more of
        # them divides the heads, and the fewest are those that a rank must hold whole.
        kv_at: HeadDims = (scores, 1, dims[1])
        whole = names(flow.roots.get(op.slots[1], ()))
        for n in (n for n in flow.back([op.slots[1]])[0] if names(flow.roots[n]) == whole):
            grown = divide(product(flow.ops[n].outs[0]), product(flow.ops[n].ins[0])) if self._view(n) else 1
            fewer = divide(kv, grown) if grown not in (None, 1) else None
            if fewer is not None:
                at = tuple(d for d, m in enumerate(flow.ops[n].ins[0]) if m == fewer)[:1]
                kv, kv_at = fewer, (n, 0, at)
        return Heads(count, kv, width, value, (scores, 0, dims[0]), kv_at)

    def _view(self, node: fx.Node) -> bool:
        return node in self.flow.ops and len(self.flow.ops[node].slots) == 1 and len(self.flow.ops[node].outs) == 1

    def _product_heads(self, scores: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the dimensions of heads in both operands of a product of queries and keys."""
        outer = [f for f in factors_of(self.flow.rules[scores]) if f.outs[0] is not None]
        alone = [f for f in outer if f.ins[0] and not f.ins[1]]
        position = max(alone, key=lambda f: f.outs[0].dim, default=None)  # type: ignore[union-attr]
        many = [f for f in outer if f.ins[0] and f is not position and f.outs[0].dim > 0]  # type: ignore[union-attr]
        shared = [f for f in many if f.ins[1]]
        query_dims = tuple(f.ins[0].dim for f in many if f.ins[0])
        key_dims = tuple(f.ins[1].dim for f in shared if f.ins[1])
        return query_dims, key_dims

    # contractions joined by pointwise operators

    def _chains(self) -> None:
        flow = self.flow
        joined = nx.DiGraph()
        free = [n for n in flow.ops if flow.weighted(n) and n not in self.claimed]
        joined.add_nodes_from(free)
        for n in free:
            made_of = {r for x in flow.inputs(n) for r in names(flow.roots[x])}
            if made_of <= joined.nodes - {n}:
                joined.add_edges_from((r, n) for r in made_of)
        out = next(n for n in flow.program.graph.nodes if n.op == "output")
        outputs = set(flow.back(x for x in compat.tree_leaves(out.args) if isinstance(x, fx.Node))[1])
        for chain in nx.weakly_connected_components(joined):
            self._chain(sorted(chain), outputs)

    def _chain(self, chain: list[fx.Node], outputs: set[fx.Node]) -> None:
        """Claim contractions that only pointwise operators join, with what stands between them."""
        flow, products = self.flow, set(chain)
        inside: list[fx.Node] = []
        if len(chain) > 1:
            between = [n for product in chain for n in flow.back(flow.inputs(product))[0]]
            # A norm before the first product is behind it too, and is no part of the block.
            inside = [n for n in between if n in flow.roots and names(flow.roots[n]) & products]
        gates = {n for n, sides in flow.products if all(map(products.intersection, map(names, sides)))}
        experts = [leaf for leaf in map(flow.batched, chain) if leaf is not None]
        if experts:
            self._claim("experts", f"{experts[0].meta['val'].shape[0]} experts", chain + inside)
        elif len(chain) > 1:
            gated = "gated, " if gates & set(inside) else ""
            self._claim("mlp", f"{gated}{flow.width(chain[-1])} wide", chain + inside)
        elif chain[0] in outputs:
            self._claim("head", f"{flow.ops[chain[0]].outs[0][-1]} wide", chain)
        else:
            self._claim("other", short_name(chain[0].target), chain)

    # norms, embeddings, everything else

    def _norms(self) -> None:
        flow = self.flow
        for n, op in flow.ops.items():
            if "norm" in short_name(n.target) and n not in self.claimed and flow.parameters(n) and op.outs[0] in op.ins:
                self._claim("norm", short_name(n.target), [n])
        for n, sides in flow.products:
            for statistic, value in ((sides[0], sides[1]), (sides[1], sides[0])):
                reductions = [r for r, _ in statistic if flow.statistic(r, value)]
                if reductions and n not in self.claimed:
                    self._norm(n, reductions[0], names(value))
                    break

    def _norm(self, product: fx.Node, statistic: fx.Node, source: set[fx.Node]) -> None:
        """Claim a norm that is spelled out: from the product of a value and its statistic to the scale and shift."""
        flow = self.flow
        nodes, _ = flow.walk([product], lambda n: n.all_input_nodes, lambda n: n in source)
        at, scaled = product, False
        while True:
            live = [u for u in at.users if u in flow.ops and u in flow.roots]
            following = [u for u in live if flow.passes(u) and u not in flow.junctions]
            with_weight = [u for u in following if flow.parameters(u)]
            # The cast back to bfloat16 stands before the scale. After it a cast is the next operator's business.
            casts: list[fx.Node] = []
            if len(at.users) == 1 and not scaled:
                casts = [u for u in following if len(flow.ops[u].slots) == 1]
            if not with_weight and not casts:
                break
            at = (with_weight or casts)[0]
            scaled = scaled or bool(with_weight)
            nodes.append(at)
        # Without a parameter it decides nothing: x * sigmoid(x.mean()) is of the same form.
        if scaled:
            self._claim("norm", f"{short_name(statistic.target)} and scale", nodes)

    def _rest(self) -> None:
        """Claim embeddings, and the parameters that are in no other part, by the module that reads them."""
        others: dict[str, list[fx.Node]] = {}
        for n, op in self.flow.ops.items():
            leaves = self.flow.parameters(n)
            if n in self.claimed or not leaves or n in self.flow.weights:
                continue
            # A largest value is no part of the model by itself: a scale is made of it.
            if any(f.reduction == "max" for f in factors_of(self.flow.rules[n])):
                continue
            val = leaves[0].meta["val"]
            if packet_of(n.target) in LOOKUPS and op.slots[0] in self.flow.weights and val.ndim == 2:
                self._claim("embedding", f"{val.shape[0]} rows of {val.shape[1]}", [n])
            else:
                others.setdefault(_module([n]), []).append(n)
        for nodes in others.values():
            self._claim("other", ", ".join(dict.fromkeys(short_name(n.target) for n in nodes)), nodes)


def _before_last_two(shape: Shape) -> tuple[int, ...]:
    return (len(shape) - 3,) if len(shape) > 3 else ()


def _module(nodes: list[fx.Node]) -> str:
    """Give the innermost module that holds all the nodes."""
    return ("", *innermost(map(module_path, nodes)))[-1]
