"""The first screen of a plan: what, on what, whether it fits, how long a step takes, and where memory and time go."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from autotp.plans.estimates import Decoding, decoding
from autotp.text import amount

from . import rows
from .flow import flow
from .lines import HOLD, wrapped

if TYPE_CHECKING:
    from autotp.plans.plan import Plan

SCREEN = 80  # columns of what `print` shows
BAR = 64  # columns of a bar
LABEL = 8  # columns before what a line says
WORTH = 0.01  # of the step: smaller costs are not spoken of


def head(plan: Plan) -> Iterator[Text]:
    """The lines of the first screen."""
    beside = f" x {plan.batch.name}={plan.batch.size}" if plan.batch.size > 1 else ""
    what = f"{plan.model}  tp={plan.tp}{beside} on {plan.cluster}"
    yield from wrapped(f"{what}  {_priced(plan)}", SCREEN, style="bold")
    if text := rows.all_whole(plan):
        yield from wrapped(text, SCREEN, then="  ", style="bold red")
    yield from _fits(plan)
    yield from _step(plan)
    yield from _memory(plan)
    yield from _time(plan)
    yield from flow(plan, SCREEN)
    yield from _avoidable(plan)


def _priced(plan: Plan) -> str:
    """The objective and the sizes of the example inputs."""
    t, many = plan.totals, plan.batch.size
    each = f" on each of {many} {plan.batch.name} ranks" if many > 1 else ""
    if not t.examples:
        return plan.objective
    if not t.length:
        return f"{plan.objective}, {t.examples} samples{each}"
    if plan.objective == "decode":
        return f"decode, one token for each of {t.examples} sequences of {t.length}{each}"
    return f"{plan.objective}, {t.examples} x {t.length} tokens{each}"


def _fits(plan: Plan) -> Iterator[Text]:
    peak, most = plan.memory.peak, rows.capacity(plan)
    if not most:
        yield Text(f"memory  {amount(peak)} a rank; what a device of {plan.cluster} has is not known")
    elif peak <= most:
        text, at = f": {amount(peak)} of {amount(most)} a device", f"at {_peak(plan)}"
        short = len("FITS" + text + ", " + at) <= SCREEN
        yield Text.assemble(("FITS", "bold green"), text + (f", {at}" if short else ""))
        if not short:
            yield Text(f"  {at}")
    else:
        yield Text.assemble(("does NOT fit", "bold red"), f": {amount(peak)} of {amount(most)} a device")
        yield from wrapped(_would_fit(plan, most), SCREEN, "  ", style="red")


def _peak(plan: Plan) -> str:
    return f"the {plan.memory.phase} of {plan.memory.at}" if plan.memory.at else f"the peak of the {plan.memory.phase}"


def _would_fit(plan: Plan, most: float) -> str:
    """What would fit: the smallest degree that was tried, else what the peak says; and the largest part."""
    m, fitting = plan.memory, [d.tp for d in plan.degrees if d.fits]
    least = math.ceil(plan.tp * m.peak / most)
    advice = f"tp={min(fitting)} fits" if fitting else f"about tp={least}, if memory fell with tp (autotp.sweep tells)"
    moving = m.activations + m.working
    if moving >= m.peak / 2:
        return f"{advice}; {moving / m.peak:.0%} are activations: a smaller batch, or checkpointing"
    splits = f": fully_shard over {plan.batch.name} splits those too"
    shard = "" if plan.batch.fully_shard or plan.objective != "training" else splits
    return f"{advice}; {m.steady / m.peak:.0%} are weights and what belongs to them{shard}"


def _step(plan: Plan) -> Iterator[Text]:
    """The predicted step, its share of communication, and the rate."""
    t = plan.totals
    if not t.seconds:
        return
    least, proved, behind = rows.optimality(plan)
    best = "optimal for this cost model" if proved else f"bound {rows.seconds(t.bound)}"
    if behind:
        near = f"within {t.band:.3g} of"
        best = f"{near} optimal {rows.seconds(least)}" if proved else f"{best}, {near} the least {rows.seconds(least)}"
    phrases = [f"step {rows.seconds(t.seconds)} ({best})", f"{t.communication / t.seconds:.0%} communication over tp"]
    if t.examples:
        units = t.examples * plan.batch.size * (t.length if t.length and plan.objective != "decode" else 1)
        unit, devices = "tokens" if t.length else "samples", plan.tp * plan.batch.size
        each = f", {rows.number(units / t.seconds / devices)} a device" if devices > 1 else ""
        phrases.append(f"{rows.number(units / t.seconds)} {unit}/s{each}")
    decoded = decoding(plan)
    if decoded is not None:
        phrases.append(f"{decoded.share_of_limit:.0%} of the limit")
    if t.megatron_step:
        phrases.append(rows.of_megatron(plan))
    yield from wrapped("; ".join(x.replace(" ", HOLD) for x in phrases), SCREEN, then="  ")
    if decoded is not None:
        yield from _limit(decoded)


def _limit(decoded: Decoding) -> Iterator[Text]:
    """What no step of decoding can be below, and what it is made of."""
    limit, tokens = decoded.limit, decoded.most_tokens_per_second
    cache = f" and {amount(limit.cache)} of cache" if limit.cache else ""
    reads = f"{amount(limit.weights)} of weights{cache} at {limit.bandwidth / 1e12:.2f} TB/s"
    phrases = [f"limit {rows.seconds(limit.seconds)}, {rows.number(tokens)} tokens/s: {reads}"]
    if limit.communication:
        phrases.append(f"{rows.seconds(limit.communication)} of collectives")
    if decoded.ungathered:
        phrases.append(f"priced as greedy generate(), which gathers none of {amount(decoded.ungathered)} of outputs")
    yield from wrapped("; ".join(phrases), SCREEN, then="  ")


def _memory(plan: Plan) -> Iterator[Text]:
    """A bar as long as the device's memory, and what its letters are."""
    sizes, most = rows.memory_parts(plan.memory), max(rows.capacity(plan), plan.memory.peak)
    if not sizes:
        return
    parts = [(name[0], size, f"{name} {amount(size)}") for name, size in sizes]
    yield from _bar("memory", parts, most, "|" if most > plan.memory.peak else "")
    if carried := rows.cache(plan):
        yield from wrapped(f"{'cache':{LABEL}}{carried}", SCREEN, then=" " * LABEL)


def _time(plan: Plan) -> Iterator[Text]:
    """A bar of a step: the repeated blocks, sublayer by sublayer, and what is outside of them."""
    layer = plan.layer
    if layer is None or not layer.seconds or not plan.totals.seconds:
        return
    scale = layer.total / layer.seconds
    every = [(p, scale) for p in layer.sublayers]
    every += [(layer.outside, 1.0)] if layer.outside.seconds else []
    parts = []
    for part, times in every:
        share = f" ({part.share:.0%} communication)" if part.communication else ""
        parts.append((part.name[0], part.compute * times, f"{part.name} {rows.seconds(part.seconds * times)}{share}"))
        parts.append(("~", part.communication * times, ""))
    yield from _bar("time", parts, sum(size for _, size, _ in parts), "", "~ communication")


def _bar(name: str, parts: Sequence[tuple[str, float, str]], most: float, end: str, more: str = "") -> Iterator[Text]:
    """A bar of letters, each part as long as its share of `most`, and below it what the letters stand for."""
    letters, before = "", 0.0
    for letter, size, _ in parts:
        before += size
        letters += letter * (round(BAR * before / most) - len(letters))
    yield Text.assemble(f"{name:{LABEL}}", (letters.ljust(BAR if end else 0) + end, "cyan"))
    texts = [text for *_, text in parts] + [more]
    yield from wrapped(", ".join(text.replace(" ", HOLD) for text in texts if text), SCREEN, " " * LABEL)


def _avoidable(plan: Plan) -> Iterator[Text]:
    """The largest cost that the user could take away, where one is worth a hundredth of the step."""
    t = plan.totals
    if t.seconds and plan.tp > 1:
        dearest = max(_costs(plan), default=(0.0, ""))
        if dearest[0] >= WORTH * t.seconds:
            yield from wrapped(f"! up to {rows.seconds(dearest[0])} {dearest[1]}", SCREEN, "", "  ", "yellow")


def _costs(plan: Plan) -> Iterator[tuple[float, str]]:
    """Costs that are no part of tensor parallelism itself: seconds, and what they are spent on."""
    t, heads = plan.totals, {i for i, block in enumerate(plan.blocks) if block.kind == "head"}
    outputs = [c for c in plan.collectives if c.name == "gather" and c.forward and c.block in heads]
    sent_bytes = sum(c.forward_bytes for c in outputs)
    if sent_bytes:
        part = (
            t.communication
            * sent_bytes
            / (t.forward_bytes + (t.backward_bytes if plan.objective == "training" else 0.0))
        )
        names = ", ".join(dict.fromkeys(rows.last(c.source or c.module) for c in outputs))
        way = 'outputs="loss" or "sharded"' if plan.objective == "training" else 'outputs="sharded"'
        yield part, f"go into gathering whole outputs ({names}, {amount(sent_bytes)}), which {way} leaves split"
    even = t.flops / plan.tp
    if t.local_flops > 1.05 * even:
        extra = (t.seconds - t.communication) * (1 - even / t.local_flops)
        share = f"{t.local_flops / t.flops:.0%} of the flops where 1/{plan.tp} would be even"
        yield extra, f"go into work that is whole on every rank: a rank has {share}"
    if (exposed := plan.batch.exposed) > 0:
        yield exposed, f"go over {plan.batch.name} and do not fit beside the backward"
