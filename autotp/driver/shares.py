"""Search for the shares of unlike ranks: placements and units in turn until they agree, beside the even split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autotp.cost.cache import Cache
from autotp.cost.memory import measure
from autotp.cost.solver.unit_shares import Dealt, solve_shares
from autotp.cost.stretches import Stretches
from autotp.errors import PlanError
from autotp.ir.program import Planned, Sharded
from autotp.ir.sizes import apportion
from autotp.passes.shard.planner import Builder, Built
from autotp.plans.plan import Plan
from autotp.plans.share_choice import Dealing, ShareChoice, least
from autotp.text import amount

from .options import Options

TURNS = 3  # placements that units are found for, after those of the even split
NAMES = 4  # modules that a family is named by
UNITS = 64  # that work is divided into where nothing is known but memory
RISING = (
    "the ranks do {} in the same time, and none is given more than the one before it: put the devices in the order of "
    "their speed, the fastest first, as CUDA_VISIBLE_DEVICES can"
)


@dataclass(frozen=True)
class Staged:
    """A plan with the decisions, program, prices and problem that it was made from."""

    plan: Plan
    planned: Planned
    sharded: Sharded
    builder: Builder
    problem: Built


class Trial:
    """A plan by some shares, with each rank's seconds and bytes."""

    def __init__(self, staged: Staged, options: Options, memory: float | None) -> None:
        self.staged, self.options, prices = staged, options, staged.builder.prices
        self.stretches = Stretches(staged.planned, staged.sharded, prices)
        most = math.inf if memory is None else memory
        self.limits = tuple([min(most, prices.cluster.rank(rank).memory_size) for rank in range(options.tp)])
        name, most = self.stretches.cached, staged.plan.memory.cache
        now = self.stretches.now[name] if name else [1.0] * options.tp  # what is whole on all is so of a cache
        caches = [Cache(most * part / max(now)) for part in now]
        of = staged.planned, staged.sharded, staged.builder.objective, prices.hints
        self.memory = tuple([measure(*of, cache, rank).peak for rank, cache in enumerate(caches)])
        self.problem = self.stretches.problem(self.memory, most / max(now), self.limits)
        self.seconds = self.problem.seconds(self.stretches.now)
        self.over = sum(max(size - limit, 0.0) for size, limit in zip(self.memory, self.limits, strict=True))

    @cached_property
    def best(self) -> Dealt | None:
        """Units with which these placements take the least time; None where none fit."""
        return solve_shares(self.problem)

    def better(self) -> Options:
        """Set options to the units of these placements, and shares in the ratio of each rank's bytes."""
        if self.best is None:  # as memory goes, for then it is what is short
            sizes, units = [*self.limits], self.options.units
        else:
            sizes = [*self.problem.bytes_held(self.best.units) - self.problem.base_bytes]
            families = self.stretches.families
            dealt = {families[name].length: families[name].elements(n) for name, n in self.best.units.items()}
            units = tuple(sorted((dict(self.options.units) | dealt).items()))
        if self.best is not None and all(len({*n}) == 1 for _, n in units):
            return replace(self.options, shares=(), units=())
        ratio = apportion(UNITS, tuple([round(x / max(sizes) * UNITS**2) for x in sizes]))
        return replace(self.options, shares=least(ratio), units=units)

    def record(self, even: Trial | None) -> Staged:
        """Add the choice of shares to the staged plan.

        Args:
            even: the trial of the even split; None where the shares were given.
        """
        planned, now, families, dealt = self.staged.planned, self.stretches.now, self.stretches.families, []
        for name, family in families.items():
            weights = [x.name for x in planned.program.leaves if x.kind.weight and planned.same[x.node] in family.nodes]
            names = [*dict.fromkeys(x.removesuffix(".weight").rpartition(".")[2] for x in weights)]
            rest = ", ..." * (len(names) > NAMES)
            dealt.append(Dealing(family.length, family.elements(now[name]), ", ".join(names[:NAMES]) + rest))
        equal = {name: [family.units / len(self.memory)] * len(self.memory) for name, family in families.items()}
        choice = ShareChoice(
            tuple(dealt),
            self.seconds,
            even=0.0 if even is None else even.seconds,
            even_fits=even is None or not even.over,
            bound=0.0 if even is None or self.best is None else min(self.best.bound, self.seconds),
            padding=float(self.problem.slowest(now)[0] - self.problem.slowest(equal)[0]),  # of collectives
            memory=self.memory,
            limits=self.limits,
            asked=even is None,
        )
        plan, ratio = self.staged.plan, self.staged.builder.prices.cluster.ratio()
        if even is not None and list(ratio) != sorted(ratio, reverse=True):
            plan = replace(plan, notes=(*plan.notes, RISING.format(":".join(map(str, ratio)))))
        return replace(self.staged, plan=replace(plan, share_choice=choice))


def unlike(options: Options) -> bool:
    """Say whether the ranks are unlike, so that the seconds and bytes of each count by themselves."""
    return options.tp > 1 and bool(options.cluster.over(options.tp).ranks)


def find_shares(solve: Callable[[Options], Staged], options: Options) -> Staged:
    """Find the plan by the shares whose slowest rank is fastest, of those that fit into every rank's memory.

    Placements are solved for the even split; then the units of each family that take the least time with these; then
    placements with these units, and so on until the units stay. The best of all trials is taken, so the even split too
    where padding, or a rank's memory, costs more than others gain.

    Args:
        solve: plans by given shares. options: of a cluster of unlike ranks; without `search` their shares alone count.
    """
    if not options.search:
        return Trial(solve(options), options, options.memory).record(None)
    trials: dict[object, Trial] = {}
    attempt = replace(options, memory=None)
    while (attempt.shares, attempt.units) not in trials and len(trials) <= TURNS:
        trial = trials[attempt.shares, attempt.units] = Trial(solve(attempt), attempt, options.memory)
        if trial.best is not None and all([*n] == trial.stretches.now[name] for name, n in trial.best.units.items()):
            break
        attempt = trial.better()
    even, *_ = trials.values()
    return min(trials.values(), key=lambda trial: (trial.over, trial.seconds)).record(even)


def refuse_full(plan: Plan) -> Plan:
    """Return the plan; refuse it where a rank of unlike ones cannot hold its share.

    Raises:
        PlanError: such a rank.
    """
    choice = plan.share_choice
    if choice is None or not choice.full:
        return plan
    ranks = [f"rank {i} holds {amount(choice.memory[i])} of {amount(choice.limits[i])}" for i in choice.full]
    what = f"shares={plan.shares or (1,) * plan.tp} do not fit" if choice.asked else "no shares fit"
    raise PlanError(
        f"{what} into the ranks of {plan.cluster}: {', '.join(ranks)}. Leave out shares= to have them found, put the "
        "devices with most memory first, take more or larger ones, a smaller batch, or weights of fewer bits."
    )
