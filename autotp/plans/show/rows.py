"""A plan as rows of words: `.report` sets them as text, `.page` as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotp.cost import Cluster
from autotp.cost.terms import TERMS
from autotp.errors import InputError
from autotp.ir.layouts import Layout
from autotp.text import amount, number, seconds

if TYPE_CHECKING:
    from autotp.cost.rank_memory import Memory
    from autotp.plans.estimates import Axis
    from autotp.plans.plan import Block, Collective, Parameter, Plan

MARKS = {"f_star": "f*", "g_star": "g*"}
NAMES = {"mlp": "MLP"}
SAME = 1e-6  # of the seconds: less is printed as equal
TERMS_IN_A_LINE = 4
WHOLE = 0.99  # of the arithmetic, or of the weights where there is none: what leaves so much whole splits nothing


@dataclass(frozen=True)
class EqualBlocks:
    """A block and its equals, or what is in none.

    Attributes:
        kind: of the block; `module`: its path; `count`: how many are equal.
        detail: what it is and what one rank has of it; `limit`: what the number of heads forbids.
        weights: name, role, whole shape, shape on the fullest rank; `parameters`: which they are.
        send_rows: Megatron's name, layouts, operator, and what one rank sends forward and backward; `collectives`: of
            those rows, the equal ones of each.
    """

    kind: str
    module: str
    count: int
    detail: str
    limit: str
    parameters: Sequence[Parameter]
    weights: list[tuple[str, ...]]
    send_rows: list[tuple[str, ...]]
    collectives: Sequence[Sequence[Collective]] = ()

    @property
    def title(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        return " ".join(filter(None, [self.kind, self.module])) + times


def parts(plan: Plan) -> Iterator[EqualBlocks]:
    """The blocks, equal ones folded, and then what is in none."""
    parameters: dict[str, Parameter] = {p.name: p for p in plan.parameters}
    names: set[str] = set()
    for i, block in enumerate(plan.blocks):
        if block.first == i:
            yield _part(plan, i, block, parameters, names)
            names.update(block.parameters)
    inside = {n for b in plan.blocks for n in b.parameters}
    others = [p for p in plan.parameters if p.name not in inside]
    outside = [c for c in plan.collectives if c.block is None]
    if others or outside:
        equal = _grouped(outside)
        yield EqualBlocks("elsewhere", "", 1, "", "", others, _weights(others, "", names), _send_rows(equal, 1), equal)


def _part(plan: Plan, index: int, block: Block, parameters: Mapping[str, Parameter], names: set[str]) -> EqualBlocks:
    members = {j for j, b in enumerate(plan.blocks) if b.first == index}
    detail = f"{block.detail}; per rank {block.local}" if block.local else block.detail
    own = [parameters[n] for n in block.parameters if n in parameters]  # a block may read a weight in a buffer
    weights = _weights(own, block.module, names)
    equal = _grouped([c for c in plan.collectives if c.block in members])
    kind = NAMES.get(block.kind, block.kind)
    return EqualBlocks(
        kind, block.module, len(members), detail, block.limit, own, weights, _send_rows(equal, len(members)), equal
    )


def _weights(parameters: Sequence[Parameter], module: str, names: set[str]) -> list[tuple[str, ...]]:
    rows = []
    for p in parameters:
        name = p.name.removeprefix(module + ".") if module else p.name
        where = f", dim {p.layout.sharded_dim}" if p.layout.sharded_dim is not None else ""
        if (several := p.layout.pieces) != 1:
            where += f" in {several} pieces"
        tied = " (tied)" if p.name in names or p.aliases else ""
        rows.append((f"{name}{tied}", f"{p.role}{where}", shape(p.shape), shape(p.local)))
    return rows


def _grouped(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """The collectives of a block and its equals, those of one place together."""
    groups: dict[tuple, list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.name, c.change, c.first, c.bytes), []).append(c)
    return list(groups.values())


def _send_rows(groups: Sequence[Sequence[Collective]], members: int) -> list[tuple[str, ...]]:
    """One row for each place."""
    rows = []
    for equal in groups:
        c = equal[0]
        ways = (_way("forward", c.forward, c.forward_bytes), _way("backward", c.backward, c.backward_bytes))
        rows.append((MARKS.get(c.name, c.name), c.change, maker(equal, members), *ways))
    return rows


def maker(equal: Sequence[Collective], members: int) -> str:
    """The operator that made a value, and how many of the equal blocks convert it where not all do."""
    c = equal[0]
    times = f" ({len(equal)} of {members})" if len(equal) < members else ""
    times = f" x {len(equal)}" if len(equal) > members else times
    return (f"{operator(c.op)} ({last(c.source)})" if c.source else operator(c.op)) + times


def _way(direction: str, name: str | None, nbytes: float) -> str:
    return f"{primitive(name)} {amount(nbytes)}" if name else f"no {direction}"


def totals(plan: Plan) -> list[tuple[str, str]]:
    """The totals of a plan: a name and a value; an empty name goes on with the row before."""
    t = plan.totals
    rows = [
        ("parameters per rank", of(t.local_parameters, t.parameters)),
        ("forward flops per rank", of(t.local_flops, t.flops)),
        ("sent per rank and step", f"{amount(t.forward_bytes)} forward, {amount(t.backward_bytes)} backward"),
    ]
    if again := t.terms.get("regathered_bytes"):
        rows.append(("", f"{amount(again)} gathered again backward, for it does not fit"))
    if t.seconds:
        rows.append(("predicted step", f"{seconds(t.seconds)} ({proof(plan)})"))
        rows += [("", part) for part in terms(plan)]
    if t.megatron_step:
        rows.append(("against Megatron's plan", against(plan)))
    states = cache(plan)
    carried = [("cache", states)] if states else []
    return [*rows, *carried, *_batch_axis(plan.batch), *_memory(plan.memory)]


def optimality(plan: Plan) -> tuple[float, bool, bool]:
    """The least seconds of a step over tp that any plan of this model has; whether they are proved; whether the plan's
    are more."""
    t, own = plan.totals, over_tp(plan)
    least = t.least_seconds or own
    return least, least - t.bound < SAME * least, own - least > SAME * least


def proof(plan: Plan) -> str:
    """What is proved of the step over tp: that it is the least, or one within the band of the least."""
    t, (least, proved, behind) = plan.totals, optimality(plan)
    short = f"the least is {seconds(least)}, " if behind else ""
    best = "optimal" if proved else f"bound = {seconds(t.bound)}, gap = {1 - t.bound / least:.1%}"
    return f"{best}: {short}band {t.band:.3g}" if t.band else best


def against(plan: Plan) -> str:
    """Step and bytes beside those of Megatron's plan, and what these are."""
    t = plan.totals
    return f"{of_megatron(plan, 'its')} ({seconds(t.megatron_step)}, {amount(t.megatron_bytes)} sent)"


def of_megatron(plan: Plan, whose: str = "Megatron's") -> str:
    """Step and bytes as parts of those of Megatron's plan."""
    t = plan.totals
    sent_bytes = t.forward_bytes + (t.backward_bytes if plan.objective == "training" else 0.0)
    ratio = f", {sent_bytes / t.megatron_bytes:.2f} of its bytes" if t.megatron_bytes else ""
    return f"{over_tp(plan) / t.megatron_step:.2f} of {whose} step{ratio}"


def over_tp(plan: Plan) -> float:
    """Seconds of a step without what it waits for dp."""
    return plan.totals.seconds - plan.batch.exposed


def terms(plan: Plan) -> Iterator[str]:
    """The step's terms in seconds, a few in a line: those that there are, with their sign in the step."""
    there = {name: x for name, x in plan.totals.terms.items() if x and name in TERMS and TERMS[name].step}
    words = []
    for name in TERMS:
        sign = "less " if TERMS[name].step < 0 else ""
        words += [f"{sign}{name} {seconds(there[name])}"] if name in there else []
    for i in range(0, len(words), TERMS_IN_A_LINE):
        yield ", ".join(words[i : i + TERMS_IN_A_LINE])


def over(plan: Plan) -> str:
    """The ranks, in words."""
    ranks = f"{plan.tp} rank{'' if plan.tp == 1 else 's'}"
    return ranks if plan.batch.size == 1 else f"{plan.batch.size} x {ranks} ({plan.batch.name} x tp)"


def _batch_axis(axis: Axis) -> Iterator[tuple[str, str]]:
    """The traffic over the data-parallel axis."""
    if axis.size == 1:
        return
    what = "weights gathered, gradients reduce-scattered" if axis.fully_shard else "gradients all-reduced"
    beside = f", beside a backward of {seconds(axis.backward)}" if axis.backward else ""
    yield f"over {axis.name}={axis.size}", f"{what}: {amount(axis.sent)} sent, {seconds(axis.seconds)}{beside}"
    if axis.values:
        other = "a loss" if axis.name == "dp" else "keys and values, or heads"
        yield "", f"other values, such as {other}: {amount(axis.values)} sent"


def _memory(m: Memory) -> Iterator[tuple[str, str]]:
    """What the fullest rank holds, the parts that are there, and where the peak is."""
    yield "memory per rank", f"{amount(m.peak)} at the peak, {m.phase} of {m.at}"
    shares = [f"{name} {amount(size)}" for name, size in memory_parts(m)]
    for line in (shares[:4], shares[4:]):
        if line:
            yield "", ", ".join(line)


def all_whole(plan: Plan) -> str:
    """What to say of a plan that splits no arithmetic; empty where it splits some, or there is one rank."""
    t = plan.totals
    split = t.local_flops < WHOLE * t.flops if t.flops else t.local_parameters < WHOLE * t.parameters
    if plan.tp == 1 or split or plan.tables:
        return ""
    return (
        f"NO ARITHMETIC IS SPLIT: each of the {plan.tp} ranks does all of it. The notes, and the end of plan.report(), "
        "say which operators forbid it"
    )


def cache(plan: Plan) -> str:
    """What is carried from call to call: how many tensors, how they lie, and what a rank holds of them.

    Of a cache that calls of another kind have, what a rank holds is known alone.
    """
    counts = Counter(_placement(x, plan.tp) for x in plan.states.values())
    tensors = []
    for placed, n in counts.items():
        tensors.append(f"{n} tensor{'' if n == 1 else 's'}, {placed}")
    m = plan.memory
    grows = [f"{amount(m.cache_token)} per token and rank"] if m.cache_token else []
    grows += [f"{amount(m.cache_sequence)} per sequence and rank"] if m.cache_sequence else []
    return ", ".join([*tensors, *grows])


def _placement(layout: Layout, tp: int) -> str:
    """`Shard(1): 2 of 8`: the part of the dimension that the fullest rank has."""
    dim, distribution = layout.sharded_dim, layout.distribution
    if dim is None or distribution is None:
        return "whole"
    return f"Shard({dim}): {distribution.local(0, tp)} of {distribution.length}"


def memory_parts(m: Memory) -> list[tuple[str, float]]:
    """The parts of what the fullest rank holds, in bytes, that are there."""
    parts = [
        ("parameters", m.parameters), ("buffers", m.buffers), ("gradients", m.gradients), (m.optimizer, m.states),
        ("kept activations", m.activations), ("keys and values", m.cache), ("working set", m.working),
    ]  # fmt: skip
    return [(name, size) for name, size in parts if size]


def capacity(plan: Plan) -> float:
    """Bytes of a device's memory; 0 where the cluster is not known here."""
    if plan.machines:
        return float(plan.machines["memory_size"])
    try:
        return Cluster.preset(plan.cluster).memory_size
    except InputError:
        return 0.0


def sublayers(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Of one of the repeated blocks and of what is outside: name, compute, communication and its share; the last two
    empty where there is none. No rows where nothing repeats."""
    if plan.layer is None or plan.layer.count == 1:
        return []
    out = plan.layer.outside
    every = [*plan.sublayers, *([out] if out.seconds else [])]
    out = []
    for p in every:
        communication = (seconds(p.communication), f"{p.share:.1%}") if p.communication else ("", "")
        out.append((p.name, seconds(p.compute), *communication))
    return out


def left_whole(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """The operator to blame -> the parameters that it keeps whole, folded over equal blocks, with their shape."""
    reasons: dict[str, dict[str, list[Parameter]]] = {}
    for p in plan.parameters:
        if p.role == "whole":
            reasons.setdefault(p.reason or "", {}).setdefault(p.first, []).append(p)
    out: dict[str, list[tuple[str, str]]] = {reason: [] for reason in reasons}
    for reason, groups in reasons.items():
        for first, x in groups.items():
            name = f"{first} x {len(x)}" if len(x) > 1 else first
            out[reason].append((name, shape(x[0].shape)))
    return out


# words


def operator(name: str) -> str:
    """`mul` of `aten.mul.Tensor`."""
    return name.removeprefix("aten.").removeprefix("autotp.").split(".")[0]


def last(path: str) -> str:
    """The last part of a module path, with the one before it where that is only a number."""
    names = path.split(".")
    return ".".join(names[-2:] if names[-1].isdigit() else names[-1:])


def primitive(name: str | None) -> str:
    """`all-reduce` of `all_reduce`."""
    return (name or "").replace("_", "-")


def shape(sizes: Sequence[int]) -> str:
    """`64 x 128`."""
    return " x ".join(map(str, sizes)) or "scalar"


def of(local: float, whole: float) -> str:
    """A rank's part of a count."""
    return f"{number(local)} of {number(whole)}" + (f" ({local / whole:.1%})" if whole else "")
