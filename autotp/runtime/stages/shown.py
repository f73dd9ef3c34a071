"""The stages in words: which blocks, seconds and memory each has, and what a schedule leaves idle."""

from __future__ import annotations

from collections.abc import Sequence

from autotp.passes.stages.balance import Staging
from autotp.plans.plan import Plan
from autotp.text import amount, seconds

MICROBATCHES = (4, 8, 16, 32)


def idle(times: Sequence[float], places: Sequence[int], ranks: int, microbatches: int) -> float:
    """The share of a step in which ranks wait, of 1F1B or, with several stages a rank, its interleaved form.

    Args:
        times: seconds of each stage for one micro-batch. places: the rank of each stage.
        ranks: of the pipeline. microbatches: of a step.
    """
    own = [0.0] * ranks
    for time, place in zip(times, places, strict=True):
        own[place] += time
    chunks = len(times) // ranks
    step = max(own) * (microbatches + (ranks - 1) / chunks)
    return 1 - sum(own) * microbatches / (ranks * step) if step else 0.0


def table(plan: Plan, staging: Staging, ranks: int, chunks: int, places: Sequence[int]) -> str:
    """The stages of a plan as text.

    Args:
        plan: that was cut. staging: where. ranks: of the pipeline. chunks: micro-batches. places: each stage's rank.
    """
    division = staging.division
    lines = [
        f"{plan.model}: {len(division.sizes)} stages over pp={ranks} x tp={plan.tp}"
        + (f" x dp={plan.batch.size}" if plan.batch.size > 1 else "")
        + f", {plan.cluster}",
        f"{'stage':>5} {'rank':>4}  {'blocks':<40} {'of a micro-batch':>16} {'memory':>10}",
    ]
    at = 0
    for i, (size, time, memory) in enumerate(zip(division.sizes, division.seconds, division.memory, strict=True)):
        names = staging.units[at : at + size]
        blocks = names[0] if size == 1 else f"{names[0]} - {names[-1].rpartition('.')[2]}"
        blocks += (" with what is before" if i == 0 else "") + (
            " with what is after" if i == len(division.sizes) - 1 else ""
        )
        lines.append(f"{i:>5} {places[i]:>4}  {blocks:<40} {seconds(time):>16} {amount(memory):>10}")
        at += size
    shares = ", ".join(f"{m}: {idle(division.seconds, places, ranks, m):.0%}" for m in MICROBATCHES)
    lines.append(f"idle share of a step ({'interleaved ' if chunks > 1 else ''}1F1B) by micro-batches: {shares}")
    lines.append(
        "memory: weights, gradients, optimizer states, and what autograd keeps of the micro-batches in flight (1F1B)"
    )
    return "\n".join(lines)
