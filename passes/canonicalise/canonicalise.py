"""Canonicalise: one form for what the rules need to see. No arithmetic changes: tp=1 stays bitwise the original."""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autotp import compat
from autotp.ir.graph import Capture, Emit, before, copy_graph, differentiable, replace_node, replace_results
from autotp.ir.marks import inherit, mark, write
from autotp.ir.op import Op, aten, expression, is_tensor, packet_of, sizes
from autotp.kernels.functions import apply, functions_as
from autotp.log import log
from autotp.passes.base import Changes, Pass
from autotp.rules.core import function_of

from .functionalise import is_region, region_body, without_gradient
from .running_statistics import RunningStatistics


class MergeTied(Pass[Capture]):
    """Merges the leaves of a parameter that is reached by several names."""

    name = "merge-tied"

    def run(self, program: Capture) -> Changes:
        first: dict[str, fx.Node] = {}
        leaves = []
        for leaf in program.leaves:
            owner = program.aliases.get(leaf.name, leaf.name) if leaf.kind.saved else None
            if owner is not None and owner in first:
                replace_node(leaf.node, first[owner])
                continue
            if owner is not None:
                first[owner], leaf.name = leaf.node, owner
            leaves.append(leaf)
        merged = len(program.leaves) - len(leaves)
        program.leaves[:] = leaves
        return Changes(merged, "further names of one tensor are one leaf")


class InlineRegions(Pass[Capture]):
    """Inlines regions under `torch.no_grad` (or any wrapped submodule); the results of the former carry no gradient.

    Afterwards every call says whether it stands in one; what a later pass puts in must say it too.
    """

    name = "inline-regions"

    def run(self, program: Capture) -> Changes:
        regions, owner = [*filter(is_region, program.graph.nodes)], program.graph.owning_module
        program.autocast |= any("wrap_with_autocast" in str(n.target) and n.args[2] is True for n in regions)
        for node in regions:
            carries = differentiable(program) if without_gradient(node) else set()
            _inline(program.graph, owner, node, bool(carries & set(node.all_input_nodes)))
        for node in program.graph.nodes:
            if node.op == "call_function" and mark(node).no_grad is None:
                write(node, no_grad=False)
        return Changes(len(regions), "regions are plain nodes")


def _inline(graph: fx.Graph, owner: Any, node: fx.Node, cut: bool) -> None:
    """Put the nodes of a region in place of it, those of regions within too; with `cut`, detach its results."""
    module, env = region_body(node, owner)
    body, no_grad = module.graph, without_gradient(node)
    # Innermost first, so that what is copied out holds no further region.
    for inner in filter(is_region, list(body.nodes)):
        _inline(body, module, inner, without_gradient(inner))
    with graph.inserting_before(node):
        calls = [n for n in body.nodes if n.op not in ("placeholder", "output") and (n.op != "get_attr" or n.users)]
        copy_graph(calls, env, graph)
        for inner in calls:
            env[inner].meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))
            write(env[inner], no_grad=no_grad or mark(inner).no_grad or False)
        results = [env[r] for r in body.output_node().args[0]]  # type: ignore[union-attr]
        for i, r in enumerate(results) if cut else ():
            if is_tensor(r):  # a region may give sizes
                results[i] = graph.call_function(aten.detach.default, (r,))
                results[i].meta = dict(r.meta)
    replace_results(node, results)


class DropChecks(Pass[Capture]):
    """Drops the assertions of the export; `Capture.accepts` checks sizes at the door instead."""

    name = "drop-checks"

    def run(self, program: Capture) -> Changes:
        names = ("_assert_", "sym_constrain_range", "_guards_fn")
        calls = [n for n in program.graph.nodes if n.op.startswith("call")]
        checks = dict.fromkeys(n for n in calls for x in names if x in str(n.target))
        for n in checks:
            program.graph.erase_node(n)
        unread = bool(program.graph.eliminate_dead_code())
        return Changes(len(checks) + unread, "assertions, and what nothing reads, are left out")


class DropIdentities(Pass[Capture]):
    """Drops casts to the same type, full slices and aliases."""

    name = "drop-identities"

    def run(self, program: Capture) -> Changes:
        candidates = (aten.to, aten.alias, aten.slice, aten.expand, aten.lift_fresh_copy, aten._to_copy)
        count = 0
        for n in list(program.graph.nodes):
            if packet_of(n.target) not in candidates or not is_tensor(n.args[0]):
                continue
            a, b = n.args[0].meta["val"], n.meta["val"]
            strided = n.kwargs.get("memory_format") is not None
            if a.dtype == b.dtype and a.device == b.device and sizes(a) == sizes(b) and not strided:
                replace_node(n, n.args[0])
                count += 1
        return Changes(count, "operators that give their operand are left out")


class TileSlices(Pass[Capture]):
    """Replaces slices that together tile one dimension of a value by one split, so that each piece can be sharded."""

    name = "tile-slices"

    def run(self, program: Capture) -> Changes:
        groups: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
        for n in program.graph.nodes:
            if n.target is aten.slice.Tensor and Op.of(n).args["step"] == 1:
                groups[n.args[0], Op.of(n).dim()].append(n)  # type: ignore[index]
        tiled = sum(self._tile(dim, cuts) for (_, dim), cuts in groups.items())
        return Changes(tiled, "dimensions in slices are split at once")

    def _tile(self, dim: int, cuts: list[fx.Node]) -> bool:
        graph, source = cuts[0].graph, cuts[0].all_input_nodes[0]
        total = expression(source.meta["val"].shape[dim])
        spans = {n: _span(n, dim, total) for n in cuts}
        points = sorted({s for s in spans.values() if s is not None})
        # Slices that overlap, leave gaps or have symbolic ends are no partition of the dimension, and stay slices.
        gaps = any(a[1] != b[0] for a, b in pairwise(points))
        if None in spans.values() or len(points) < 2 or points[0][0] != 0 or points[-1][1] != total or gaps:
            return False
        with graph.inserting_before(cuts[0]):
            whole = graph.call_function(aten.split_with_sizes.default, (source, [b - a for a, b in points], dim))
        pieces: dict[tuple[int, int], fx.Node] = {}
        for n in cuts:
            span = spans[n]
            assert span is not None
            if span not in pieces:
                with graph.inserting_after(whole):
                    pieces[span] = graph.call_function(operator.getitem, (whole, points.index(span)))
                pieces[span].meta = dict(n.meta)
            replace_node(n, pieces[span])
        whole.meta = {**cuts[0].meta, "val": [pieces[p].meta["val"] for p in points]}
        whole.meta["nn_module_stack"] = source.meta.get("nn_module_stack") or whole.meta.get("nn_module_stack")
        return True


def _span(node: fx.Node, dim: int, total: Any) -> tuple[int, int] | None:
    start, length = Op.of(node).args["start"] or 0, expression(node.meta["val"].shape[dim])
    if not isinstance(start, int) or not isinstance(length, int) or not isinstance(total, int):
        return None
    start = max(start + total, 0) if start < 0 else min(start, total)
    return start, start + length


class RebindSizes(Pass[Capture]):
    """Reads sizes of intermediate values off the inputs that they come from: shards have other sizes."""

    name = "rebind-sizes"

    def run(self, program: Capture) -> Changes:
        count = 0
        for n in list(program.graph.nodes):
            if n.target is not aten.sym_size.int or not is_tensor(n.args[0]):
                continue
            size = expression(n.meta["val"])
            if isinstance(size, int):
                replace_node(n, size)
            elif size in program.symbols:
                n.args = program.symbols[size]  # type: ignore[index,assignment]
            else:
                continue
            count += 1
        return Changes(count, "sizes are read off inputs")


# ---- composites ------------------------------------------------------------------------------------------------------

# Operators of libraries that are written as others of torch's become these, which have rules. So an affine
# quantisation, which torchao has as one operator, is views, sums, products and maxima, and where its groups may be
# split is read off the views.


class Composites(Pass[Capture]):
    """Decomposes composite operators that have no rule.

    One whose gradient is wanted stays where somebody wrote a backward for a part of it, which a trace would lose.
    """

    name = "composites"

    def idle(self, program: Capture) -> str:
        """Run only where there are some."""
        return "" if _composites(program.graph) else "every operator is torch's own, or has a rule"

    def run(self, program: Capture) -> Changes:
        graded, count = _graded(program), 0
        for node in _composites(program.graph):
            try:
                body, functions = _traced(node)
            except Exception as error:  # whatever a library's operator may ask of its operands
                log.debug("%s stays: %s", node.target, error)
                continue
            if node not in graded or not functions:
                _replace(node, body)
                count += 1
        return Changes(count, "composite operators are the operators that they are made of")


def _graded(program: Capture) -> set[fx.Node]:
    """Find the values that carry a gradient to what is trained now: the parts of a quantised weight never are."""
    carries = differentiable(program)
    trained_nodes = {x.node for x in program.leaves if getattr(x.node.meta.get("val"), "requires_grad", False)}
    for node in program.graph.nodes:
        if node in carries and trained_nodes & set(node.all_input_nodes):
            trained_nodes.add(node)
    return trained_nodes


def _composites(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if compat.is_composite(n.target) and function_of(n.target) is None]


def _replace(node: fx.Node, body: fx.Graph) -> None:
    operands = [*filter(is_tensor, node.all_input_nodes)]
    env: dict[fx.Node, Any] = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
    calls = [n for n in body.nodes if n.op == "call_function"]
    with node.graph.inserting_before(node):
        copy_graph(calls, env, node.graph)
    for inner in calls:
        inherit(env[inner], node, inner.meta["val"], no_grad=mark(node).no_grad)
    results = fx.map_arg(body.output_node().args[0], lambda n: env[n])
    if isinstance(node.meta["val"], Tensor):
        replace_node(node, results)
    else:
        replace_results(node, results)  # type: ignore[arg-type]


def _traced(node: fx.Node) -> tuple[fx.Graph, list[Any]]:
    """Trace an operator into the graph of its parts, and list the functions in it that have a backward of their own."""
    target: Any = node.target
    operands = [*filter(is_tensor, node.all_input_nodes)]
    functions: list[Any] = []

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        functions.append(function)
        return apply(function, *args, **kwargs)

    def call(*values: Tensor) -> Any:
        value_of = dict(zip(operands, values, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: value_of.get(n, n.meta["val"]))
        return target(*args, **kwargs)

    values = [n.meta["val"].detach() for n in operands]
    mode = compat.mode_of(values)
    with mode, torch.no_grad(), functions_as(note):
        return make_fx(call)(*values).graph, functions


# ---- examples --------------------------------------------------------------------------------------------------------

# Operands that are only examples: what is read of them is their dtype, device or shape, which are known.

FACTORIES: dict[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


SHAPED: dict[Any, Any] = {
    aten.expand_as.default: aten.expand.default,
    aten.view_as.default: aten.view.default,
    aten.reshape_as.default: aten.reshape.default,
}


class DropExamples(Pass[Capture]):
    """Replaces `new_zeros(x, ...)`, `x.type_as(y)` and `x.expand_as(y)` by operators that do not read the example, so
    that it may have any layout."""

    name = "drop-examples"

    def run(self, program: Capture) -> Changes:
        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        count = sum(self._rewrite_new(n) or self._cast(n) or self._shaped(n) for n in calls)
        return Changes(count, "operators do not read the example of a dtype or shape")

    def _rewrite_new(self, node: fx.Node) -> bool:
        if node.target not in FACTORIES:
            return False
        val, (_, *sizes) = node.meta["val"], node.args
        node.kwargs = {**node.kwargs, "dtype": val.dtype, "device": val.device}
        node.args, node.target = tuple(sizes), FACTORIES[node.target]
        return True

    def _cast(self, node: fx.Node) -> bool:
        if node.target not in (aten.type_as.default, aten.to.other) or not is_tensor(node.args[0]):
            return False
        args, val = Op.of(node).args, node.meta["val"]
        if args["self"].meta["val"].device != val.device or args.get("copy") or args.get("memory_format") is not None:
            return False
        node.args, node.kwargs, node.target = (args["self"], val.dtype), {}, aten.to.dtype
        return True

    def _shaped(self, node: fx.Node) -> bool:
        if node.target not in SHAPED:
            return False
        x, like = node.args
        with before(node) as call:
            sizes = []
            for dim, size in enumerate(like.meta["val"].shape):  # type: ignore[union-attr]
                sizes.append(size if isinstance(size, int) else call(compat.sym_size, like, dim))
        node.args, node.target = (x, sizes), SHAPED[node.target]
        return True


# ---- what reads memory -----------------------------------------------------------------------------------------------

# Operators that read memory rather than values get an operand that is laid out as it was in the capture.


class Reshape(Pass[Capture]):
    """Turns views into reshapes: that memory allows them was decided on strides that real values need not have."""

    name = "reshape"

    def run(self, program: Capture) -> Changes:
        views = [n for n in program.graph.nodes if n.target is aten.view.default]
        for node in views:
            node.target = aten.reshape.default
        return Changes(len(views), "views are reshapes")


class LayOut(Pass[Capture]):
    """Puts operands of `as_strided`, which reads by place in memory, into the order in memory of the capture."""

    name = "lay-out"

    def run(self, program: Capture) -> Changes:
        views = [n for n in program.graph.nodes if n.target is aten.as_strided.default]
        count = sum(map(self._lay_out, views))
        return Changes(count, "operands are laid out in memory as they were captured")

    def _lay_out(self, node: fx.Node) -> bool:
        operand = node.all_input_nodes[0]
        order = dense_order(operand.meta["val"])
        if order is None:
            return False
        with before(node) as call:
            dense = call(aten.contiguous.default, call(aten.permute.default, operand, order))
        node.args = (dense, *node.args[1:])
        return True


def dense_order(val: Tensor) -> list[int] | None:
    """List the dimensions from the slowest to the fastest of a tensor that fills its memory; None where it does not."""
    if val.storage_offset() != 0 or val.untyped_storage().nbytes() != val.numel() * val.element_size():
        return None
    sizes = [expression(n) for n in val.shape]
    strides = [expression(n) for n in val.stride()]
    order, step = [], expression(1)
    for _ in sizes:
        fits = [d for d in range(len(sizes)) if d not in order and (strides[d] == step or sizes[d] == 1)]
        if not fits:
            return None
        order.append(fits[-1])
        step = expression(step * sizes[fits[-1]])
    return order[::-1]


# ---- complex scatters ------------------------------------------------------------------------------------------------

# Parts put into complex values, as real ones: torch has no gradient of its scatters for complex numbers.

# A scatter -> the names of its arguments that count dimensions.
SCATTERS: dict[Any, tuple[str, ...]] = {
    aten.select_scatter.default: ("dim",),
    aten.slice_scatter.default: ("dim",),
    aten.diagonal_scatter.default: ("dim1", "dim2"),
}


class ComplexScatters(Pass[Capture]):
    """Writes `select_scatter` and its like on complex values on pairs of real numbers, which are the same memory."""

    name = "complex-scatters"

    def run(self, program: Capture) -> Changes:
        scatters = [n for n in program.graph.nodes if n.target in SCATTERS and n.meta["val"].is_complex()]
        for node in scatters:
            with before(node) as call:
                replace_node(node, _on_pairs(node, call))
        return Changes(len(scatters), "parts are put into complex values as real ones")


def _on_pairs(node: fx.Node, call: Emit) -> fx.Node:
    """Write the scatter as one of pairs of real numbers, by `call`."""
    args = dict(Op.of(node).args)
    whole, part, rank = args.pop("self"), args.pop("src"), node.meta["val"].ndim
    args |= {name: args[name] % rank for name in SCATTERS[node.target]}
    if part.meta["val"].dtype != node.meta["val"].dtype:
        part = call(aten.to.dtype, part, node.meta["val"].dtype)
    pairs: list[fx.Node] = []
    for x in (whole, part):
        # A conjugate that is not computed yet has no pairs in memory.
        x = call(aten.resolve_conj.default, x) if x.meta["val"].is_conj() else x
        pairs.append(call(aten.view_as_real.default, x))
    if node.target is aten.diagonal_scatter.default:  # a diagonal is the last dimension
        pairs[1] = call(aten.transpose.int, pairs[1], -1, -2)
    return call(aten.view_as_complex.default, call(node.target, *pairs, *args.values()))


CANONICAL: tuple[Pass[Capture], ...] = (
    MergeTied(), InlineRegions(), Composites(), RunningStatistics(), DropChecks(), DropExamples(), DropIdentities(),
    ComplexScatters(), TileSlices(), RebindSizes(), Reshape(), LayOut(),
)  # fmt: skip
