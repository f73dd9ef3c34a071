"""The first screen of a plan: model, mesh and cluster, whether it fits, the predicted step, memory and time by part,
and the blocks in short. At most `MAX_LINES` lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from autotp.plans.estimates import Decoding, decoding, of_device
from autotp.text import amount, number, seconds

from .document import (
    MARKS,
    EqualBlocks,
    all_whole,
    cache,
    heading,
    last,
    memory_parts,
    of_megatron,
    optimality,
    parts,
    primitive,
    table_of_degrees,
)
from .terminal import HOLD, Grid, Line, Sheet, View

if TYPE_CHECKING:
    from autotp.plans.estimates import Timed
    from autotp.plans.plan import Collective, Plan
    from autotp.plans.share_choice import ShareChoice

COLUMNS = 80  # of what `print` shows
MAX_LINES = 50  # of what is printed
MIN_BLOCK_LINES = 12
MAX_NOTES = 4
BAR = 64  # columns of a bar
LABEL = 8  # columns before what a line says
WORTH_SHARE = 0.01  # of the step: smaller costs are not spoken of
SENT_SHARE = 0.001  # of all bytes: places that send less are not shown
VALUE_SHARE = 0.01  # of the largest value that a layer converts: smaller ones are not drawn
MAX_FLOW_LINES = 4
LEGEND = (
    "I whole  R whole, gradient a sum  S(d) split along dim d  P a sum to be taken",
    "AG all-gather  RS reduce-scatter  AR all-reduce  A2A all-to-all; there/back",
    "plan.report() has all of it",
)
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
ROLES = {
    "column-parallel": "cols", "row-parallel": "rows", "vocabulary-parallel": "vocabulary",
    "expert-parallel": "experts", "elementwise": "split",
}  # fmt: skip
ATTENTION = ("scaled_dot_product_attention", "dealt_attention")


def overview(plan: Plan) -> Sheet:
    """Write the most important parts of a plan."""
    above, below, degrees_table = list(_head(plan)), list(_below(plan)), list(table_of_degrees(plan))
    room = MAX_LINES - _height(above) - _height(below) - 1 - (len(plan.degrees) + 4 if degrees_table else 0)
    return Sheet([*above, Line(), *_blocks(plan, max(room, MIN_BLOCK_LINES)), *degrees_table, *below], COLUMNS)


def _height(view: View) -> int:
    return sum(len(list(x.render(COLUMNS))) for x in view)


def _unbroken(phrases: Iterable[str], between: str = "; ") -> str:
    """Join phrases to one text, so that no line ends within a phrase."""
    return between.join(x.replace(" ", HOLD) for x in phrases if x)


def _head(plan: Plan) -> View:
    """Write the lines above the blocks."""
    beside = f" x {plan.batch.text}" if plan.batch.size > 1 else ""
    yield Line(f"{plan.model}  tp={plan.tp}{beside} on {plan.cluster}  {_priced(plan)}", style="bold")
    yield from all_whole(plan)
    yield from _fits(plan)
    yield from _step(plan)
    sizes, most = memory_parts(plan.memory), max(of_device(plan, "memory_size"), plan.memory.peak)
    letters = [(name[0], size, f"{name} {amount(size)}") for name, size in sizes]
    yield from _bar("memory", letters, most, "|" if most > plan.memory.peak else "")
    if sizes and (carried := cache(plan)):
        yield Line(carried, f"{'cache':{LABEL}}", " " * LABEL)
    yield from by_rank(plan)
    yield from _time(plan)
    yield from _flow(plan)
    dearest = max(_avoidable(plan), default=(0.0, "")) if plan.totals.seconds and plan.tp > 1 else (0.0, "")
    if dearest[0] and dearest[0] >= WORTH_SHARE * plan.totals.seconds:
        yield Line(f"! up to {seconds(dearest[0])} {dearest[1]}", then="  ", style="yellow")


def _priced(plan: Plan) -> str:
    """Describe the objective and the sizes of the example inputs."""
    t, many = plan.totals, plan.batch.size
    ranks = f" on each of {many} {plan.batch.name} ranks" if many > 1 else ""
    if not t.examples:
        return plan.objective
    if not t.length:
        return f"{plan.objective}, {t.examples} samples{ranks}"
    if plan.objective == "decode":
        return f"decode, one token for each of {t.examples} sequences of {t.length}{ranks}"
    return f"{plan.objective}, {t.examples} x {t.length} tokens{ranks}"


def _fits(plan: Plan) -> View:
    m, most = plan.memory, of_device(plan, "memory_size")
    share = f"{amount(m.peak)} of {amount(most)} a device"
    if plan.share_choice is not None:
        full = [f"rank {i} has {amount(plan.share_choice.limits[i])}" for i in plan.share_choice.full]
        text = f"does NOT fit: {', '.join(full)}" if full else "FITS on every rank"
        yield Line(text, "  " * bool(full), style="bold red" if full else "bold green")
    elif not most:
        yield Line(f"memory  {amount(m.peak)} a rank; what a device of {plan.cluster} has is not known")
    elif m.peak <= most:
        at = f"at the {m.phase} of {m.at}" if m.at else f"at the peak of the {m.phase}"
        text = f"FITS: {share}, {at}"
        yield Line(text if len(text) <= COLUMNS else f"FITS: {share}", style="bold green")
        if len(text) > COLUMNS:
            yield Line(_unbroken([at]), "  ")
    else:
        yield Line(f"does NOT fit: {share}", style="bold red")
        yield Line(_would_fit(plan, most), "  ", style="red")


def _would_fit(plan: Plan, most: float) -> str:
    """Name the smallest degree that was tried and fits, else one estimated from the peak; and the largest part."""
    m, fitting = plan.memory, [d.tp for d in plan.degrees if d.fits]
    least = math.ceil(plan.tp * m.peak / most)
    advice = f"tp={min(fitting)} fits" if fitting else f"about tp={least}, if memory fell with tp (autotp.sweep tells)"
    moving = m.activations + m.working
    if moving >= m.peak / 2:
        return f"{advice}; {moving / m.peak:.0%} are activations: a smaller batch, or checkpointing"
    splits = f": fully_shard over {plan.batch.name} splits those too"
    shard = "" if plan.batch.fully_shard or plan.objective != "training" else splits
    return f"{advice}; {m.steady / m.peak:.0%} are weights and what belongs to them{shard}"


def _step(plan: Plan) -> View:
    """Write the predicted step, its share of communication, and the rate."""
    t = plan.totals
    if not t.seconds:
        return
    least, proved, behind = optimality(plan)
    best = "optimal for this cost model" if proved else f"bound {seconds(t.bound)}"
    if behind:
        near = f"within {t.band:.3g} of"
        best = f"{near} optimal {seconds(least)}" if proved else f"{best}, {near} the least {seconds(least)}"
    phrases = [f"step {seconds(t.seconds)} ({best})", f"{t.communication / t.seconds:.0%} communication over tp"]
    if t.examples:
        units = t.examples * plan.batch.size * (t.length if t.length and plan.objective != "decode" else 1)
        unit, devices = "tokens" if t.length else "samples", plan.tp * plan.batch.size
        rate = f", {number(units / t.seconds / devices)} a device" if devices > 1 else ""
        phrases.append(f"{number(units / t.seconds)} {unit}/s{rate}")
    decoded = decoding(plan)
    phrases += [f"{decoded.share_of_limit:.0%} of the limit"] if decoded is not None else []
    phrases += [of_megatron(plan)] if t.megatron_step else []
    yield Line(_unbroken(phrases), then="  ")
    yield from _limit(decoded) if decoded is not None else ()


def _limit(decoded: Decoding) -> View:
    """Write the lower bound of a step of decoding, and the reads and collectives that make it."""
    limit, tokens = decoded.limit, decoded.most_tokens_per_second
    cached = f" and {amount(limit.cache)} of cache" if limit.cache else ""
    reads = f"{amount(limit.weights)} of weights{cached} at {limit.bandwidth / 1e12:.2f} TB/s"
    text = f"limit {seconds(limit.seconds)}, {number(tokens)} tokens/s: {reads}"
    text += f"; {seconds(limit.communication)} of collectives" if limit.communication else ""
    if decoded.ungathered:
        text += f"; priced as greedy generate(), which gathers none of {amount(decoded.ungathered)} of outputs"
    yield Line(text, then="  ")


def by_rank(plan: Plan) -> View:
    """Draw a bar of the weights of each rank where shares are unlike, and say what padding to the longest part costs;
    of unlike ranks a bar of the memory of each, and the shares that were chosen."""
    if plan.share_choice is not None:
        yield from _unlike(plan.share_choice)
        return
    if not plan.shares:
        return
    weights = [_elements(plan, rank) for rank in range(plan.tp)]
    for rank, size in enumerate(weights):
        yield Line("#" * round(BAR * size / max(weights[0], 1)), f"{f'rank {rank}':{LABEL}}", style="cyan")
        local, part = plan.memory.parameters * size / max(weights[0], 1), size / max(plan.totals.parameters, 1)
        text = f"share {plan.shares[rank]} of {sum(plan.shares)}: {amount(local)} of weights, {part:.0%} of all"
        yield Line(text, " " * LABEL)
    primitives = {way for c in plan.collectives for way in (c.forward, c.backward)} - {None, "all_reduce"}
    layouts = {x for how in plan.decisions.values() for x in (*how.ins, *how.outs)}
    if primitives and (padding := max([x.padding(plan.tp) for x in layouts], default=1.0)) > 1:
        yield Line(f"gathers and scatters send parts padded to the longest: up to {padding:.2f} times what there is")


def _unlike(choice: ShareChoice) -> View:
    """Draw the memory that unlike ranks use, and write the splits of families and the seconds of the slowest rank."""
    for rank, (size, limit) in enumerate(zip(choice.memory, choice.limits, strict=True)):
        bar = "#" * min(round(BAR * size / limit), BAR)
        yield Line(f"{bar:.<{BAR}}", f"{f'rank {rank}':{LABEL}}", style="cyan" if size <= limit else "red")
        yield Line(f"holds {amount(size)} of {amount(limit)}", " " * LABEL)
    splits = []
    for split in choice.dealt:
        ratio = ":".join(map(str, split.units))
        what = f" ({split.what})" * bool(split.what)
        splits.append(f"{split.length or 'sequences'} as {ratio}{what}")
    yield Line(f"shares  {'; '.join(splits)}", then=" " * LABEL)
    unfit = "" if choice.even_fits else ", which does not fit"
    even = f", evenly {seconds(choice.even)}{unfit}" if choice.even else ""
    bound = f"; with these placements no shares take less than {seconds(choice.bound)}" if choice.bound else ""
    padding = f"; {seconds(choice.padding)} of it for parts sent as long as the longest" if choice.padding > 0 else ""
    text = f"the slowest rank, collective by collective, takes {seconds(choice.seconds)}{even}{bound}{padding}"
    verdict = "; so the even split is kept" if choice.even == choice.seconds and not choice.asked else ""
    yield Line(text + verdict, " " * LABEL)


def _elements(plan: Plan, rank: int) -> int:
    """Count the elements of the weights of a rank."""
    return sum(math.prod(p.layout.local_shape(p.shape, plan.tp, rank)) for p in plan.parameters)


def _time(plan: Plan) -> View:
    """Draw a bar of a step: the repeated blocks, sublayer by sublayer, and what is outside of them."""
    layer = plan.layer
    if layer is None or not layer.seconds or not plan.totals.seconds:
        return
    letters, scale = [], layer.total / layer.seconds
    for part in (*layer.sublayers, *([layer.outside] if layer.outside.seconds else [])):
        count = 1.0 if part is layer.outside else scale
        share = f" ({part.share:.0%} communication)" if part.communication else ""
        letters.append((part.name[0], part.compute * count, f"{part.name} {seconds(part.seconds * count)}{share}"))
        letters.append(("~", part.communication * count, ""))
    yield from _bar("time", letters, sum(size for _, size, _ in letters), "", "~ communication")


def _bar(name: str, parts: Sequence[tuple[str, float, str]], most: float, end: str, note: str = "") -> View:
    """Draw a bar of letters, each part as long as its share of `most`, and below it the words for the letters."""
    letters, before = "", 0.0
    for letter, size, _ in parts:
        before += size
        letters += letter * (round(BAR * before / most) - len(letters))
    if parts:
        yield Line(letters.ljust(BAR if end else 0) + end, f"{name:{LABEL}}", style="cyan")
        yield Line(_unbroken((*(text for *_, text in parts), note), ", "), " " * LABEL)


def _avoidable(plan: Plan) -> Iterator[tuple[float, str]]:
    """Yield costs that are no part of tensor parallelism itself: seconds, and what they are spent on."""
    t, heads = plan.totals, {i for i, block in enumerate(plan.blocks) if block.kind == "head"}
    outputs = [c for c in plan.collectives if c.name == "gather" and c.forward and c.block in heads]
    gathered, trains = sum(c.forward_bytes for c in outputs), plan.objective == "training"
    # Whole logits are asked for by default, and cost more than any layer where the vocabulary is large.
    if gathered:
        part = t.communication * gathered / (t.forward_bytes + (t.backward_bytes if trains else 0.0))
        names = ", ".join(dict.fromkeys(last(c.source or c.module) for c in outputs))
        way = 'outputs="loss" or "sharded"' if trains else 'outputs="sharded"'
        yield part, f"go into gathering whole outputs ({names}, {amount(gathered)}), which {way} leaves split"
    # What is not split is computed on every rank: the share above an even one is lost.
    first, ranks = (plan.shares[0], sum(plan.shares)) if plan.shares else (1, plan.tp)
    even = t.flops * first / ranks
    if t.local_flops > 1.05 * even:
        extra = (t.seconds - t.communication) * (1 - even / t.local_flops)
        share = f"{t.local_flops / t.flops:.0%} of the flops where {first}/{ranks} would be even"
        yield extra, f"go into work that is whole on every rank: a rank has {share}"
    if (exposed := plan.batch.exposed) > 0:
        yield exposed, f"go over {plan.batch.name} and do not fit beside the backward"


# a layer as a line


def _flow(plan: Plan) -> View:
    """Write one of the repeated blocks, or the model where none repeats, in the order of the forward."""
    words = _words(plan, plan.layer.steps) if plan.layer is not None and plan.tp > 1 else []
    text = []
    for i, (name, role) in enumerate(words):
        following = words[i + 1][1] if i + 1 < len(words) else ""
        text.append(f"{name}[{role}]" if role and role != following else name)
    if any("-->" in word for word in text):
        lines = [x.plain for x in Line(" ".join(text), f"{'layer':{LABEL}}", " " * LABEL).render(COLUMNS)]
        yield from map(Line, lines[:MAX_FLOW_LINES])
        yield from [Line("...", " " * LABEL)] if len(lines) > MAX_FLOW_LINES else []


def _words(plan: Plan, steps: Sequence[Timed]) -> list[tuple[str, str]]:
    """Return the weights of a layer with their roles, and `--AG/RS-->` with no role where something is sent between."""
    largest = {}  # path of a module -> its largest weight's size and role
    for p in plan.parameters:
        for name in (p.name, *p.aliases):
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, (0, "")), (math.prod(p.shape), ROLES.get(p.role, p.role)))
    # A small value between two modules would hide what the layer sends.
    least = VALUE_SHARE * max((s.bytes for s in steps if s.forward_sends or s.backward_sends), default=0.0)
    words = []
    for step in steps:
        if step.converts:
            if (step.forward_sends or step.backward_sends) and step.bytes >= least:
                words.append((f"--{_ways(step.forward_sends, step.backward_sends, plan)}-->", ""))
        elif any(name in step.name for name in ATTENTION):
            words.append(("attention", ""))
        # A weight that is read several times in a row is one word.
        elif step.module in largest and (word := (last(step.module), largest[step.module][1])) not in words[-4:]:
            words.append(word)
    return words


def _ways(forward: str | None, backward: str | None, plan: Plan) -> str:
    """Write the primitives that are sent forward and, in training, backward: `AG/RS`."""
    ways = [SHORT.get(way or "", primitive(way)) for way in (forward, backward)]
    return "/".join(ways) if plan.objective == "training" else ways[0]


# the blocks in short


def _blocks(plan: Plan, room: int) -> View:
    """Write the blocks in their order; where they are too many, those that hold or send the most."""
    least = SENT_SHARE * (plan.totals.forward_bytes + plan.totals.backward_bytes)
    every_part = [p for p in parts(plan) if p.parameters or max(map(_bytes, p.collectives), default=-1.0) >= least]
    views = [list(_block(part, plan, least)) for part in every_part]
    heights, weight = [*map(_height, views)], [_weight(part, plan) for part in every_part]
    places = set()
    lines = 0
    for i in sorted(range(len(every_part)), key=lambda i: -weight[i]):
        if lines + heights[i] <= room - (len(places) + 1 < len(every_part)) or not places:
            places.add(i)
            lines += heights[i]
    for i in sorted(places):
        yield from views[i]
    if len(places) < len(every_part):
        yield Line(f"and {len(every_part) - len(places)} smaller parts", style="dim")


def _weight(part: EqualBlocks, plan: Plan) -> float:
    """Return the share of a part and its equals in all parameters and bytes sent."""
    t = plan.totals
    parameters = sum(math.prod(p.shape) for p in part.parameters) * part.count / max(t.parameters, 1)
    return parameters + sum(map(_bytes, part.collectives)) / max(t.forward_bytes + t.backward_bytes, 1.0)


def _bytes(equal: Sequence[Collective]) -> float:
    return sum(c.forward_bytes + c.backward_bytes for c in equal)


def _block(part: EqualBlocks, plan: Plan, least: float) -> View:
    """Write a heading, a line for each weight and each place that sends `least` bytes; one line where all is whole."""
    whole = part.parameters and all(p.role == "whole" for p in part.parameters)
    yield from heading(part, "whole" if whole else part.detail)
    yield Grid(() if whole else part.weights, "llrr", (22, 26, 13, 13))
    sends = []
    for equal in part.collectives:
        if _bytes(equal) >= least:
            c = equal[0]
            way = f"{_ways(c.forward, c.backward, plan)} {amount(max(c.forward_bytes, c.backward_bytes))}"
            sends.append((MARKS.get(c.name, c.name), c.change, part.maker(equal), way))
    yield Grid(sends, "llll", (10, 12, 34, 18), style="cyan")


def _below(plan: Plan) -> View:
    """Write the lines after the blocks: weights left whole, notes and a legend."""
    whole = [p for p in plan.parameters if p.role == "whole"]
    if whole and plan.tp > 1 and plan.totals.local_parameters:
        share = sum(math.prod(p.local) for p in whole) / plan.totals.local_parameters
        yield Line(f"whole on every rank: {len(whole)} of {len(plan.parameters)} weights, {share:.2%} of what it holds")
    yield from (Line(f"note: {note}", then="  ", style="dim") for note in plan.notes[:MAX_NOTES])
    if len(plan.notes) > MAX_NOTES:
        yield Line(f"and {len(plan.notes) - MAX_NOTES} more notes", style="dim")
    yield from (Line(line, style="dim") for line in LEGEND)
