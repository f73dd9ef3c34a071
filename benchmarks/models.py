"""Run autotp over the list of architectures and write benchmarks/results/models.json and docs/models.md.

python -m benchmarks.models                          # the whole list at tp 2, 4 and 8
python -m benchmarks.models --family decoder --tp 2  # a part; its results replace those in the file
python -m benchmarks.models --older --jobs 2         # on where it stopped, or was older than the code; two at a time
python -m benchmarks.models --render                 # the page from the results that are there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers.build import Architecture, architectures
from benchmarks.helpers.command import add_choice, beside, choose, each, installed, made
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.lists.page import PAGE, render
from benchmarks.helpers.measure import measure, widened

from .helpers import isolate

RESULTS = Path(__file__).parent / "results" / "models.json"
SIDES = "tp", "wide"  # of a record, by degree
LIMIT = 300.0  # seconds for one architecture at one degree
WIDE_LIMIT = 120.0  # seconds for its wide plan at one degree; an unrolled loop of 1024 steps has none


def run(architecture: Architecture, tps: Sequence[int], limit: float = LIMIT) -> Record:
    """The record of one architecture, from processes that are ended when they take too long."""
    record, why = isolate.run(measure, architecture, tps, limit=limit * len(tps))
    proved = [tp for tp in tps if record.get("tp", {}).get(str(tp), {}).get("ok")]
    record |= isolate.run(widened, architecture, proved, limit=WIDE_LIMIT * len(proved))[0]
    left = {str(tp): {"ok": False, "why": why} for tp in tps if why and str(tp) not in record.get("tp", {})}
    return isolate.merge({"family": architecture.family, "tp": {}, **record}, {"tp": left})


def line(record: Mapping[str, Any]) -> str:
    """One result, for the terminal."""
    if "failed" in record:
        return f"not built: {record['failed']}"
    parts = []
    for tp, result in record["tp"].items():
        shares = f"{result['parameters']:.3f} {result['flops']:.3f}" if "flops" in result else ""
        parts.append(f"tp={tp} {shares}{'' if result['ok'] else ' FAILED ' + result['why']}")
    return "  ".join(parts)


def write(results: Record) -> None:
    """Keep the results as they are now, in the order of the list."""
    order = {a.name: i for i, a in enumerate(architectures())}
    models = {name: results["models"][name] for name in sorted(results["models"].keys() & order, key=order.__getitem__)}
    found: dict[str, list[str]] = {}
    for name, record in models.items():
        for operator in sorted({x for r in record["tp"].values() for x in r.get("without_rule", ())}):
            found.setdefault(operator, []).append(name)
    ranked = sorted(found.items(), key=lambda x: (-len(x[1]), x[0]))
    rules = {operator: [len(names), names[0]] for operator, names in ranked}
    skipped = [a.name for a in architectures() if not installed(a)]
    whole = {"made": results["made"], "skipped": skipped, "operators_without_rule": rules, "models": models}
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8], help="degrees (default: 2 4 8)")
    parser.add_argument("--render", action="store_true", help="write docs/models.md from the results that are there")
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: Record = {"made": made("benchmarks.models", arguments), "models": kept.get("models", {})}

    def keep(architecture: Architecture, new: Record) -> str:
        old = results["models"].get(architecture.name, {})
        for side in SIDES:  # degrees that were not asked for keep what is known of them
            others = {tp: x for tp, x in old.get(side, {}).items() if int(tp) not in given.tp}
            new = {**new, side: {**others, **new.get(side, {})}}
        results["models"][architecture.name] = {**new, "commits": beside(old, new)}
        write(results)
        return line(new)

    if not given.render:
        chosen = choose(given, results["models"], "architectures")
        each(chosen, lambda architecture: run(architecture, given.tp, given.limit), keep, given.jobs)
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
