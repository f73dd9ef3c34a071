"""Explanations of a layout, and comparisons of two plans: the solver's own figures, in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from torch import fx

from autotp.cost.solver.problem import Choice, Problem
from autotp.cost.solver.solve import SLACK, solve
from autotp.errors import InputError, PlanError
from autotp.ir.layouts import I
from autotp.ir.program import Solution
from autotp.passes.shard.decide import decide
from autotp.passes.shard.planner import Builder
from autotp.plans.show.document import RELATIVE_SECONDS, over_tp, primitive, times
from autotp.plans.show.terminal import Line, Printed, Sheet, Table, View
from autotp.text import amount, counted, first_line, near

if TYPE_CHECKING:
    from .plan import Parameter, Plan


@dataclass(frozen=True)
class Alternative:
    """One placement of a parameter, with the best plan around it.

    Attributes:
        layout: the placement, such as "S(0)"; `chosen`: whether it is the plan's.
        parameter_bytes: of this parameter and its equals on a rank.
        seconds: of a step of that plan; `plan_parameter_bytes`: of all parameters on a rank.
        reason: where there is no such plan, the cause.
    """

    layout: str
    chosen: bool
    parameter_bytes: float
    seconds: float = 0.0
    plan_parameter_bytes: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Explanation(Printed):
    """The alternatives to a parameter's layout, and the constraint that decided. Print it to read it.

    Attributes:
        parameter: its name; `equals`: how many equal ones share the decision, itself among them.
        choice: its layout and role.
        alternatives: every placement that its operators know, the chosen one first, then by time.
        binds: the constraint that decided, where one did.
        changes: what would change the choice.
    """

    parameter: str
    equals: int
    choice: str
    alternatives: tuple[Alternative, ...]
    binds: str
    changes: tuple[str, ...] = ()

    def __rich__(self) -> Sheet:
        shared = f" and its equals, {self.equals} in all" if self.equals > 1 else ""
        rows, base = [], self.alternatives[0].seconds
        for a in self.alternatives:
            step = "" if a.reason else f"{1e3 * a.seconds:.4f} ms"
            beside = f"{a.seconds / base - 1:+.2%}" if base else ""
            rows.append((a.layout, amount(a.parameter_bytes), step, a.reason or (beside, "chosen")[a.chosen]))
        table = Table(rows, "lrrl", ("placement", "on a rank", "step", ""), gap=5)
        above = Line(f"{self.parameter}{shared}: {self.choice}", style="bold"), table, Line(f"binds: {self.binds}")
        return Sheet([*above, *(Line(f"would change it: {x}") for x in self.changes)])


def explain(plan: Plan, name: str) -> Explanation:
    """Explain the layout of a parameter of a plan made in this process; see `Plan.explain`.

    Args:
        plan: one that was made in this process.
        name: of a parameter, or an alias of one.
    """
    parameter = next((p for p in plan.parameters if name in (p.name, *p.aliases)), None)
    if parameter is None:
        raise InputError(f"the plan has no parameter {name!r}. Names are like {near(name, plan.placements)}.")
    if plan.builder is None:
        reason = f" ({parameter.reason})" if parameter.reason else ""
        raise PlanError(
            f"{parameter.name} is {_choice(parameter)}{reason}. What else it could be is not known here: the plan was "
            "loaded, or made in another process, and the problem that it was solved from is not saved with it. Make it "
            "again with autotp.plan(...) and ask that one."
        )
    return _Explainer(plan, plan.builder, parameter).run()


@dataclass
class _Explainer:
    plan: Plan
    builder: Builder
    parameter: Parameter

    @property
    def leaf(self) -> fx.Node:
        return next(n for n, x in self.builder.leaves.items() if x.name == self.parameter.name)

    def run(self) -> Explanation:
        pin = self.builder.user.parameters.get(self.parameter.name)
        pins = {k: v for k, v in self.builder.pins.items() if pin is None or k != pin.key}
        free = replace(self.builder, pins=pins)
        problem, heads = free.build()
        # Every alternative asks for the same conversions.
        problem = replace(problem, convert=cache(problem.convert), traffic=cache(problem.traffic))
        at = heads.index(free.same[self.leaf])
        alternatives = [self._alternative(problem, at, choice) for choice in problem.items[at].choices]
        alternatives.sort(key=lambda a: (not a.chosen, bool(a.reason), a.seconds, a.layout))
        binds = f"{pin} by the user" if pin is not None else self._binds(alternatives)
        equals, changes = problem.items[at].count, tuple(self._changes(alternatives))
        return Explanation(self.parameter.name, equals, _choice(self.parameter), tuple(alternatives), binds, changes)

    def _alternative(self, problem: Problem, at: int, choice: Choice) -> Alternative:
        """Solve for the best plan with this placement of the parameter, which is one of the choices of item `at`."""
        item = problem.items[at]
        layout, one = choice.outs[0], replace(item, choices=[choice])
        here = layout.words(True), layout == self.parameter.layout, choice.parameter_bytes * item.count
        try:
            solution: Solution = solve(replace(problem, items=[*problem.items[:at], one, *problem.items[at + 1 :]]))
        except PlanError as e:
            return Alternative(*here, reason=f"no such plan: {first_line(e)}")
        return Alternative(*here, solution.seconds, solution.parameter_bytes)

    def _binds(self, alternatives: Sequence[Alternative]) -> str:
        """Name the constraint that rules a faster placement out."""
        choice = alternatives[0]
        faster = [a for a in alternatives[1:] if not a.reason and a.seconds < choice.seconds * (1 - RELATIVE_SECONDS)]
        limit = self.plan.totals.least_parameter_bytes * SLACK
        # A faster one was there, so the limit on parameters ruled it out: it comes before time.
        if faster:
            best = faster[0]
            return (
                f"parameters per rank come before time: {best.layout} would save "
                f"{1 - best.seconds / choice.seconds:.2%} of the step, but the rank would hold "
                f"{amount(best.plan_parameter_bytes)} of parameters, and {SLACK} times the least are {amount(limit)}"
            )
        if self.builder.memory is not None and any("memory=" in a.reason for a in alternatives):
            return f"memory={amount(self.builder.memory)}: other placements leave no plan that fits"
        # Of what is left, whole heads forbid some placements before the solver sees them.
        limits = [b.limit for b in self.plan.blocks if self.parameter.name in b.parameters and b.limit]
        if limits:
            return limits[0]
        if len(alternatives) == 1:
            return f"nothing else is legal{f': {self.parameter.reason}' if self.parameter.reason else ''}"
        return "none: every other placement takes longer, or as long"

    def _changes(self, alternatives: Sequence[Alternative]) -> Iterator[str]:
        """Yield what would change the choice: another degree, where heads do not fit this one."""
        tp = self.plan.tp
        for block in self.builder.parts:
            if self.leaf not in block.parameters or block.heads is None:
                continue
            count, kv = block.heads.count, block.heads.kv
            # Fewer key heads than ranks: each is on several ranks, whole or with the queries that read it.
            if isinstance(kv, int) and isinstance(count, int) and kv < tp and kv < count:
                reader, slot, _ = block.heads.kv_at
                layout = self.plan.decisions[reader.name].ins[slot]
                copied = f"each whole on {counted(layout.copies, 'rank')}"
                placed = copied if layout.sharded_dim is not None else "split, and all of k and v on every rank"
                if self.parameter.layout == I:
                    extra_bytes = alternatives[0].parameter_bytes * (1 - 1 / tp)
                    placed = f"whole on every rank, +{amount(extra_bytes)}"
                yield f"kv heads {kv} < tp {tp}: {placed}; {self._degree(kv)}"
            elif isinstance(count, int) and count % tp:
                fits = max(d for d in range(1, tp + 1) if count % d == 0)
                yield f"{count} heads are no multiple of tp {tp}; {self._degree(fits)}"

    def _degree(self, tp: int) -> str:
        """Describe the cost of another degree, in the time of all its devices."""
        other = decide(replace(self.builder, tp=tp)).solution
        assert other is not None
        # Of tp alone, as the other degree was solved.
        change = other.seconds * tp / (over_tp(self.plan) * self.plan.tp) - 1
        word = "cheaper" if change < 0 else "dearer"
        return f"tp {tp} would be {abs(change):.1%} {word} in device time ({1e3 * other.seconds:.3f} ms a step)"


def _choice(parameter: Parameter, units: bool = True) -> str:
    words = parameter.layout.words(units)
    return f"{words}, {parameter.role}" if parameter.role != "whole" else words


# two plans


@dataclass(frozen=True)
class Comparison(Printed):
    """The differences of two plans. Print it to read it; empty `parameters` and `collectives` where they do the same.

    Attributes:
        names: of the two plans.
        totals: (what, first, second) as text.
        parameters: (name, how many equals, placement in the first, in the second), for those whose placements differ.
        collectives: (collective, direction, calls and bytes of the first, of the second), for those that differ.
    """

    names: tuple[str, str]
    totals: tuple[tuple[str, str, str], ...]
    parameters: tuple[tuple[str, int, str, str], ...]
    collectives: tuple[tuple[str, str, str, str], ...]

    def __rich__(self) -> Sheet:
        return Sheet(self._view())

    def _view(self) -> View:
        yield Table(self.totals, "lll", ("", *self.names))
        if self.collectives:
            yield from (Line(), Table(self.collectives, "llll", ("collectives", "", *self.names)))
        rows = [(times(name, count), a, b) for name, count, a, b in self.parameters]
        yield Line()
        yield Table(rows, "lll", ("parameters", *self.names)) if rows else Line("all placements are the same")


def compare(one: Plan, other: Plan) -> Comparison:
    """Compare two plans; see `Plan.compare`."""
    sides = _collectives(one), _collectives(other)
    none = "0 calls, 0 B"
    calls = [(*key, sides[0].get(key, none), sides[1].get(key, none)) for key in sides[0] | sides[1]]
    totals = tuple((what, a, b) for (what, a), (_, b) in zip(_totals(one), _totals(other), strict=True))
    differing = tuple(row for row in calls if row[2] != row[3])
    return Comparison((_name(one), _name(other)), totals, tuple(_parameters(one, other)), differing)


def _name(plan: Plan) -> str:
    return f"{plan.model}, tp {plan.tp}, {plan.cluster}, {plan.objective}"


def _totals(plan: Plan) -> list[tuple[str, str]]:
    t = plan.totals
    return [
        ("parameters per rank", f"{t.local_parameters:,}"), ("step", f"{1e3 * t.seconds:.3f} ms"),
        ("sent forward", amount(t.forward_bytes)), ("sent backward", amount(t.backward_bytes)),
        ("memory at the peak", amount(plan.memory.peak)),
    ]  # fmt: skip


def _parameters(one: Plan, other: Plan) -> Iterator[tuple[str, int, str, str]]:
    """Yield the parameters whose placements differ, those of equal blocks as one."""
    units = one.tp == other.tp
    sides = []
    for plan in (one, other):
        sides.append({p.name: (p.first or p.name, _choice(p, units)) for p in plan.parameters})
    groups = Counter()
    for name in sides[0] | sides[1]:
        (first, a), (second, b) = (side.get(name, ("", "not there")) for side in sides)
        if a != b:
            groups[first or second, a, b] += 1
    yield from ((name, count, a, b) for (name, a, b), count in groups.items())


def _collectives(plan: Plan) -> dict[tuple[str, str], str]:
    """Map primitive and direction to calls and bytes."""
    sizes = defaultdict(list)
    for c in plan.collectives:
        for way, call, size in c.ways:
            if call:
                sizes[primitive(call), way].append(size)
    return {key: f"{len(x)} calls, {amount(sum(x))}" for key, x in sizes.items()}
