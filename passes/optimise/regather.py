"""Regather: products of values that lie dealt over the sequence keep the rank's slice, and gather it again backward.

Autograd otherwise keeps the gathered value, tp times as large, for the gradients of the weights. Korthikanti et al.
2022 (section 4.2.2) keep the slice likewise. Of a pair of g and g* a step gathers twice and reduce-scatters twice; a
third all-gather makes that 1.25 times the traffic. It runs under the product that makes the input's gradient.
"""

from __future__ import annotations

from autotp.comm.conversions import g
from autotp.comm.overlapped import grouped
from autotp.cost import Cluster
from autotp.cost.compute import tensor_bytes
from autotp.cost.objective import Objective
from autotp.passes.base import Changes
from autotp.text import amount

from .optimisation import Optimisation, RankProgram
from .products import fuse, groups, movable, over_tp

REGATHER = 7  # position of `regather` among the arguments of `grouped`


def too_large(objective: Objective, cluster: Cluster, rank_bytes: float) -> bool:
    """Say whether a step of training, of which a rank holds so many bytes, is more than a device has memory for."""
    return objective.training and rank_bytes > cluster.memory_size


class Regather(Optimisation):
    """Keep the slice of what is gathered before products, and gather it again in the backward."""

    name = "regather"

    def idle(self, program: RankProgram) -> str:
        """Only where the memory model says that a step does not fit into a device."""
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
