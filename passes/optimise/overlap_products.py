"""Overlap: communication beside products, where the cost model says that it saves time.

The backward all-reduce (f) or reduce-scatter (g) of an input's gradient runs under the products that make the weights'
gradients. An all-gather before products (g) and a reduce-scatter after one (g*) go in chunks, each under the product of
another chunk; `autotp.comm.overlapped` says how. How many chunks is chosen by `autotp.cost`; where none save enough the
calls stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import fx

from autotp.comm.conversions import g
from autotp.comm.overlapped import grouped
from autotp.cost import Cluster
from autotp.cost.compute import node_flops, size_hint, tensor_bytes
from autotp.cost.objective import Objective
from autotp.cost.overlap import LEAST_LAUNCHES, Chunks, OverlapModel, hidden_seconds
from autotp.cost.overlap import Product as ProductSizes
from autotp.ir.op import dtype_name
from autotp.ir.specs import ShardSpec
from autotp.passes.base import Changes
from autotp.text import amount
from autotp.text import seconds as told

from .judged import Judged, Rewrite
from .optimisation import Optimisation, RankProgram, Setting
from .products import Product, ProductGroup, dealt, fuse, fuse_dealt, groups, movable, over_tp


@dataclass(frozen=True)
class Overlap(Optimisation):
    """Fuses products with their conversions, in chunks where that is predicted to save time.

    Attributes:
        chunks: so many wherever rows are gathered or reduce-scattered; 0: by the cost model.
        least: kernel launches that a group must save to be put in.
    """

    name = "overlap"
    measurable = True
    sends = True
    chunks: int = 0
    least: float = LEAST_LAUNCHES

    def idle(self, program: RankProgram) -> str:
        """Run only where there is something to gain: not in one process, nor on CPUs."""
        setting = program.setting
        if setting.place.size == 1:
            return "nowhere: nothing is sent in one process"
        running = setting.place.group and setting.device.type == "cpu"
        return "nowhere: what sends between CPU processes takes the cores that compute" if running else ""

    def run(self, program: RankProgram) -> Changes:
        """Fuse every group that saves enough by the model, and that was not measured to be slower."""
        judged, model = Judged(program, self), _Model(program.setting)
        least = self.least * model.seconds.cluster.launch_overhead
        for group in chain(groups(program.graph), dealt(program.graph)):  # each is found in what the one before left
            chunks = model.dealing(group, self.chunks) if group.deals else model.group(group, self.chunks)
            if chunks.saved <= least:
                model.reasons["too small to gain"] += 1
                continue
            if not group.deals and not movable(group):
                model.reasons["with weights that are made too late"] += 1
                continue
            rows = model.rows(group.conversion) // chunks.number // 2  # a call of much fewer rows goes in one piece
            rewrite = Rewrite(group.nodes, fuse_dealt if group.deals else fuse, (group, chunks.number, rows))
            if judged.put(_words(group, chunks.number), rewrite) is not None:
                model.saved += chunks.saved
        program.graph.eliminate_dead_code()
        times = [f"measured: {', '.join(x)}" for x in (judged.measured(),) if x]
        text = "; ".join([_summary(judged.fired, model), *times, *judged.refused()])
        return Changes(judged.fired.total(), text)


def _words(group: ProductGroup, chunks: int) -> str:
    if group.deals:
        return f"products with their g* in {chunks} chunks"
    if chunks > 1:
        return f"g with its products in {chunks} chunks"
    return f"{'g' if group.gathers else 'f'} with its products, sent under the weights' gradients"


def _summary(fired: Counter[str], model: _Model) -> str:
    parts = [f"{n} {what}" for what, n in sorted(fired.items())]
    text = f"{', '.join(parts)}: {told(model.saved)} of a step by the cost model" if parts else "nowhere"
    rest = [f"{n} {reason}" for reason, n in model.reasons.items()]
    if not parts and not rest:
        return "nowhere: no product reads or makes what is converted alone"
    between = "; " if parts else ": "
    return f"{text}{between}{', '.join(rest)}" if rest else text


class _Model:
    """Seconds of the alternatives, at the example inputs' sizes.

    Attributes:
        saved: seconds, by what was fused. reasons: for which groups stay as they are, and how many do.
    """

    def __init__(self, setting: Setting) -> None:
        self.saved, self.reasons = 0.0, Counter[str]()
        self.seconds = OverlapModel(setting.place.size, setting.cluster, setting.objective.training)

    def group(self, group: ProductGroup, forced: int) -> Chunks:
        """Price a conversion and its products: forward in chunks, backward under the weights' gradients."""
        size, products = tensor_bytes(group.conversion.meta["val"]), [_sized(p) for p in group.products]
        backward = 0.0
        if self.seconds.training:
            send_seconds = self.seconds.sends("reduce_scatter" if group.gathers else "all_reduce", size)
            backward = hidden_seconds(send_seconds, sum(self.seconds.product(p) for p in products))
        if not group.gathers or not _rows(group.conversion.args[1], group.conversion):
            return Chunks(1, backward)
        chunks, forward = self.seconds.gathering(size, self.rows(group.conversion), products, forced)
        return Chunks(chunks, forward + backward)

    def dealing(self, group: ProductGroup, forced: int) -> Chunks:
        """Price a product and its g*: in chunks, the reduce-scatter after it and the all-gather before its backward."""
        if not _rows(group.conversion.args[2], group.conversion):
            return Chunks(1, 0.0)
        size = tensor_bytes(group.conversion.meta["val"])
        return self.seconds.dealing(size, self.rows(group.conversion), _sized(group.products[0]), forced)

    def rows(self, conversion: fx.Node) -> int:
        """Count the rows of a rank's slice of a value, all dimensions but the last together, in the example."""
        return math.prod(map(size_hint, conversion.meta["val"].shape[:-1])) // self.seconds.tp


def _sized(p: Product) -> ProductSizes:
    """Give the whole sizes of a product."""
    operand_bytes, result_bytes, weight = (tensor_bytes(t.meta["val"]) for t in (p.x, p.node, p.weight))
    dtype = dtype_name(p.node.meta["val"].dtype)
    return ProductSizes(operand_bytes, result_bytes, weight, node_flops(p.node), dtype)


def _rows(spec: Any, node: fx.Node) -> bool:
    """Say whether the layout shards by one run of rows, so that they can go in chunks."""
    return isinstance(spec, ShardSpec) and len(spec.segments) == 1 and spec.dim < node.meta["val"].ndim - 1


# ---- gathered again --------------------------------------------------------------------------------------------------

# Regather: products of values that are sharded over the sequence keep the rank's slice, and gather it again backward.
#
# Autograd otherwise keeps the gathered value, tp times as large, for the gradients of the weights. Korthikanti et al.
# 2022 (section 4.2.2) keep the slice likewise. Of a pair of g and g* a step gathers twice and reduce-scatters twice; a
# third all-gather makes that 1.25 times the traffic. It runs under the product that makes the input's gradient.

REGATHER = 7  # position of `regather` among the arguments of `grouped`


def too_large(objective: Objective, cluster: Cluster, rank_bytes: float) -> bool:
    """Say whether a step of training, of which a rank holds so many bytes, is more than a device has memory for."""
    return objective.training and rank_bytes > cluster.memory_size


class Regather(Optimisation):
    """Keeps the slice of what is gathered before products, and gathers it again in the backward."""

    name = "regather"

    def idle(self, program: RankProgram) -> str:
        """Run only where the memory model says that a step does not fit into a device."""
        setting = program.setting
        if not setting.objective.training:
            return f"nowhere: {setting.objective.name} keeps nothing for a backward"
        if too_large(setting.objective, setting.cluster, setting.rank_bytes):
            return ""
        rank_bytes, limit = amount(setting.rank_bytes), amount(setting.cluster.memory_size)
        return f"nowhere: a rank holds {rank_bytes} of {limit} by the memory model"

    def run(self, program: RankProgram) -> Changes:
        """Gather again what products alone read, and say what autograd keeps less."""
        graph, setting = program.graph, program.setting
        gathers = [n for n in graph.nodes if n.target is grouped and not n.args[1].whole]
        gathers += [fuse(x) for x in groups(graph) if x.gathers and movable(x)]
        for call in gathers:
            call.update_arg(REGATHER, True)
        others = sum(over_tp(n, g) for n in graph.nodes)
        whole = sum(tensor_bytes(call.args[0].meta["val"]) for call in gathers)
        saved = whole - whole / setting.place.size
        rest = f"; {others} g that not only products read" if others else ""
        graph.eliminate_dead_code()
        if not gathers:
            return Changes(0, f"nowhere: no value is gathered for products alone{rest}")
        return Changes(len(gathers), f"{len(gathers)} values are gathered again, {amount(saved)} less are kept{rest}")
