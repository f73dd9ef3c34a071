"""`generate()` over the list of architectures: writes results/generation.json and its part of docs/models.md.

python -m benchmarks.lists.generation                        # all that can generate, at tp=2 and 3
python -m benchmarks.lists.generation --only llama t5 --tp 3 # a part; its results replace those in the file
python -m benchmarks.lists.generation --older                # on where it stopped, or is older than the code
python -m benchmarks.lists.generation --render               # the page from the results that are there

Each architecture is built small, in float64, and generates from a batch of two prompts, one of them padded, unsharded
and on gloo ranks, with a dynamic and with a static cache: the tokens must be the same, and the logits of every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers.build import Architecture, architectures, model_class
from benchmarks.helpers.command import add_choice, beside, choose, each, made
from benchmarks.helpers.isolate import Record, run
from benchmarks.helpers.lists.generated import generated
from benchmarks.helpers.lists.page import PAGE, load, render

RESULTS = Path(__file__).parents[1] / "results" / "generation.json"
LIMIT, TOKENS = 1200.0, 32
WARM = "benchmarks.helpers.lists.warm_generation"


def measure(architecture: Architecture, degrees: Sequence[int], tokens: int = TOKENS, limit: float = LIMIT) -> Record:
    """What came of one architecture, from processes that are ended when they take too long."""
    record, why = run(generated, architecture, tokens, degrees, limit=limit * len(degrees), parent=True, preload=WARM)
    for tp in degrees if why and "own" not in record else ():
        for result in record.setdefault("tp", {}).setdefault(str(tp), {"dynamic": {"ok": False}}).values():
            if not result["ok"]:
                result["why"] = why
    return record


def line(record: Record) -> str:
    """One result, for the terminal."""
    if "own" in record:
        return f"does not generate: {record['own']}"
    told = (
        f"tp={tp} {cache} {'ok' if x['ok'] else 'FAILED ' + x['why']}"
        for tp, each in record["tp"].items()
        for cache, x in each.items()
    )
    return "  ".join([*told, f"{record.get('cpu_seconds', 0):.0f} CPU s"])


def generates(architecture: Architecture) -> bool:
    """Whether its class has a `generate`."""
    kind: Any = model_class(architecture.mapping, architecture.name)
    return callable(getattr(kind, "generate", None)) and getattr(kind, "can_generate", lambda: True)()


def mixed(chosen: Sequence[Architecture]) -> list[Architecture]:
    """One of each family in turn: what is wrong with a family shows early."""
    families: dict[str, list[Architecture]] = {}
    for architecture in chosen:
        families.setdefault(architecture.family, []).append(architecture)
    rounds = itertools.zip_longest(*families.values())
    return [a for each_ in rounds for a in each_ if a is not None]


def write(results: Record) -> None:
    """Keep the results, in the order of the list."""
    order = {a.name: i for i, a in enumerate(architectures())}
    results["models"] = dict(sorted(results["models"].items(), key=lambda x: order.get(x[0], len(order))))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 3], help="degrees (default: 2 3)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens to generate")
    parser.add_argument("--render", action="store_true", help="write docs/models.md from the results that are there")
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    results = load(RESULTS.name)

    def keep(architecture: Architecture, record: Record) -> str:
        old = {} if "own" in record else results["models"].get(architecture.name, {})
        record |= {"tp": {**old.get("tp", {}), **record.get("tp", {})}, "commits": beside(old, record)}
        results["models"][architecture.name] = {"family": architecture.family, **record}
        write(results)
        return line(record)

    if not given.render:
        results["made"] = made("benchmarks.lists.generation", arguments)
        chosen = [a for a in choose(given, results["models"], "generators") if generates(a)]
        each(mixed(chosen), lambda a: measure(a, given.tp, given.tokens, given.limit), keep, given.jobs)
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
