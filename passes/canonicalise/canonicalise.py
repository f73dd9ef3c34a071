"""Canonicalise: one form for what the rules need to see. No arithmetic changes: tp=1 stays bitwise the original."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

from torch import fx

from autotp.ir.graph import Capture, copy_graph, differentiable, replace_results
from autotp.ir.marks import mark, write
from autotp.ir.op import Op, aten, expression, is_tensor, sizes
from autotp.passes.base import Changes, Pass

from .composites import Composites
from .drop_examples import DropExamples
from .functionalise import is_region, region_body, without_gradient
from .running_statistics import RunningStatistics
from .strides import ComplexScatters, LayOut, Reshape


class MergeTied(Pass[Capture]):
    """A parameter reached by several names is one leaf."""

    name = "merge-tied"

    def run(self, program: Capture) -> Changes:
        first: dict[str, fx.Node] = {}
        leaves = []
        for leaf in program.leaves:
            owner = program.aliases.get(leaf.name, leaf.name) if leaf.kind.saved else None
            if owner is not None and owner in first:
                leaf.node.replace_all_uses_with(first[owner])
                program.graph.erase_node(leaf.node)
                continue
            if owner is not None:
                first[owner], leaf.name = leaf.node, owner
            leaves.append(leaf)
        merged = len(program.leaves) - len(leaves)
        program.leaves[:] = leaves
        return Changes(merged, "further names of one tensor are one leaf")


class InlineRegions(Pass[Capture]):
    """Regions under `torch.no_grad` (or any wrapped submodule) become plain nodes; their results carry no gradient.

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
    """The nodes of a region in place of it, those of regions within too; with `cut`, its results are detached."""
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
        if cut:
            for i, r in enumerate(results):
                results[i] = _detach(graph, r) if is_tensor(r) else r  # a region may give sizes
    replace_results(node, results)


def _detach(graph: fx.Graph, node: fx.Node) -> fx.Node:
    out = graph.call_function(aten.detach.default, (node,))
    out.meta = dict(node.meta)
    return out


class DropChecks(Pass[Capture]):
    """Assertions of the export; `Capture.accepts` checks sizes at the door instead."""

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
    """Casts to the same type, full slices and aliases: the value itself."""

    name = "drop-identities"

    def run(self, program: Capture) -> Changes:
        candidates = (aten.to, aten.alias, aten.slice, aten.expand, aten.lift_fresh_copy, aten._to_copy)
        count = 0
        for n in list(program.graph.nodes):
            if getattr(n.target, "overloadpacket", None) not in candidates or not is_tensor(n.args[0]):
                continue
            a, b = n.args[0].meta["val"], n.meta["val"]
            strided = n.kwargs.get("memory_format") is not None
            if a.dtype == b.dtype and a.device == b.device and sizes(a) == sizes(b) and not strided:
                n.replace_all_uses_with(n.args[0])
                program.graph.erase_node(n)
                count += 1
        return Changes(count, "operators that give their operand are left out")


class TileSlices(Pass[Capture]):
    """Slices that together tile one dimension of a value become one split, so that each piece can be sharded."""

    name = "tile-slices"

    def run(self, program: Capture) -> Changes:
        groups: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
        for n in program.graph.nodes:
            if n.target is aten.slice.Tensor and Op.of(n).args["step"] == 1:
                groups[n.args[0], Op.of(n).dim()].append(n)  # type: ignore[index]
        tiled = sum(self._tile(program.graph, dim, cuts) for (_, dim), cuts in groups.items())
        return Changes(tiled, "dimensions in slices are split at once")

    def _tile(self, graph: fx.Graph, dim: int, cuts: list[fx.Node]) -> bool:
        source: fx.Node = cuts[0].args[0]  # type: ignore[assignment]
        total = expression(source.meta["val"].shape[dim])
        spans = {n: _span(n, dim, total) for n in cuts}
        points = sorted({s for s in spans.values() if s is not None})
        # Slices that overlap, leave gaps or have symbolic ends are no partition of the dimension, and stay slices.
        if not isinstance(total, int) or None in spans.values() or len(points) < 2:
            return False
        if (
            points[0][0] != 0
            or points[-1][1] != total
            or any(a[1] != b[0] for a, b in zip(points, points[1:], strict=False))
        ):
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
            n.replace_all_uses_with(pieces[span])
            graph.erase_node(n)
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
    """A size read off an intermediate value is read off the input it comes from: shards have other sizes."""

    name = "rebind-sizes"

    def run(self, program: Capture) -> Changes:
        count = 0
        for n in list(program.graph.nodes):
            if n.target is not aten.sym_size.int or not is_tensor(n.args[0]):
                continue
            size = expression(n.meta["val"])
            if isinstance(size, int):
                n.replace_all_uses_with(size)  # type: ignore[arg-type]
                program.graph.erase_node(n)
            elif size in program.symbols:
                n.args = program.symbols[size]  # type: ignore[index,assignment]
            else:
                continue
            count += 1
        return Changes(count, "sizes are read off inputs")


CANONICAL: tuple[Pass[Capture], ...] = (
    MergeTied(), InlineRegions(), Composites(), RunningStatistics(), DropChecks(), DropExamples(), DropIdentities(),
    ComplexScatters(), TileSlices(), RebindSizes(), Reshape(), LayOut(),
)  # fmt: skip
