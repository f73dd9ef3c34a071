"""The content of a plan in words, part by part and in order: `report` as text, and the parts that `html` lays out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotp.cost.terms import TERMS
from autotp.plans.estimates import OUTSIDE
from autotp.text import amount, counted, number, seconds

from .terminal import Grid, Line, Table, View

if TYPE_CHECKING:
    from autotp.cost.terms import Memory
    from autotp.ir.layouts import Layout
    from autotp.plans.estimates import Axes, Degree
    from autotp.plans.plan import Collective, Parameter, Plan

Labelled = tuple[str, Sequence[str]]  # a name, and lines of what it comes to

MARKS = {"f_star": "f*", "g_star": "g*"}
NAMES = {"mlp": "MLP"}
RELATIVE_SECONDS = 1e-6  # of the step: less is printed as equal
WORDS_IN_A_LINE = 4
WHOLE_SHARE = 0.99  # of the arithmetic, or of the weights where there is none: more splits nothing


@dataclass(frozen=True)
class EqualBlocks:
    """A block and its equals, or the rest that is in no block.

    Attributes:
        kind: of the block; `module`: its path; `count`: how many are equal.
        detail: what it is and what one rank has of it; `limit`: what the number of heads forbids.
        parameters: its own; weights: name, role, whole shape, shape on the fullest rank of each.
        collectives: of it and its equals, those of one place together.
    """

    kind: str
    module: str
    count: int
    detail: str
    limit: str
    parameters: Sequence[Parameter]
    weights: Sequence[tuple[str, ...]]
    collectives: Sequence[Sequence[Collective]]

    @property
    def title(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        return " ".join(filter(None, [self.kind, self.module])) + times

    @property
    def sends(self) -> list[tuple[str, ...]]:
        """Rows by place: Megatron's name, layouts, operator, and the bytes that a rank sends forward and backward."""
        rows = []
        for equal in self.collectives:
            c = equal[0]
            words = []
            for way, call, size in c.ways:
                words.append(f"{primitive(call)} {amount(size)}" if call else f"no {way}")
            rows.append((MARKS.get(c.name, c.name), c.change, self.maker(equal), *words))
        return rows

    def maker(self, equal: Sequence[Collective]) -> str:
        """Name the operator that made a value, and how many of the equal blocks convert it where not all do."""
        c, many = equal[0], len(equal)
        maker = f"{operator(c.op)} ({last(c.source)})" if c.source else operator(c.op)
        if many < self.count:
            return f"{maker} ({many} of {self.count})"
        return times(maker, many if many > self.count else 1)


def parts(plan: Plan) -> Iterator[EqualBlocks]:
    """Yield the blocks, equal ones folded, and then the rest that is in no block."""
    parameters = {p.name: p for p in plan.parameters}
    names = set()
    for i, block in enumerate(plan.blocks):
        if block.first != i:
            continue
        members = {j for j, b in enumerate(plan.blocks) if b.first == i}
        detail = f"{block.detail}; per rank {block.local}" if block.local else block.detail
        # A block may read a weight in a buffer.
        weights = [parameters[n] for n in block.parameters if n in parameters]
        yield EqualBlocks(
            NAMES.get(block.kind, block.kind), block.module, len(members), detail, block.limit, weights,
            _weights(weights, block.module, names), _by_place(c for c in plan.collectives if c.block in members),
        )  # fmt: skip
        names.update(block.parameters)
    inside = {n for b in plan.blocks for n in b.parameters}
    others = [p for p in plan.parameters if p.name not in inside]
    outside = _by_place(c for c in plan.collectives if c.block is None)
    if others or outside:
        yield EqualBlocks("elsewhere", "", 1, "", "", others, _weights(others, "", names), outside)


def _weights(parameters: Sequence[Parameter], module: str, names: set[str]) -> list[tuple[str, ...]]:
    rows = []
    for p in parameters:
        name = p.name.removeprefix(module + ".") if module else p.name
        where = f", dim {p.layout.sharded_dim}" if p.layout.sharded_dim is not None else ""
        where += f" in {p.layout.pieces} pieces" if p.layout.pieces != 1 else ""
        tied = " (tied)" if p.name in names or p.aliases else ""
        rows.append((f"{name}{tied}", f"{p.role}{where}", shape(p.shape), shape(p.local)))
    return rows


def _by_place(collectives: Iterable[Collective]) -> list[list[Collective]]:
    groups = {}
    for c in collectives:
        groups.setdefault((c.name, c.change, c.first, c.bytes), []).append(c)
    return list(groups.values())


def totals(plan: Plan) -> Iterator[Labelled]:
    """Yield the totals of a plan: a name, and lines of what it comes to."""
    t, m = plan.totals, plan.memory
    yield "parameters per rank", [of(t.local_parameters, t.parameters)]
    yield "forward flops per rank", [of(t.local_flops, t.flops)]
    traffic = [f"{amount(t.forward_bytes)} forward, {amount(t.backward_bytes)} backward"]
    if again := t.terms.get("regathered_bytes"):
        traffic.append(f"{amount(again)} gathered again backward, for it does not fit")
    yield "sent per rank and step", traffic
    if t.seconds:
        least, proved, behind = optimality(plan)
        short = f"the least is {seconds(least)}, " if behind else ""
        best = "optimal" if proved else f"bound = {seconds(t.bound)}, gap = {1 - t.bound / least:.1%}"
        best += f": {short}band {t.band:.3g}" if t.band else ""
        terms = [x for x in TERMS if t.terms.get(x) and TERMS[x].step]
        sign = {True: "less ", False: ""}
        words = [f"{sign[TERMS[x].step < 0]}{x} {seconds(t.terms[x])}" for x in terms]
        yield "predicted step", [f"{seconds(t.seconds)} ({best})", *_lines(words)]
    if t.megatron_step:
        megatron = f"{of_megatron(plan, 'its')} ({seconds(t.megatron_step)}, {amount(t.megatron_bytes)} sent)"
        yield "against Megatron's plan", [megatron]
    if states := cache(plan):
        yield "cache", [states]
    yield from _batch_axis(plan.batch)
    bytes_by_part = [f"{name} {amount(size)}" for name, size in memory_parts(m)]
    yield "memory per rank", [f"{amount(m.peak)} at the peak, {m.phase} of {m.at}", *_lines(bytes_by_part)]


def _lines(words: Sequence[str]) -> list[str]:
    """Join the words, so many in a line."""
    return [", ".join(words[i : i + WORDS_IN_A_LINE]) for i in range(0, len(words), WORDS_IN_A_LINE)]


def optimality(plan: Plan) -> tuple[float, bool, bool]:
    """Return the least seconds of a step over tp of any plan of this model; whether they are proved; and whether this
    plan's are more."""
    t, step = plan.totals, over_tp(plan)
    least = t.least_seconds or step
    return least, least - t.bound < RELATIVE_SECONDS * least, step - least > RELATIVE_SECONDS * least


def of_megatron(plan: Plan, whose: str = "Megatron's") -> str:
    """Describe step and bytes as parts of those of Megatron's plan."""
    t = plan.totals
    sent_bytes = t.forward_bytes + (t.backward_bytes if plan.objective == "training" else 0.0)
    ratio = f", {sent_bytes / t.megatron_bytes:.2f} of its bytes" if t.megatron_bytes else ""
    return f"{over_tp(plan) / t.megatron_step:.2f} of {whose} step{ratio}"


def over_tp(plan: Plan) -> float:
    """Return the seconds of a step without what it waits for dp."""
    return plan.totals.seconds - plan.batch.exposed


def over(plan: Plan) -> str:
    """Describe the ranks."""
    ranks = counted(plan.tp, "rank")
    beside = plan.batch.degrees
    return f"{' x '.join(map(str, beside.values()))} x {ranks} ({plan.batch.name} x tp)" if beside else ranks


def _batch_axis(axis: Axes) -> Iterator[Labelled]:
    """Describe the traffic over the data-parallel axis."""
    if axis.size == 1:
        return
    what = "weights gathered, gradients reduce-scattered" if axis.fully_shard else "gradients all-reduced"
    beside = f", beside a backward of {seconds(axis.backward)}" if axis.backward else ""
    lines = [f"{what}: {amount(axis.sent)} sent, {seconds(axis.seconds)}{beside}"]
    if axis.values:
        other = "a loss" if axis.cp == 1 else "keys and values, or heads"
        lines.append(f"other values, such as {other}: {amount(axis.values)} sent")
    yield f"over {axis.text}", lines


def all_whole(plan: Plan) -> View:
    """Warn that a plan splits no arithmetic; nothing where it splits some, or there is one rank."""
    t = plan.totals
    split = t.local_flops < WHOLE_SHARE * t.flops if t.flops else t.local_parameters < WHOLE_SHARE * t.parameters
    if plan.tp > 1 and not split and not plan.tables:
        text = (
            f"NO ARITHMETIC IS SPLIT: each of the {plan.tp} ranks does all of it. The notes, and the end of "
            "plan.report(), say which operators forbid it"
        )
        yield Line(text, then="  ", style="bold red")


def cache(plan: Plan) -> str:
    """Describe the tensors that are carried from call to call: their number, placements, and bytes on a rank.

    Of a cache of calls of another kind only the bytes are known.
    """
    counts, m = Counter(_placement(x, plan.tp) for x in plan.states.values()), plan.memory
    words = [f"{counted(n, 'tensor')}, {placed}" for placed, n in counts.items()]
    grows = (m.cache_token, "token"), (m.cache_sequence, "sequence")
    return ", ".join([*words, *(f"{amount(size)} per {unit} and rank" for size, unit in grows if size)])


def _placement(layout: Layout, tp: int) -> str:
    """Write `Shard(1): 2 of 8`: the part of the dimension that the fullest rank has."""
    dim, distribution = layout.sharded_dim, layout.distribution
    if dim is None or distribution is None:
        return "whole"
    return f"Shard({dim}): {distribution.local(0, tp)} of {distribution.length}"


def memory_parts(m: Memory) -> list[tuple[str, float]]:
    """Return the parts of the fullest rank's memory that are not empty, in bytes."""
    parts = [
        ("parameters", m.parameters), ("buffers", m.buffers), ("gradients", m.gradients), (m.optimizer, m.states),
        ("kept activations", m.activations), ("keys and values", m.cache), ("working set", m.working),
    ]  # fmt: skip
    return [(name, size) for name, size in parts if size]


def sublayers(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return the parts of one of the repeated blocks, and what is outside: name, compute, communication and its share.

    The last two are empty where there is none. No rows where nothing repeats.
    """
    if plan.layer is None or plan.layer.count == 1:
        return []
    rows, outside = [], plan.layer.outside
    for p in (*plan.sublayers, *([outside] if outside.seconds else [])):
        communication = (seconds(p.communication), f"{p.share:.1%}") if p.communication else ("", "")
        rows.append((p.name, seconds(p.compute), *communication))
    return rows


def left_whole(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """Map each reason to the parameters that it keeps whole, folded over equal blocks, with their shape."""
    reasons = {}
    for p in plan.parameters:
        if p.role == "whole":
            reasons.setdefault(p.reason or "", {}).setdefault(p.first, []).append(p)
    rows = {}
    for reason, groups in reasons.items():
        rows[reason] = [(times(name, len(x)), shape(x[0].shape)) for name, x in groups.items()]
    return rows


def degrees(rows: Sequence[Degree]) -> Table:
    """Tabulate the degrees of a sweep."""
    unit = rows[0].unit if rows else "samples"
    names = ("tp", "step", "exposed", "sent", "memory", "", "largest batch", f"{unit}/s/device")
    cells = []
    for r in rows:
        share = f"{seconds(r.exposed)} ({r.exposed / r.seconds:.0%})" if r.seconds else "-"
        batch = "fixed" if r.largest_batch is None else str(r.largest_batch)
        cells.append((str(r.tp), seconds(r.seconds), share, amount(r.sent), amount(r.memory),
                      "" if r.fits else "too much", batch, number(r.throughput)))  # fmt: skip
    return Table(cells, "rrrrrlrr", names, (*names[:-2], "largest\nbatch", f"{unit}/s\n/device"), indent=2, gap=2)


# the whole plan


def report(plan: Plan) -> View:
    """Write all of a plan: a headline, the blocks, the totals, what was left whole, and the notes."""
    yield Line(f"{plan.model} over {over(plan)} ({plan.cluster}, {plan.objective})", style="bold")
    yield from all_whole(plan)
    yield from (Line(f"captured with {inputs}", style="dim") for inputs in plan.inputs)
    for part in parts(plan):
        yield from (Line(), *heading(part, part.detail))
        yield Grid(part.weights, "llrr", (42, 36, 13, 13), (22, 26, 13, 13))
        yield Grid(part.sends, "lllll", (10, 12, 32, 25, 25), (10, 12, 24, 20, 20), style="cyan")
    yield from (Line(), *_labelled(totals(plan)))
    if rows := sublayers(plan):
        assert plan.layer is not None
        yield from (Line(), *_labelled([(f"one of {plan.layer.count} blocks", [plan.layer.module])]))
        for name, compute, communication, share in rows:
            label = "outside of these blocks" if name == OUTSIDE else f"  {name}"
            sends = f", communication {communication} ({share})" if communication else ""
            yield from _labelled([(label, [f"compute {compute}{sends}"])])
    reasons = left_whole(plan)
    yield from (Line(), Line("Left whole, and why", style="bold")) if reasons else ()
    for reason, names in reasons.items():
        yield from (Line(reason, "  "), Grid(names, "lr", (90, 13), (61, 13), indent="    "))
    yield from table_of_degrees(plan)
    for title, lines in (("Runs with", plan.fired), ("Notes", plan.notes)):
        yield from (Line(), Line(title, style="bold")) if lines else ()
        yield from (Line(line, "  ") for line in lines)


def heading(part: EqualBlocks, detail: str) -> View:
    """Write the title of a part, and the limit of its heads."""
    yield Line(detail, title=part.title, style="bold")
    if part.limit:
        yield Line(f"limit: {part.limit}", "  ", style="yellow")


def table_of_degrees(plan: Plan) -> View:
    """Write the degrees that were tried, under their heading."""
    return (Line(), Line("Degrees", style="bold"), degrees(plan.degrees)) if plan.degrees else ()


def _labelled(rows: Iterable[Labelled]) -> View:
    for name, lines in rows:
        labels = [name, *[""] * (len(lines) - 1)]
        yield from (Line(text, f"{label:24} ", " " * 25) for label, text in zip(labels, lines, strict=True))


# words


def operator(name: str) -> str:
    """Return `mul` of `aten.mul.Tensor`."""
    return name.removeprefix("aten.").removeprefix("autotp.").split(".")[0]


def last(path: str) -> str:
    """Return the last part of a module path, with the one before it where that is only a number."""
    names = path.split(".")
    return ".".join(names[-2:] if names[-1].isdigit() else names[-1:])


def primitive(name: str | None) -> str:
    """Return `all-reduce` of `all_reduce`."""
    return (name or "").replace("_", "-")


def shape(sizes: Sequence[int]) -> str:
    """Write a shape as `64 x 128`."""
    return " x ".join(map(str, sizes)) or "scalar"


def times(name: str, count: int) -> str:
    """Write a name and its count as `layers.0.weight x 2`."""
    return f"{name} x {count}" if count > 1 else name


def of(local: float, whole: float) -> str:
    """Write a rank's part of a count."""
    return f"{number(local)} of {number(whole)}" + (f" ({local / whole:.1%})" if whole else "")
