"""The problem of a captured graph, solved: a decision for every node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from autotp.cost.solver.problem import Problem
from autotp.cost.solver.solve import Infeasible, solve
from autotp.cost.solver.spent import cost_of
from autotp.ir.program import Decision, Planned, Solution

from .hand_written import rivals
from .planner import Builder
from .states import decided


def decide(builder: Builder) -> Planned:
    """Solve, and spread each item's choice over the nodes it stands for."""
    problem, heads = builder.build()
    problem.rivals = rivals(builder, problem, heads)
    solution = _solved(builder, problem)
    solution = _priced(builder, problem, solution)
    if solution.rival is not None:
        solution = replace(solution, rival=_priced(builder, problem, solution.rival))
    choices: dict[fx.Node, Decision] = {}
    for node, item, k in zip(heads, problem.items, solution.choices, strict=False):
        c = item.choices[k]
        choices[node] = Decision(c.ins if node in builder.ops else (), c.outs, c.factor, c.loop)
    decisions = {n: choices[builder.same[n]] for n in [*builder.leaves, *builder.calls]}
    if builder.user.outputs:
        decisions[builder.program.graph.output_node()] = Decision(builder.goals(), ())
    return Planned(
        builder.program, builder.tp, decisions, builder.ops, builder.rules, builder.same, builder.grads, solution,
        decided(builder.carried_items, problem, solution.choices), builder.ends, builder.past,
    )  # fmt: skip


def _priced(builder: Builder, problem: Problem, solution: Solution) -> Solution:
    """A solution with its terms, and the seconds that they come to."""
    terms = cost_of(problem, solution.choices, builder.prices.conversion)
    return replace(solution, terms=dict(terms), seconds=builder.prices.seconds(terms))


def _solved(builder: Builder, problem: Problem) -> Solution:
    """The solution; where there is none, one that gathers what is otherwise never moved."""
    try:
        return solve(problem, band=builder.band)
    except Infeasible as e:
        for _ in _relaxations(builder):
            try:
                return solve(problem, band=builder.band)
            except Infeasible:
                continue
        raise builder.conflict() or e from None


def _relaxations(builder: Builder) -> Iterator[None]:
    """Allow more and more conversions: of what a call began with; of weights that a plan has placed; of both."""
    prices, cached = builder.prices, builder.prices.cached
    if cached:
        prices.cached = set()
        yield
    if builder.pinned:  # another program's plan, made without knowing how this one reads them
        prices.cached, prices.gathers_weights = cached, True
        yield
        if cached:
            prices.cached = set()
            yield
