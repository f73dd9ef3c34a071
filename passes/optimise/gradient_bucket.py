"""Bucket: the small all-reduces of a block's whole parameters' gradients become one.

Where activations are sharded over the sequence, every norm weight is read whole and its gradient is a summand on each
rank (f on the parameter). Sent one by one these take a collective's start each, and hardly any bytes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from autotp.comm.conversions import f, f_bucket
from autotp.cost.collective_costs import mostly_start
from autotp.cost.compute import tensor_bytes
from autotp.ir.marks import inherit, write
from autotp.ir.scopes import block_of, is_region, module_of, scope_path
from autotp.passes.base import Changes

from .expressions import erase
from .judged import Judged, Rewrite
from .optimisation import Optimisation, RankProgram
from .products import over_tp

Unit = tuple[str, ...]  # the path of what is gathered or added up as one
WHAT = "one all-reduce of small gradients"
NOWHERE = "nowhere: no block has two small parameters whose gradients are summed"


class Bucket(Optimisation):
    """Merges the conversions of a block's small parameters that are read whole into one."""

    name = "bucket"
    measurable = True
    sends = True

    def idle(self, program: RankProgram) -> str:
        """Run only where gradients are sent: not in one process, nor without a backward."""
        setting = program.setting
        if setting.place.size == 1:
            return "nowhere: nothing is sent in one process"
        return "" if setting.objective.training else f"nowhere: {setting.objective.name} has no gradients"

    def run(self, program: RankProgram) -> Changes:
        """Merge the small parameters of every unit that has several."""
        judged, setting, count = Judged(program, self), program.setting, 0
        units: dict[Unit, list[fx.Node]] = defaultdict(list)
        for node in program.graph.nodes:
            if not over_tp(node, f) or node.args[0].op != "placeholder":
                continue
            # To send its gradient takes less than to start sending.
            if mostly_start(tensor_bytes(node.meta["val"]), setting.place.size, setting.cluster):
                units[unit_of(node)].append(node)
        for unit, nodes in units.items():
            if len(nodes) > 1 and judged.put(WHAT, Rewrite(nodes, _merge, (unit, nodes))) is not None:
                count += len(nodes)
        if not count:
            return Changes(0, ", ".join(judged.refused()) or NOWHERE)
        merged, reason = judged.fired.total(), judged.reasons.get((WHAT, True), "")
        text = f"{count} all-reduces of parameters' gradients became {merged}"
        return Changes(merged, f"{text} ({reason})" if reason else text)


def unit_of(node: fx.Node) -> Unit:
    """Find the repeated block that it belongs to, or the checkpointed region in it; () where there is none."""
    path = scope_path(node)
    region = next((i for i in reversed(range(len(path))) if is_region(path[i])), -1)
    modules = [module_of(p) for p in path]  # "" for a region around blocks, which is none of them
    block = next((i for i, m in enumerate(modules) if m and block_of(m) == m), -1)
    return path[: max(region, block) + 1]


def _merge(unit: Unit, nodes: Sequence[fx.Node]) -> fx.Node:
    """Put one call in the place of these, where the unit begins: their operands are there from the start."""
    graph = nodes[0].graph
    with graph.inserting_before(_entry(nodes[0], len(unit))):
        call = graph.call_function(f_bucket, ([n.args[0] for n in nodes],), dict(nodes[0].kwargs))
        call.meta = {"val": tuple(n.meta["val"] for n in nodes)}
        write(call, scope=unit, axis="tp")
        for i, node in enumerate(nodes):
            item = graph.call_function(operator.getitem, (call, i))
            inherit(item, node, scope=unit, conversion=None, axis=None)
            node.replace_all_uses_with(item)
    erase(nodes)
    return call


def _entry(node: fx.Node, depth: int) -> fx.Node:
    """Find the first node of the call that holds this one, among the calls that a unit so deep makes."""
    child = scope_path(node)[: depth + 1]
    while len(child) > depth and node.prev.op == "call_function" and scope_path(node.prev)[: depth + 1] == child:
        node = node.prev
    return node
