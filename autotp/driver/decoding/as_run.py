"""The program that is proved is the one that runs: with the attention over a cache that a rank's program gets."""

from __future__ import annotations

import torch

from autotp.cost import Cluster
from autotp.cost.objective import Objective
from autotp.ir.copying import copy_graph
from autotp.ir.program import MeshPlace, Sharded
from autotp.passes.optimise import RankProgram, Setting
from autotp.passes.optimise.cached_attention import CachedAttention


def as_it_runs(sharded: Sharded, tp: int, objective: Objective) -> tuple[Sharded, int]:
    """The program of all ranks after the rewrite that makes attention over a cache one call.

    Args:
        sharded: the program before the rank is known; it stays as it is. tp: number of ranks.
        objective: what it is planned for.

    Returns:
        A copy, with layouts of its inputs and of what is left of the original's nodes, and how many attentions were
        rewritten.
    """
    graph, copies = copy_graph(sharded.graph.nodes)
    setting = Setting(MeshPlace(0, tp, ""), Cluster.resolve(None), objective, torch.device("cpu"))
    program = RankProgram(graph, setting)
    changes = CachedAttention().run(program)  # without the check of a rank's program: its rank is not known here
    there = set(program.graph.nodes)
    layouts = {copies[n]: layout for n, layout in sharded.layouts.items() if copies.get(n) in there}
    origin = {copies[n]: value for n, value in sharded.origin.items() if copies.get(n) in there}
    return Sharded(program.graph, layouts, origin, states=sharded.states), changes.count
