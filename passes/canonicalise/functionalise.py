"""Functionalisation: in-place operators on fresh values become their functional twins; what is written is the same."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor, fx

from autotp.ir.graph import computed, replace_node, tensors
from autotp.ir.op import Op, aten, packet_of

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
        could not be rewritten; in a region (under `no_grad`) one that writes to what the region is given.
    """
    if not all(_functionalise(region, set()) is not None for region in regions(graph)):
        return None
    return _functionalise(graph, state)


def _functionalise(graph: fx.Graph, state: Set[str]) -> dict[int, str] | None:
    writes = [n for n in graph.nodes if mutates(n)]
    if not writes:
        return {}
    drop_inert(graph)
    positions = _lift(graph, state)
    shared = _Memory(graph, state)
    if not all(shared.rewrite(n) or shared.rewrite_part(n) for n in writes if n in shared.of):
        _lower(graph, positions)
        return None
    for node in [n for n in reversed(graph.nodes) if n in writes and not n.users]:
        graph.erase_node(node)  # written and never read, such as an initial value drawn at random
    return positions


def _lift(graph: fx.Graph, state: Set[str]) -> dict[int, str]:
    """Make the last value of each buffer that is written to a further output: as yet the buffer itself, or what
    the export copies into it last."""
    output = graph.output_node()
    final: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if mutates(n)]:
        buffer = written_operand(node)
        if buffer is None or buffer.op != "placeholder" or buffer.name not in state:
            continue
        final[buffer] = buffer
        value = node.args[1] if node.target is aten.copy_.default and not node.users else None
        if isinstance(value, fx.Node) and all(u <= node for u in buffer.users):
            final[buffer] = value
            graph.erase_node(node)
    first = len(output.args[0])  # type: ignore[arg-type]
    output.args = ((*output.args[0], *final.values()),)  # type: ignore[misc]
    return {first + i: buffer.name for i, buffer in enumerate(final)}


def _lower(graph: fx.Graph, positions: dict[int, str]) -> None:
    """Undo `_lift`."""
    output = graph.output_node()
    leaf_of = {n.name: n for n in graph.find_nodes(op="placeholder")}
    values = list(output.args[0])  # type: ignore[arg-type]
    for position in sorted(positions, reverse=True):
        value = values.pop(position)
        if value is not leaf_of[positions[position]]:
            with graph.inserting_before(output):
                graph.call_function(aten.copy_.default, (leaf_of[positions[position]], value)).meta = dict(value.meta)
    output.args = (tuple(values),)


def mutates(node: fx.Node) -> bool:
    """Say whether the operator writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def regions(graph: fx.Graph) -> list[fx.Graph]:
    """List the graphs of wrapped regions, and of those within."""
    owner, graphs = graph.owning_module, []
    for module in owner.modules() if owner is not None else ():
        graphs += [module.graph] if isinstance(module, fx.GraphModule) and module.graph is not graph else []
    return graphs


def is_region(node: fx.Node) -> bool:
    """Say whether a node runs a wrapped region, such as one under `torch.no_grad` or autocast."""
    return node.op == "call_function" and "wrap_with" in str(node.target)


def without_gradient(region: fx.Node) -> bool:
    """Say whether a region stands under `torch.no_grad`."""
    return "set_grad_enabled" in str(region.target) and region.args[0] is False


def region_body(region: fx.Node, owner: Any) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """Read a wrapped region.

    Args:
        region: the call. owner: the module that holds its graph.

    Returns: the region's module, and its placeholders with the operands that they stand for.
    """
    # A call's arguments are some of its own (whether gradients are on, a type), the region, and the region's operands.
    at = next(i for i, a in enumerate(region.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    module = getattr(owner, region.args[at].target)  # type: ignore[union-attr,arg-type]
    placeholders = module.graph.find_nodes(op="placeholder")
    return module, dict(zip(placeholders, region.args[at + 1 :], strict=True))


def written_operand(node: fx.Node) -> fx.Node | None:
    """Give the operand that an in-place operator writes to."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def memory(graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """Number the storages that each value is in; equal numbers are shared memory."""
    return {n: set(map(_place, tensors(n))) for n in graph.nodes}


def _place(value: Tensor) -> int:
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # of those that `torch.vmap` makes
        return id(value)


def drop_inert(graph: fx.Graph) -> None:
    """Put the operand itself where that is what an operator returns: dropout outside training, of which fake tensors
    believe that it makes a copy, and a conversion to the type and device that are there."""
    for n in list(graph.nodes):
        dropout = n.target in DROPOUTS and not (Op.of(n).args["train"] and Op.of(n).args["p"])
        converted = packet_of(n.target) is aten.to
        if dropout or (converted and _place(n.meta["val"]) == _place(n.args[0].meta["val"])):
            replace_node(n, n.args[0])


class _Memory:
    """Memory that values of a graph share, while in-place operators are rewritten."""

    def __init__(self, graph: fx.Graph, state: Set[str]) -> None:
        self.of, self.state = memory(graph), state

    def rewrite(self, node: fx.Node) -> bool:
        """Make one in-place operator functional; False where another value sees what it writes."""
        target, twin = written_operand(node), _twin(node)
        if (
            target is None
            or twin is None
            or len(self.of[target]) != 1
            or self._leaf(target, node)
            or self._later(target, node)
        ):
            return False
        node.target = twin
        self._renew(target, node, node)
        target.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)
        return True

    def rewrite_part(self, write: fx.Node) -> bool:
        """Make `x[...].add_(y)` functional: the new part is put into its whole, and other parts are cut out again.

        Every later use of a name for the old memory becomes a use of what is made here.
        """
        # From the part that is written outwards, to the value that it was cut out of.
        part = whole = written_operand(write)
        twin, cuts = _twin(write), []
        while whole is not None and whole.target in PARTS:
            cuts.append(whole)
            whole = written_operand(whole)
        if twin is None or whole is None or whole.op != "call_function" or self._leaf(whole, write):
            return False
        # Other names of that memory that are read later must show what is written: each is cut out anew, by its views.
        stale = {n: self._path(n, whole) for n in self._later(whole, write)}
        if None in stale.values():
            return False
        with write.graph.inserting_before(write):
            # The new part first, then each cut undone, the innermost first.
            value = new = self._call(write, twin, part, *write.args[1:], **write.kwargs)
            for cut in cuts:
                value = self._call(write, PARTS[cut.target], cut.args[0], value, *cut.args[1:])
            fresh = {whole: value, **{n: self._replay(write, value, path or []) for n, path in stale.items()}}
        self._renew(whole, write, value)
        for old, node in fresh.items():
            old.replace_all_uses_with(node, delete_user_cb=lambda user: user > write)
        replace_node(write, new)
        del self.of[write]
        return True

    def _path(self, name: fx.Node, whole: fx.Node) -> list[fx.Node] | None:
        """List the views that lead from the whole to this name of its memory; None where others than views do."""
        path = []
        while name is not whole:
            base = written_operand(name)
            if base is None or mutates(name) or not self.of[base] & self.of[name] or len(self.of[name]) != 1:
                return None
            path.insert(0, name)
            name = base
        return path

    def _replay(self, write: fx.Node, value: fx.Node, path: list[fx.Node]) -> fx.Node:
        memory = self.of[value]
        for view in path:
            value = self._call(write, view.target, value, *view.args[1:], **view.kwargs)
            self.of[value] = memory
        return value

    def _renew(self, target: fx.Node, write: fx.Node, value: fx.Node) -> None:
        """Move later values in the target's memory to new memory, that only this write fills."""
        for later in (n for n, places in self.of.items() if n >= write and places & self.of[target]):
            self.of[later] = {*(self.of[later] - self.of[target]), id(value)}

    def _call(self, write: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node in place of `write`, with memory of its own."""
        node = write.graph.call_function(target, args, kwargs)
        node.meta, self.of[node] = {**write.meta, "val": computed(node)}, {id(node)}
        return node

    def _names(self, target: fx.Node, write: fx.Node) -> list[fx.Node]:
        """List other names of the target's memory from before the write."""
        return [n for n, places in self.of.items() if n < write and n is not target and places & self.of[target]]

    def _later(self, target: fx.Node, write: fx.Node) -> list[fx.Node]:
        """List those of the names that are read after the write."""
        return [n for n in self._names(target, write) if max(n.users, default=write) > write]

    def _leaf(self, target: fx.Node, write: fx.Node) -> bool:
        """Say whether an input or a weight has the memory of `target`, but for a buffer itself."""
        leaves = [n for n in [*self._names(target, write), target] if n.op in ("placeholder", "get_attr")]
        if target.op == "placeholder":  # one buffer may have several names
            leaves = [n for n in leaves if n.name not in self.state]
        return bool(leaves)


def _twin(node: fx.Node) -> Any:
    """Find the functional operator that makes the same values in the same dtype; None where there is none."""
    name, overload = str(node.target).split(".")[1], str(node.target).split(".")[-1]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    twin = getattr(packet, overload, None)
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        same = twin is not None and twin(*args, **kwargs).dtype == node.meta["val"].dtype
    except (RuntimeError, TypeError, AttributeError):
        return None
    return twin if same else None
