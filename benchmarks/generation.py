"""`generate()` over the list of architectures: writes benchmarks/generation.json and its part of docs/models.md.

python -m benchmarks.generation                        # all that can generate, at tp=2
python -m benchmarks.generation --only llama t5 --tp 3 # a part; its results replace those in the file
python -m benchmarks.generation --render               # the page from the results that are there

Each architecture is built small, in float64, and generates from a batch of two prompts, one of them padded, unsharded
and on gloo ranks, with a dynamic and with a static cache: the tokens must be the same, and the logits of every step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.helpers.build import Architecture
from benchmarks.helpers.command import add_choice, choose, each, made
from benchmarks.helpers.generated import generated
from benchmarks.helpers.isolate import Record, run
from benchmarks.helpers.page import PAGE, load, render

RESULTS = Path(__file__).with_name("generation.json")
LIMIT, TOKENS = 300.0, 32


def measure(architecture: Architecture, tp: int, tokens: int = TOKENS, limit: float = LIMIT) -> Record:
    """What came of one architecture at one degree, from processes that are ended when they take too long."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(tp) as ranks:
        calls = [
            ranks.submit(run, generated, architecture, tokens, rank, tp, folder, limit=limit) for rank in range(tp)
        ]
        found = [call.result() for call in calls]
    record, why = found[0]
    for other, _ in found[1:]:
        for cache, result in other.items():
            if isinstance(result, dict) and not result["ok"]:
                record[cache] = result
    if why and "own" not in record:
        record.setdefault("dynamic", {"ok": False, "why": why})
    return record


def line(record: Record) -> str:
    """One result, for the terminal."""
    if "own" in record:
        return f"does not generate: {record['own']}"
    told = (f"{cache} {'ok' if x['ok'] else 'FAILED ' + x['why']}" for cache, x in record.items())
    return "  ".join(told)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2], help="degrees (default: 2)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens to generate")
    parser.add_argument("--render", action="store_true", help="write docs/models.md from the results that are there")
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    results = load(RESULTS.name)
    results["made"] = made("benchmarks.generation", arguments) if not given.render else results["made"]

    def one(architecture: Architecture) -> str:
        told = []
        for tp in given.tp:
            record = measure(architecture, tp, given.tokens, given.limit)
            kept = results["models"].setdefault(architecture.name, {"family": architecture.family, "tp": {}})
            kept["tp"][str(tp)] = record
            told.append(f"tp={tp} {line(record)}")
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        return "  ".join(told)

    if not given.render:
        each(choose(given), one)
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
