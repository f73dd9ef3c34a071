"""Shares of unlike ranks: as public functions are given them, checked at the door; or found, placements and units by
turns until they agree, with the even split beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from autotp.cost.cache import Cache
from autotp.cost.memory import measure
from autotp.cost.solver.shares import Dealt, solve_shares
from autotp.cost.stretches import Stretches
from autotp.errors import InputError, PlanError
from autotp.ir.sizes import apportion
from autotp.plans.plan import Plan
from autotp.plans.share_choice import Dealing, ShareChoice
from autotp.text import amount

TURNS = 3  # placements that units are found for, after those of the even split
NAMES = 4  # modules that a family is named by
UNITS = 64  # that work is dealt in where nothing is known but memory
MAX_SHARE = 1_000_000


AUTO = "auto"


def read_shares(shares: Any, tp: int, groups: Sequence[int] = ()) -> tuple[tuple[int, ...], bool]:
    """Read how much of the work each rank is to do, checked; () where all do equally much; and whether it is to be
    found for unlike ranks.

    Args:
        shares: what a public function was given, such as (2, 1); None or "auto" to find them. tp: ranks.
        groups: of a product as tp, whose ranks have copies.

    Raises:
        InputError: they are no whole numbers, not one for each rank, all 0, or rise.
    """
    if shares is None or shares == AUTO and not groups:
        return (), True
    numbers = [*shares] if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    if shares == AUTO:
        raise InputError("shares='auto' and a product as tp: unlike ranks hold no copies. Leave out one.")
    if not numbers or not all(type(n) is int and 0 <= n <= MAX_SHARE for n in numbers) or not any(numbers):
        raise InputError(
            f"shares={shares!r}: give a whole number for each rank, one of them above 0, such as shares=(2, 1) for a "
            'rank that does twice what the other does, or "auto" to have them found.'
        )
    if len(numbers) != tp:
        raise InputError(
            f"shares={shares!r} are of {len(numbers)} ranks: give tp={len(numbers)} with them, as a number."
        )
    if numbers != sorted(numbers, reverse=True):
        raise InputError(
            f"shares={shares!r} rise from a rank to the next, and torch's Shard gives none more than the first. Put "
            "the devices in the order of their shares, the largest first, as CUDA_VISIBLE_DEVICES can."
        )
    if groups:
        raise InputError(f"shares={shares!r} and a product as tp: unlike ranks hold no copies. Leave out one.")
    return _least(numbers), False


# ---- found ----------------------------------------------------------------------------------------------------------


class Trial:
    """A plan by some shares, and what each rank does and holds by it."""

    def __init__(self, staged: Any, options: Any, memory: float | None) -> None:
        self.staged, self.options, builder = staged, options, staged.builder
        self.stretches = Stretches(staged.planned, staged.sharded, builder.prices)
        sizes = [builder.prices.cluster.rank(rank).memory_size for rank in range(options.tp)]
        most = math.inf if memory is None else memory
        self.limits = tuple([min(most, size) for size in sizes])
        name, most = self.stretches.cached, staged.plan.memory.cache
        now = self.stretches.now[name] if name else [1.0] * options.tp  # what is whole on all is so of a cache
        of = staged.planned, staged.sharded, builder.objective, builder.prices.hints
        self.memory = tuple([measure(*of, Cache(most * own / max(now)), rank).peak for rank, own in enumerate(now)])
        cached = most / max(now) * self.stretches.families[name].units if name else 0.0
        self.problem = self.stretches.problem(self.memory, cached, self.limits)
        self.seconds = self.problem.seconds(self.stretches.now)
        self.over = sum(max(own - limit, 0.0) for own, limit in zip(self.memory, self.limits, strict=True))

    @cached_property
    def best(self) -> Dealt | None:
        """The units with which these placements take least; None where none fit."""
        return solve_shares(self.problem)

    def better(self) -> Any:
        """Options with the units of these placements, what they have not as it was, and all else as their bytes are."""
        if self.best is None:  # as memory goes, for then it is what is short
            ratio = apportion(UNITS, tuple(int(UNITS * x / min(self.limits)) for x in self.limits))
            return replace(self.options, shares=_least(ratio), units=())
        units, families = dict(self.options.units), self.stretches.families
        for name, own in self.best.units.items():
            units[families[name].length] = tuple(n * max(families[name].length // families[name].units, 1) for n in own)
        if all(len({*own}) == 1 for own in units.values()):
            return replace(self.options, shares=(), units=())
        own = self.problem.bytes_held(self.best.units) - self.problem.base_bytes
        ratio = apportion(UNITS, tuple(round(x / max(own) * UNITS**2) for x in own))
        return replace(self.options, shares=_least(ratio), units=tuple(sorted(units.items())))

    def record(self, even: Trial | None) -> Any:
        """The staged plan, with what was found; without an `even` of shares that were given."""
        dealt = []
        for name, family in self.stretches.families.items():
            leaves = [x for x in self.staged.planned.program.leaves if x.kind.weight]
            own = [x.name for x in leaves if self.staged.planned.same[x.node] in family.nodes]
            names = [*dict.fromkeys(x.removesuffix(".weight").rpartition(".")[2] for x in own)]
            units = [round(x * max(family.length / family.units, 1)) for x in self.stretches.now[name]]
            more = ", ..." * (len(names) > NAMES)
            dealt.append(Dealing(family.length, tuple(units), ", ".join(names[:NAMES]) + more))
        equal = {name: [(len(x) - 1) / self.options.tp] for name, x in self.problem.sends.items()}
        choice = ShareChoice(
            dealt=tuple(dealt),
            seconds=self.seconds,
            even=even.seconds if even is not None else 0.0,
            even_fits=even is None or not even.over,
            bound=min(self.best.bound, self.seconds) if even is not None and self.best is not None else 0.0,
            padding=self.problem.sending(self.stretches.now) - self.problem.sending(equal),
            memory=self.memory,
            limits=self.limits,
            asked=even is None,
        )
        return replace(self.staged, plan=replace(self.staged.plan, share_choice=choice))


def _least(ratio: Sequence[int]) -> tuple[int, ...]:
    """A ratio in its least numbers; () where it is even."""
    least = tuple([n // math.gcd(*ratio) for n in ratio])
    return least if len({*least}) > 1 else ()


def unlike(options: Any) -> bool:
    """Say whether the ranks are unlike, so that what each does and holds counts by itself."""
    return options.tp > 1 and bool(options.cluster.over(options.tp).ranks)


def find_shares(solve: Callable[[Any], Any], options: Any) -> Any:
    """The plan by the shares with which the slowest rank is done first, of those that fit into every rank's memory.

    Placements are solved for the even split; for these the units of each family that take least; with them the
    placements again, and so on until the units stay. Of all that were tried the best is taken, so the even split too
    where padding, or a rank's memory, eats what others gain.

    Args:
        solve: plans by given shares. options: of a cluster of unlike ranks; without `search` their shares alone count.
    """
    if not options.search:
        return Trial(solve(options), options, options.memory).record(None)
    trials = [*_trials(solve, replace(options, memory=None), options.memory)]
    return min(trials, key=lambda trial: (trial.over, trial.seconds)).record(trials[0])


def _trials(solve: Callable[[Any], Any], options: Any, memory: float | None) -> Iterator[Trial]:
    """Iterate over plans by shares, the even one first."""
    visits: set[Any] = set()
    while (options.shares, options.units) not in visits and len(visits) <= TURNS:
        visits.add((options.shares, options.units))
        yield (trial := Trial(solve(options), options, memory))
        now = {n: tuple(own) for n, own in trial.stretches.now.items()}
        if trial.best is not None and trial.best.units == now:
            return
        options = trial.better()


def refuse_full(plan: Plan) -> Plan:
    """The plan; refused where a rank of unlike ones cannot hold what it is dealt.

    Raises:
        PlanError: such a rank.
    """
    choice = plan.share_choice
    if choice is None or not choice.full:
        return plan
    each = [f"rank {i} holds {amount(choice.memory[i])} of {amount(choice.limits[i])}" for i in choice.full]
    what = f"shares={plan.shares or (1,) * plan.tp} do not fit" if choice.asked else "no shares fit"
    raise PlanError(
        f"{what} into the ranks of {plan.cluster}: {', '.join(each)}. Leave out shares= to have them found, put the "
        "devices with most memory first, take more or larger ones, a smaller batch, or weights of fewer bits."
    )
