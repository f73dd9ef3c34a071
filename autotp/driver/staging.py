"""The cut of one plan into stages: the cost of each unit of the model, and the best division of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from autotp.cost import Cluster
from autotp.cost.prices import Prices
from autotp.cost.units import Unit, UnitCost, UnitCosts
from autotp.errors import InputError, PlanError
from autotp.ir.graph import Capture, draws
from autotp.ir.program import Planned, Sharded
from autotp.passes.shard.planner import Builder
from autotp.passes.stages.balance import Staging, Weight, divide, stage_starts, units_of
from autotp.passes.stages.cut import cut, joined
from autotp.text import amount, counts


def stage_units(planned: Planned, sharded: Sharded, name: str, pp: int, chunks: int) -> list[Unit]:
    """List the units of a program.

    Args:
        planned: the decisions; `sharded`: the program of one rank.
        name: of the model. pp, chunks: ranks of the pipeline and stages of each.

    Raises:
        InputError: there are fewer than stages.
    """
    units = units_of(planned, sharded)
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
    planned: Planned, sharded: Sharded, builder: Builder, name: str, pp: int, chunks: int, limit: float | None,
    places: Sequence[int] = (),
) -> Staging:  # fmt: skip
    """Divide a planned model into stages.

    Args:
        planned: the decisions; `sharded`: the program of one rank; `builder`: prices it.
        name: of the model. pp, chunks: ranks of the pipeline and stages of each. limit: bytes that a rank may hold.
        places: the rank of each stage, whose machine counts where the cluster's are unlike, with its memory.

    Raises:
        InputError: there are too few blocks. PlanError: no division fits.
    """
    units = stage_units(planned, sharded, name, pp, chunks)
    costs = UnitCosts(planned, sharded, builder.prices, units)
    weights = weigh(costs.units, costs.tied)
    limits, speeds = machines_of(planned, sharded, builder.prices, units, builder.cluster.places(pp), limit)
    order = places or tuple(range(pp)) * chunks
    limits = [limits[i] for i in order if limits]
    speeds = [speeds[i] for i in order if speeds]
    division = divide(weights, pp, chunks, limits, speeds)
    if division is None:
        least = divide(weights, pp, chunks, (), speeds)
        worst = max(least.memory) * chunks if least is not None else 0.0
        fits = f"memory={amount(limits[0])}" if len({*limits}) == 1 else f"devices of {', '.join(map(amount, limits))}"
        raise PlanError(
            f"no division into {pp * chunks} stages fits {fits}: the fastest holds {amount(worst)} on its fullest "
            "rank. Use more stages, a larger tp, or smaller micro-batches."
        )
    return Staging(tuple(u.name for u in units), tuple(weights), division)


def machines_of(
    planned: Planned, sharded: Sharded, prices: Prices, units: list[Unit], places: Sequence[Cluster],
    limit: float | None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Return the bytes that a rank of each place of a pipeline may hold, and its speed relative to the plan's prices.

    Args:
        planned, sharded, prices, units: of the plan. places: the machines of each.
        limit: bytes that any rank may hold; None: the memory of each of unlike devices.

    Returns: bytes, none where nothing limits them; and speeds, none where places are alike.
    """
    if len({*places}) == 1:
        return [] if limit is None else [limit] * len(places), []

    def seconds(machine: Cluster) -> float:
        costs = UnitCosts(planned, sharded, replace(prices, cluster=machine), units).units
        return sum(unit.block.seconds + unit.rest.seconds for unit in costs)

    planned_seconds, seconds_of = seconds(prices.cluster), {x: seconds(x.over(prices.tp)) for x in {*places}}
    limits = [min(limit or inf, place.memory_size) for place in places]
    return limits, [planned_seconds / seconds_of[place] for place in places]


def check_draws(captured: Capture) -> None:
    """Refuse a program whose random numbers would depend on the rank that it runs on."""
    node = next((n for n in captured.graph.nodes if n.op == "call_function" and draws(n)), None)
    if node is not None:
        raise PlanError(
            f"{node.name} draws random numbers by torch's generator, and those of stages must not depend on where they "
            "run: there is no form of it that draws by counters. Leave it out, or use tensor parallelism alone."
        )


def in_pieces(
    planned: Planned, sharded: Sharded, division: Staging, name: str, absent: Sequence[frozenset[str]] = ()
) -> Sharded:
    """Cut a program into one piece for each stage; that of a module called by itself is all in the first that holds it.

    Args:
        planned: the decisions; `sharded`: the program of one rank. division: of its blocks. name: of the model.
        absent: names of the parameters and buffers that the rank of each stage does not hold.

    Raises:
        InputError: it has other blocks.
    """
    units = units_of(planned, sharded)
    if tuple(u.name for u in units) == division.units:
        return replace(sharded, pieces=tuple(cut(planned, sharded, stage_starts(units, division.division.sizes))))
    read = {leaf.name for leaf in planned.program.leaves if leaf.node.users and not leaf.kind.passed}
    home = next((stage for stage, names in enumerate(absent) if read.isdisjoint(names)), None)
    if home is None:
        raise InputError(
            f"this call runs other blocks than {division.units[0]} to {division.units[-1]}, between which {name} was "
            "cut into stages. Call the whole model, or compile it with tensor parallelism alone."
        )
    starts = [0] * (home + 1) + [len(sharded.graph.nodes)] * (len(absent) - home - 1)
    return replace(sharded, pieces=tuple(cut(planned, sharded, starts)))


def one_after_another(planned: Planned, sharded: Sharded, builder: Builder, name: str, pp: int) -> Sharded:
    """Join the program of `pp` stages into one, for proofs.

    Args:
        planned, sharded, builder, name: see `staging`. pp: number of stages.
    """
    if not counts(pp):
        raise InputError(f"pp={pp!r}: it counts stages, so it is an int of at least 1.")
    if pp == 1:
        return sharded
    check_draws(planned.program)
    division = staging(planned, sharded, builder, name, pp, 1, None)
    return joined(planned, sharded, in_pieces(planned, sharded, division, name).pieces)


def weigh(units: Sequence[UnitCost], tied: Sequence[tuple[float, tuple[int, ...]]]) -> list[Weight]:
    """Return each unit's cost to a rank by the plan's own prices; a tied weight counts in each unit that reads it.

    Args:
        units: in order. tied: weights of several: bytes with gradient and states, and the units.
    """
    steady = [u.weights + u.gradients + u.states for u in units]
    for size, places in tied:
        for at in places[1:]:
            steady[at] += size
    weights = []
    for unit, nbytes in zip(units, steady, strict=True):
        seconds = unit.block.seconds + unit.rest.seconds
        weights.append(Weight(seconds, nbytes, unit.block.kept_bytes + unit.rest.kept_bytes))
    return weights
