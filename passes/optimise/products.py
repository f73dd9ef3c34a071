"""Products beside a conversion in a rank's graph: those that read what f or g gives, and those that g* scatters."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from autotp.comm.conversions import f, g, g_star
from autotp.comm.overlapped import ADDMM, LINEAR, MATMUL, grouped, scattered
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import Op, aten, packet_of
from autotp.ir.scopes import scope_path

from .expressions import calls, erase, one_region, value_of

# Operator -> (kind, names of its input, weight and bias); what else it takes must be as by default.
FORMS: dict[Any, tuple[str, str, str, str]] = {
    aten.linear: (LINEAR, "input", "weight", "bias"),
    aten.addmm: (ADDMM, "mat1", "mat2", "self"),
    aten.mm: (MATMUL, "self", "mat2", ""),
    aten.matmul: (MATMUL, "self", "other", ""),
}
VIEWS = (aten.reshape, aten.view)


class Product(NamedTuple):
    """A product of a value by a matrix.

    Attributes:
        node: the call; `kind`: as `autotp.comm.overlapped` names it.
        x, weight, bias: its operands.
    """

    node: fx.Node
    kind: str
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


class ProductGroup(NamedTuple):
    """A conversion and the products beside it: all that read what f or g gives, or the one that makes what g* scatters.

    Attributes:
        view: as a matrix of what is converted, or of what the product makes.
    """

    conversion: fx.Node
    products: tuple[Product, ...]
    view: fx.Node | None = None

    @property
    def gathers(self) -> bool:
        return self.conversion.target is g

    @property
    def deals(self) -> bool:
        return self.conversion.target is g_star

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        products = [p.node for p in self.products]
        return (self.conversion, *products) if self.view is None else (self.conversion, self.view, *products)


def product_of(node: Any) -> Product | None:
    """Read the node as a product, if it is one by a matrix, of values that are not complex."""
    form = FORMS.get(packet_of(node.target)) if isinstance(node, fx.Node) else None
    if form is None:
        return None
    kind, *names = form
    args = Op.of(node).args
    x, weight, bias = (args.get(name) for name in names)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or args.get("alpha", 1) != 1:
        return None
    good = _ndim(x) > 1 and _ndim(weight) == 2 and (bias is None or _ndim(bias) == 1) and args.get("beta", 1) == 1
    return Product(node, kind, x, weight, bias) if good and node.meta["val"].is_floating_point() else None


def _ndim(node: Any) -> int:
    return value_of(node).ndim


def over_tp(node: fx.Node, *targets: Any) -> bool:
    """Say whether this is one of these conversions over the tp axis."""
    return node.target in targets and mark(node).conversion is not None


def groups(graph: fx.Graph) -> Iterator[ProductGroup]:
    """Yield the conversions f and g of the graph that only products read, all in the same checkpointed region."""
    for node in list(graph.nodes):
        if not over_tp(node, f, g):
            continue
        # The value may be read through one view as a matrix, as GPT-2's Conv1D has it.
        view: Any = next(iter(node.users), None)
        alone = len(node.users) == 1 and calls(view, *VIEWS)
        view = view if alone and _same_columns(view) and _ndim(view) == 2 else None
        source = node if view is None else view
        readers = [product_of(user) for user in source.users]
        products = tuple(p for p in readers if p is not None and p.x is source and p.weight is not source)
        # What else reads the value would still need it whole, and gathered at once.
        if readers and len(products) == len(readers) and one_region([node, *(p.node for p in products)]):
            yield ProductGroup(node, products, view)


def dealt(graph: fx.Graph) -> Iterator[ProductGroup]:
    """Yield the g* of the graph that scatter what only a product makes."""
    for node in list(graph.nodes):
        if not over_tp(node, g_star):
            continue
        operand: Any = node.args[0]
        view = operand if calls(operand, *VIEWS) and len(operand.users) == 1 and _same_columns(operand) else None
        product = product_of(operand if view is None else view.args[0])
        dst: Any = node.args[2]
        if product is None or len(product.node.users) > 1:
            continue
        if dst.dim < _ndim(node) - 1 and one_region([node, product.node]):
            yield ProductGroup(node, (product,), view)


def _same_columns(view: fx.Node) -> bool:
    return value_of(view.args[0]).shape[-1] == value_of(view).shape[-1]  # type: ignore[arg-type]


def fuse(group: ProductGroup, chunks: int = 1, least: int = 1) -> fx.Node:
    """Put one call in the place of a conversion and its products.

    Args:
        group: the conversion and the products that read it; `movable`.
        chunks, least: as `autotp.comm.overlapped.grouped` takes them.
    """
    conversion, products = group.conversion, group.products
    graph, first = conversion.graph, min(p.node for p in products)
    for node in _late(group):
        first.prepend(node)
    kinds, weights, biases = zip(*((p.kind, p.weight, p.bias) for p in products), strict=True)
    args = (*conversion.args, list(kinds), list(weights), list(biases), chunks, False, least)
    scope = scope_path(conversion)
    with graph.inserting_before(first):
        call = graph.call_function(grouped, args, dict(conversion.kwargs))
        call.meta = {"val": tuple(p.node.meta["val"] for p in products)}
        write(call, scope=scope, axis="tp")
        for i, p in enumerate(products):
            item = graph.call_function(operator.getitem, (call, i))
            # A view that flattens x to [tokens, width], as GPT-2 has it, is fused too: the call gives [batch, tokens,
            # width].
            if group.view is not None:
                write(item, scope=scope)
                item = graph.call_function(aten.flatten.using_ints, (item, 0, -2))
            inherit(item, p.node, scope=scope)
            p.node.replace_all_uses_with(item)
    erase(group.nodes)
    return call


def fuse_dealt(group: ProductGroup, chunks: int, least: int) -> fx.Node:
    """Put one call in the place of a product and its g*, in the product's module.

    Args:
        group: the product and its conversion. chunks, least: as `autotp.comm.overlapped.scattered` takes them.
    """
    conversion, [product] = group.conversion, group.products
    graph = conversion.graph
    view = list(group.view.args[1])[:-1] if group.view is not None else None  # type: ignore[arg-type]
    args = (product.x, *conversion.args[1:], product.kind, product.weight, product.bias, view, chunks, least)
    with graph.inserting_before(conversion):
        call = graph.call_function(scattered, args, dict(conversion.kwargs))
    inherit(call, conversion, scope=scope_path(product.node), conversion=None)
    conversion.replace_all_uses_with(call)
    erase(group.nodes)
    return call


def movable(group: ProductGroup) -> bool:
    """Say whether all operands of the products can be there before the first: the others are made of parameters."""
    return all(i.op == "placeholder" for late in _late(group) for i in late.all_input_nodes)


def _late(group: ProductGroup) -> list[fx.Node]:
    """List operands made after the first product: in half precision the cast of v's weight may follow q's product."""
    first = min(p.node for p in group.products)
    return list(dict.fromkeys(t for p in group.products for t in (p.weight, p.bias) if t and not t < first))
