"""The problem of a captured graph, solved: a decision for every node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autotp.cost.solver.problem import Choice, Problem, ValueId, cost_of
from autotp.cost.solver.solve import Infeasible, solve
from autotp.errors import PlanError
from autotp.ir.graph import short_name
from autotp.ir.layouts import Layout
from autotp.ir.program import Decided, Decision, GraphPart, Planned, Solution
from autotp.passes.analysis.axes import PortDims, summed

from .axis import TENSOR
from .planner import Builder, Built
from .states import decided, placed_as_read


def problem_of(builder: Builder) -> Built:
    """Build the decision problem with Megatron's plans, and the node of each item."""
    problem, heads = builder.build()
    problem.rivals = rivals(builder, problem, heads)
    return problem, heads


def decide(builder: Builder, problem_and_nodes: Built | None = None) -> Planned:
    """Solve, and spread each item's choice over the nodes it stands for.

    Args:
        builder: of the graph. problem_and_nodes: of `problem_of`, where that was built already.
    """
    problem, heads = problem_and_nodes or problem_of(builder)
    problem.limit = builder.memory
    solution = _solved(builder, problem)
    readers = {node: problem.items[i].choices[solution.choices[i]] for i, node in enumerate(heads)}
    layouts: dict[ValueId, Layout] = {
        value: readers[node].ins[slot] for value, (node, slot) in builder.cache_readers.items()
    }
    states = placed_as_read(builder.carried_items, problem, solution.choices, layouts)
    solution = replace(solution, choices=states)
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


def take(builder: Builder, decided: Decided) -> Planned:
    """Give each node its decision of those that were made elsewhere: on another rank, or in a plan for this graph.

    Raises:
        PlanError: they are not those that the graph needs, or go by a rule that is not registered.
    """
    # What moves a weight or a state moves it by these decisions, which no price forbids any more.
    builder.prices.cached, builder.prices.gathers_weights = set(), True
    planned = Planned(
        builder.program, builder.tp, _decisions(decided, builder), builder.ops, builder.rules, builder.same,
        builder.grads, states=dict(decided.states), ends=builder.ends,
    )  # fmt: skip
    _check_rules(planned)
    return planned


def _decisions(decided: Decided, builder: Builder) -> dict[fx.Node, Decision]:
    """Give the decisions by node; refused where they are not those that the graph needs."""
    nodes = {n.name: n for n in [*builder.leaves, *builder.calls]}
    output = builder.program.graph.output_node()  # decided where it is pinned
    faults = (set(decided.decisions) ^ set(nodes)) - {output.name}
    for name in set(decided.decisions) & set(nodes):
        decision, op = decided.decisions[name], builder.ops.get(nodes[name])
        if (len(decision.ins), len(decision.outs)) != ((len(op.slots), len(op.outs)) if op is not None else (0, 1)):
            faults.add(name)
    nodes[output.name] = output
    if faults:
        raise PlanError(
            f"the plan's decisions are not those that its graph needs, such as for {min(faults)}: it was changed after "
            "it was made. Plan again."
        )
    return {nodes[name]: decision for name, decision in decided.decisions.items()}


def _check_rules(planned: Planned) -> None:
    """Refuse a plan whose operators are split by rules that are not there: a user's, which he has yet to register."""
    for node, op in planned.ops.items():
        index, rule = planned.decisions[node].factor, planned.rules[node]
        if index is not None and (rule is None or index >= len(rule.factors)):
            raise PlanError(
                f"the plan splits {short_name(op.target)} by a rule that is not known here. Register the rules that it "
                "was made with (autotp.register_rule) on every rank before you use it, or plan again."
            )


def _priced(builder: Builder, problem: Problem, solution: Solution) -> Solution:
    """Complete a solution with its terms, and the seconds that they come to."""
    terms = cost_of(problem, solution.choices, builder.prices.conversion)
    return replace(solution, terms=dict(terms), seconds=builder.prices.seconds(terms))


def _solved(builder: Builder, problem: Problem) -> Solution:
    """Solve the problem; where it has no solution, allow gathering what is otherwise never moved."""
    # With weights and states where a plan has them the fastest is near the plainest, which is long to find: of a
    # falcon_mamba's 12 tokens the band took 4 s, the least time 0.2.
    band = None if builder.pinned else builder.band
    try:
        return solve(problem, band=band, seconds=builder.seconds)
    except Infeasible as e:
        for _ in _relaxations(builder):
            try:
                return solve(problem, band=band, seconds=builder.seconds)
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


# ---- Megatron's plans ------------------------------------------------------------------------------------------------

# Megatron's plans for a model, as the choices of the decision problem that they rule out.
#
# Shoeybi et al. 2019: attention by heads, feed-forward blocks by columns and then rows, embedding and head by the
# vocabulary. Experts are sharded by expert, or each by columns and then rows: two plans. What a plan leaves
# open, such as sequence parallelism, is the solver's choice.

AXES = ("heads", "mlp", "vocab")  # what it splits
FEED_FORWARD = ("mlp", "experts")
COVERED = 0.9  # of the weights in matrices must be in attention and feed-forward blocks
STACKED = 3  # dimensions of a weight that holds all experts: experts, what is summed over, columns

RuledOut = frozenset[tuple[int, int]]


def rivals(builder: Builder, problem: Problem, heads: Sequence[fx.Node]) -> tuple[RuledOut, ...]:
    """List what each of Megatron's plans rules out: (item, choice).

    Args:
        builder: made the problem. problem: its items. heads: the node of each item, of the first ones.

    Returns:
        None of them where Megatron has no plan: see `splits`; where a user's pins distinguish equal blocks; or
        where the plan is that of another program.
    """
    if builder.tp == 1 or builder.band is None or builder.pinned or builder.axis is not TENSOR:
        return ()
    if not splits(builder, builder.parts):
        return ()
    always = [port for axis in AXES for port in builder.reading.axes[axis]]
    index = {n: i for i, n in enumerate(heads)}
    # Heads of keys that are fewer than the ranks it has on groups of these; a single one is whole on all.
    heads_of = [part.heads for part in builder.parts if part.heads is not None]
    few = [x.kv_at for x in heads_of if isinstance(x.kv, int) and 1 < x.kv < builder.tp]
    copied = [PortDims(node, "in", slot, dims) for node, slot, dims in few]
    ways = []
    for ports in _experts(builder):
        ruled_out = _ruled_out(builder, problem, index, [*always, *copied, *ports], copied)
        if ruled_out is not None:
            ways.append(ruled_out)
    return tuple(dict.fromkeys(ways))


def splits(builder: Builder, parts: Sequence[GraphPart]) -> bool:
    """Say whether Megatron has a plan: tp divides the heads, and attention and feed-forward blocks are most of the
    model.

    Args:
        builder: of the graph. parts: of it. Adapters are no part of Megatron's plan.
    """
    counts = [part.heads.count for part in parts if part.heads is not None]
    even = all(isinstance(n, int) and n % builder.tp == 0 for n in counts)
    adapters = any(part.kind == "adapter" for part in parts)
    return bool(counts) and even and not adapters and covered(builder, parts) >= COVERED


def covered(builder: Builder, parts: Sequence[GraphPart]) -> float:
    """Compute the share of attention and feed-forward blocks in the weights in matrices, embeddings and heads aside."""
    leaves = [x.node for x in builder.program.leaves if x.kind.trained]
    sizes = {n: torch.Size(n.meta["val"].shape).numel() for n in leaves if n.meta["val"].ndim > 1}

    def elements(kinds: Sequence[str]) -> int:
        """Count the elements of the matrices that parts of these kinds read, each once."""
        weights = {n for part in parts if part.kind in kinds for n in part.parameters}
        return sum(sizes.get(n, 0) for n in weights)

    return elements(("attention", *FEED_FORWARD)) / max(sum(sizes.values()) - elements(("embedding", "head")), 1)


def _experts(builder: Builder) -> list[list[PortDims]]:
    """List what the plans split of experts: their number, or within each the columns first and last what is summed
    over."""
    by_expert, within = [], []
    for part in builder.parts:
        nodes = part.nodes if part.kind == "experts" else ()
        stacked = [port for n in nodes for port in _stacked(builder, n)]
        by_expert += [port._replace(dims=(0,)) for port in stacked]
        within += [port for port in stacked if port.node is stacked[-1].node]
    return [by_expert, within] if by_expert else [[]]


def _stacked(builder: Builder, node: fx.Node) -> list[PortDims]:
    """Find the weight of all experts that an operator multiplies by, with the dimension that it sums over."""
    if node not in builder.ops:
        return []
    op, ports = builder.ops[node], []
    for port in summed(op, builder.rules[node]):
        if op.slots[port.slot] in builder.prices.weights and len(op.ins[port.slot]) == STACKED:
            # By expert the result may be summands too; the experts' own dimension is not what a product sums over.
            dims = tuple(filter(None, port.dims))
            ports += [port._replace(dims=dims)] if dims else []
    return ports


def _ruled_out(
    builder: Builder, problem: Problem, index: Mapping[fx.Node, int], ports: Iterable[PortDims],
    copied: Sequence[PortDims],
) -> RuledOut | None:  # fmt: skip
    """List the choices that do not split all these dimensions, fewer heads than ranks on groups; None where an item
    has no other."""
    out: dict[int, set[int]] = {}
    for port in ports:
        i = index[builder.same[port.node]]
        choices = problem.items[i].choices
        out.setdefault(i, set()).update(k for k, c in enumerate(choices) if not _splits(c, port, port in copied))
        if len(out[i]) == len(choices):
            return None
    return frozenset((i, k) for i, ruled_out in out.items() for k in ruled_out)


def _splits(choice: Choice, port: PortDims, copied: bool) -> bool:
    """Say whether a choice splits a port's dimensions, on groups of ranks where these have copies."""
    layout = (choice.ins if port.side == "in" else choice.outs)[port.slot]
    return layout.sharded_dim in port.dims and (layout.copies > 1) >= copied
