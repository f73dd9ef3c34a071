"""In-place operators on fresh values become their functional twins; what is written stays the same."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, fx

from autotp import compat
from autotp.rules.core import Op, aten

# What cuts a part out of a value -> what puts one in.
PARTS: dict[Any, Any] = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
DROPOUTS = (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default)


def functionalise(graph: fx.Graph, state: Set[str]) -> dict[int, str] | None:
    """Rewrite `x.add_(y)` to `add(x, y)` with later uses of `x` redirected, where nothing else can notice the write.

    What is written to a buffer becomes a further output, so that the values that are read later are others.

    Args:
        graph: of an export whose fake values share memory where the real ones do.
        state: names of the placeholders that hold buffers.

    Returns: position of a further output -> name of the placeholder that takes it; None where some in-place operator
        could not be rewritten, such as those in regions (under `no_grad`).
    """
    if any(mutates(n) for region in regions(graph) for n in region.nodes):
        return None
    writes = [n for n in graph.nodes if mutates(n)]
    if not writes:
        return {}
    _drop_inert_dropouts(graph)
    taken = _lift(graph, state)
    shared = _Memory(graph, state)
    if not all(shared.rewrite(n) or shared.rewrite_part(n) for n in writes if n in shared.order):
        _lower(graph, taken)
        return None
    for node in [n for n in reversed(graph.nodes) if n in writes and not n.users]:
        graph.erase_node(node)  # written and never read, such as an initial value drawn at random
    return taken


def _lift(graph: fx.Graph, state: Set[str]) -> dict[int, str]:
    """What each buffer that is written to holds in the end becomes a further output: as yet the buffer itself, or what
    the export copies into it last."""
    output, order = graph.output_node(), {n: i for i, n in enumerate(graph.nodes)}
    final: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if mutates(n)]:
        buffer = written(node)
        if buffer is None or buffer.op != "placeholder" or buffer.name not in state:
            continue
        final[buffer] = buffer
        value = node.args[1] if node.target is aten.copy_.default and not node.users else None
        if isinstance(value, fx.Node) and all(order[u] <= order[node] for u in buffer.users):
            final[buffer] = value
            graph.erase_node(node)
    first = len(output.args[0])  # type: ignore[arg-type]
    output.args = ((*output.args[0], *final.values()),)  # type: ignore[misc]
    return {first + i: buffer.name for i, buffer in enumerate(final)}


def _lower(graph: fx.Graph, taken: dict[int, str]) -> None:
    """The reverse of `_lift`."""
    output = graph.output_node()
    named = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    values = list(output.args[0])  # type: ignore[arg-type]
    for position in sorted(taken, reverse=True):
        value = values.pop(position)
        if value is not named[taken[position]]:
            with graph.inserting_before(output):
                graph.call_function(aten.copy_.default, (named[taken[position]], value)).meta = dict(value.meta)
    output.args = (tuple(values),)


def mutates(node: fx.Node) -> bool:
    """Whether the operator writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def regions(graph: fx.Graph) -> list[fx.Graph]:
    """The graphs of wrapped regions, and of those within."""
    owner, found = graph.owning_module, []
    for module in owner.modules() if owner is not None else ():
        found += [module.graph] if isinstance(module, fx.GraphModule) and module.graph is not graph else []
    return found


def written(node: fx.Node) -> fx.Node | None:
    """The operand that an in-place operator writes to."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def memory(graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """The memory that each value lies in; equal numbers are shared memory."""
    return {n: {v.untyped_storage()._cdata for v in _tensors(n)} for n in graph.nodes}


def _drop_inert_dropouts(graph: fx.Graph) -> None:
    """Dropout outside training returns its operand itself; fake tensors believe that it makes a copy."""
    for n in list(graph.nodes):
        if n.target in DROPOUTS and not (Op.of(n).args["train"] and Op.of(n).args["p"]):
            n.replace_all_uses_with(n.args[0])
            graph.erase_node(n)


class _Memory:
    """Which values of a graph share memory, while in-place operators are rewritten."""

    def __init__(self, graph: fx.Graph, state: Set[str]) -> None:
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.of, self.state = memory(graph), state

    def rewrite(self, node: fx.Node) -> bool:
        """Make one in-place operator functional; False where another value sees what it writes."""
        target, twin = written(node), _twin(node)
        if target is None or twin is None or len(self.of[target]) != 1 or self._seen(target, node):
            return False
        node.target = twin
        for later in (n for n, i in self.order.items() if i >= self.order[node] and self.of[n] & self.of[target]):
            self.of[later] = {*(self.of[later] - self.of[target]), id(node)}  # new memory, that only this write fills
        target.replace_all_uses_with(node, delete_user_cb=lambda user: self.order[user] > self.order[node])
        return True

    def rewrite_part(self, write: fx.Node) -> bool:
        """Make `x[...].copy_(y)` functional: the part is put into its whole, and the result is used from there on."""
        part = whole = written(write)
        views: list[fx.Node] = []
        while whole is not None and whole.target in PARTS:
            views.append(whole)
            whole = written(whole)
        if write.target is not aten.copy_.default or not views or whole is None or write.users:
            return False
        if whole.op != "call_function" or self._seen(whole, write):
            return False
        with write.graph.inserting_before(write):
            made = self._call(write, aten.copy.default, part, write.args[1])
            for view in views:
                made = self._call(write, PARTS[view.target], view.args[0], made, *view.args[1:])
        for later in (n for n, i in self.order.items() if i > self.order[write] and self.of[n] & self.of[whole]):
            self.of[later] = {*(self.of[later] - self.of[whole]), id(made)}
        whole.replace_all_uses_with(made, delete_user_cb=lambda user: self.order[user] > self.order[write])
        write.graph.erase_node(write)
        del self.order[write]
        return True

    def _call(self, write: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A new node in place of `write`, with memory of its own."""
        node = write.graph.call_function(target, args)
        node.meta = {**write.meta, "val": target(*fx.map_arg(args, lambda n: n.meta["val"]))}
        self.order[node], self.of[node] = self.order[write], {id(node)}
        return node

    def _seen(self, target: fx.Node, write: fx.Node) -> bool:
        """Whether a leaf has the memory of `target` (but a buffer itself), or another of its names is read later."""
        names = [n for n in self.order if n is not target and n is not write and self.of[n] & self.of[target]]
        before = [n for n in names if self.order[n] < self.order[write]]
        leaves = [n for n in [*before, target] if n.op in ("placeholder", "get_attr")]
        if target.op == "placeholder":  # one buffer may have several names
            leaves = [n for n in leaves if n.name not in self.state]
        return bool(leaves) or any(self.order[user] > self.order[write] for n in before for user in n.users)


def _twin(node: fx.Node) -> Any:
    """The functional operator that makes the same values in the same dtype; None where there is none."""
    name, overload = str(node.target).split(".")[1], str(node.target).split(".")[-1]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    twin = getattr(packet, overload, None)
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        same = twin is not None and twin(*args, **kwargs).dtype == node.meta["val"].dtype
    except (RuntimeError, TypeError, AttributeError):
        return None
    return twin if same else None


def _tensors(node: fx.Node) -> list[Tensor]:
    return [v for v in compat.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
