"""Where one plan is cut into stages: what each unit of the model costs, and the best division of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import fx

from autotp.cost.memory import kept_for_backward
from autotp.cost.prices import nbytes, sizer
from autotp.errors import InputError, PlanError
from autotp.ir.graph import tensors
from autotp.ir.program import Planned, Sharded
from autotp.passes.shard.planner import Builder
from autotp.passes.stages.balance import Staging, Weight, divide
from autotp.passes.stages.units import Unit, units_of
from autotp.plans.describe.layer_times import Steps
from autotp.text import amount


def found_units(sharded: Sharded, name: str, pp: int, chunks: int) -> list[Unit]:
    """The units of a program.

    Args:
        sharded: the program of one rank. name: of the model. pp, chunks: ranks of the pipeline and stages of each.

    Raises:
        InputError: there are fewer than stages.
    """
    units = units_of(sharded.graph.nodes)
    if not units:
        raise InputError(
            f"{name} has no repeated blocks (a list of modules, of which some have the same operators), and stages are "
            "cut between these. Use tensor parallelism alone."
        )
    if pp * chunks > len(units):
        what = f"pp={pp}" if chunks == 1 else f"pp={pp} x chunks={chunks}"
        raise InputError(
            f"{what} makes {pp * chunks} stages, and {name} has {len(units)} repeated blocks, {units[0].name} to "
            f"{units[-1].name}: every stage needs one. Use fewer stages."
        )
    return units


def staging(
    planned: Planned, sharded: Sharded, builder: Builder, name: str, pp: int, chunks: int, limit: float | None
) -> Staging:
    """The division of a planned model.

    Args:
        planned: the decisions; `sharded`: the program of one rank; `builder`: prices it.
        name: of the model. pp, chunks: ranks of the pipeline and stages of each. limit: bytes that a rank may hold.

    Raises:
        InputError: there are too few blocks. PlanError: no division fits.
    """
    units = found_units(sharded, name, pp, chunks)
    weights = weigh(planned, sharded, builder, units)
    division = divide(weights, pp, chunks, limit)
    if division is None:
        assert limit is not None
        least = divide(weights, pp, chunks)
        worst = max(least.memory) * chunks if least is not None else 0.0
        raise PlanError(
            f"no division into {pp * chunks} stages fits memory={amount(limit)}: the fastest holds {amount(worst)} on "
            "its fullest rank. Use more stages, a larger tp, or smaller micro-batches."
        )
    return Staging(tuple(u.name for u in units), tuple(weights), division)


def weigh(planned: Planned, sharded: Sharded, builder: Builder, units: Sequence[Unit]) -> list[Weight]:
    """What each unit costs a rank, by the plan's own prices.

    Args:
        planned: the decisions; `sharded`: the program of one rank; `builder`: prices it. units: in order.
    """
    starts = [u.start for u in units]
    place = {n: bisect_right(starts, i) - 1 for i, n in enumerate(sharded.graph.nodes) if n.op != "placeholder"}
    seconds, steady, kept_bytes = ([0.0] * len(units) for _ in range(3))
    for node, (timed, _) in Steps(planned, builder, (), {}, lambda _: None).each(sharded):
        seconds[place.get(node, -1) if node is not None else -1] += timed.seconds
    for at, size in _parameters(planned, sharded, builder, place):
        steady[at] += size
    objective, hints = builder.objective, builder.prices.hints
    for node, size in kept_for_backward(planned, sharded, objective, hints) if objective.training else ():
        kept_bytes[_home(node, place)] += size
    return [Weight(*each) for each in zip(seconds, steady, kept_bytes, strict=True)]


def _parameters(
    planned: Planned, sharded: Sharded, builder: Builder, place: dict[fx.Node, int]
) -> list[tuple[int, float]]:
    """Unit and bytes, with gradients and states, of every weight; of a tied one once for each unit that reads it."""
    hint, out = sizer(builder.prices.hints), []
    heads = [n for n in sharded.graph.nodes if n.op == "placeholder"]
    for leaf, node in zip(planned.program.leaves, heads, strict=True):
        if leaf.kind.trained and tensors(leaf.node):
            val = leaf.node.meta["val"]
            own = nbytes(val, hint) * planned.decisions[leaf.node].outs[0].share(planned.tp, hint)
            places = {place[u] for u in node.users if u in place} or {0}
            out += [(at, builder.objective.budget_bytes(own, val)) for at in sorted(places)]
    return out


def _home(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """The unit of a value; of an input that of its first reader."""
    if node in place:
        return place[node]
    return min((place[u] for u in node.users if u in place), default=0)
