"""`--objective serve` of `autotp plan` and `autotp sweep`: the serving capacity of each degree, by the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import autotp
from autotp.errors import InputError
from autotp.plans.show.terminal import Line, Sheet, Table
from autotp.text import amount

from .command import FINE, NO
from .flags import ModelOptions, SteeringOptions
from .screen import Screen

SERVE = "serve"  # of the command line alone: plans are for prefill and for decoding


@dataclass(frozen=True)
class ServingOptions:
    """Serving, with --objective serve

    Attributes:
        context: Tokens of a prompt and its answer.
        concurrent: Answers at once.
    """

    context: int = 8192
    concurrent: int = 64


def capacity(
    load: Callable[..., Any], sizes: ModelOptions, degrees: Sequence[int], steering: SteeringOptions,
    serving: ServingOptions, screen: Screen,
) -> int:  # fmt: skip
    """Print the pool of each degree, how many sequences fit, tokens a second, and the time to a first token.

    Args:
        load: gives the model for sizes and steering. sizes, steering, serving: options. degrees: to compare.
        screen: where it is printed.
    """
    swept: dict[str, autotp.Sweep] = {}
    for objective, batch in (("decode", serving.concurrent), ("prefill", 1)):
        purpose = replace(steering, objective=objective)
        source = load(replace(sizes, batch=batch, seq=serving.context), purpose)
        with screen.working(f"planning {type(source.model).__name__} for {objective}"):
            swept[objective] = autotp.sweep(
                source.model, tps=list(degrees), example_inputs=source.inputs, **purpose.arguments()
            )
    decode, prefill = swept["decode"], swept["prefill"]
    rows = [_row(decode.limit, decode.plans[tp], prefill.plans[tp], serving) for tp in degrees]
    cells = [
        [str(r["tp"]), amount(r["pool"]), f"{r['tokens'] / 1e3:.0f}k", *(str(n) for n in r["sequences"].values()),
         f"{r['tokens_per_second']:,.0f}", f"{1e3 * r['first_token_s']:.1f}"] for r in rows
    ]  # fmt: skip
    fitting = [r["tp"] for r in rows if r["tokens"] >= serving.concurrent * serving.context]
    title = f"{type(source.model).__name__} for {serving.concurrent} answers at once of {serving.context:,} tokens"
    verdict = f"tp={min(fitting)} holds them all" if fitting else "no degree holds them all: the others wait"
    head = ["tp", "pool a rank", "tokens", *(f"of {n}" for n in rows[0]["sequences"]), "tokens/s", "first, ms"]
    sheet = Sheet([Line(title, style="bold"), Table([head, *cells], "rrrrrrrr", indent=2), Line(verdict)])
    screen.result(sheet, lambda: {"rows": rows, "holds": min(fitting) if fitting else None})
    return FINE if fitting else NO


def _row(limit: float, decode: autotp.Plan, prefill: autotp.Plan, serving: ServingOptions) -> dict[str, Any]:
    """Return the figures of one degree: the pool is the memory beside weights and the larger working set."""
    m = decode.memory
    pool = limit - m.parameters - m.buffers - max(m.working, prefill.memory.working)
    pool -= serving.concurrent * m.cache_sequence
    if not m.cache_token:
        raise InputError(f"--objective {SERVE}: {decode.model} keeps nothing of a sequence's tokens in a cache.")
    tokens = int(max(pool, 0) / m.cache_token)
    sequences = {str(serving.context // n): tokens // max(1, serving.context // n) for n in (1, 2, 4)}
    figures = {"tokens_per_second": serving.concurrent / decode.totals.seconds, "first_token_s": prefill.totals.seconds}
    return {"tp": decode.tp, "pool": max(pool, 0), "tokens": tokens, "sequences": sequences, **figures}
