"""The problem of a captured graph, solved: a decision for every node."""

from __future__ import annotations

from torch import fx

from autotp.cost.solver.solve import Infeasible, solve
from autotp.ir.program import Decision, Planned

from .planner import Builder
from .states import decided


def decide(builder: Builder) -> Planned:
    """Solve, and spread each item's choice over the nodes it stands for."""
    problem, heads = builder.build()
    try:
        solution = solve(problem)
    except Infeasible as e:
        if builder.prices.cached:  # gathered rather than that nothing runs
            builder.prices.cached = set()
            return decide(builder)
        raise builder.conflict() or e from None
    chosen: dict[fx.Node, Decision] = {}
    for node, item, k in zip(heads, problem.items, solution.chosen, strict=False):
        c = item.choices[k]
        chosen[node] = Decision(c.ins if node in builder.ops else (), c.outs, c.factor, c.loop)
    decisions = {n: chosen[builder.same[n]] for n in [*builder.leaves, *builder.calls]}
    if builder.user.outputs:
        decisions[builder.program.graph.output_node()] = Decision(builder.goals(), ())
    return Planned(
        builder.program, builder.tp, decisions, builder.ops, builder.rules, builder.same, builder.grads, solution,
        decided(builder.carried_items, problem, solution.chosen), builder.ends,
    )  # fmt: skip
