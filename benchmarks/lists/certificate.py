"""Ask spmd_types about mutants and about the list of architectures; write the tables of docs/performance.md.

python -m benchmarks.lists.certificate mutants        # fourteen programs, each conversion dropped, doubled, replaced
python -m benchmarks.lists.certificate architectures  # the list at tp=2
python -m benchmarks.lists.certificate architectures --older --family encoder  # a part, what is older than its code
python -m benchmarks.lists.certificate render         # the page from the results that are there
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.helpers import isolate
from benchmarks.helpers.build import Architecture, architectures
from benchmarks.helpers.command import add_choice, choose, each, made
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.lists.certified import PROGRAMS, certified, tried
from benchmarks.helpers.performance import made_now, result_of, write_section

RESULTS = Path(__file__).parents[1] / "results" / "certificate.json"
HEADING = "Certificate"
PRELOAD = "benchmarks.helpers.lists.certified"
LIMIT = 300.0  # seconds for one architecture
JUDGES = ("shapes", "types", "verify", "nobody")


def run(function: Callable[..., None], *arguments: Any, limit: float) -> Record:
    """The record of one job, from a process that is ended when it takes too long."""
    record, why = isolate.run(function, *arguments, limit=limit, preload=PRELOAD)
    return record if not why else {**record, "failed": why}


def load() -> Record:
    """The results that are there."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {"made": {}, "mutants": {}, "architectures": {}, **kept}


def keep(results: Record, now: Mapping[str, Any] | None = None) -> None:
    """Write results and page, after each job.

    Args:
        results: of both tables. now: commit, versions and machine for the section, where its mutants are of now.
    """
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    record = json.loads(result_of(HEADING).read_text())
    text = "\n".join(record.pop("text"))
    write_section(HEADING, render(text, results), made_with=now or record)


def render(section: str, results: Mapping[str, Any]) -> str:
    """The section with its two tables as the results say."""
    for name, text in (("mutants", mutants(results)), ("architectures", listed(results))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        section = re.sub(f"{begin}.*?{end}", lambda _, t=text, b=begin, e=end: f"{b}\n{t}\n{e}", section, flags=re.S)
    return section


def mutants(results: Mapping[str, Any]) -> str:
    """A row for each program: who refuses its mutants."""
    rows = [["program", "mutants", "shapes alone", "types", "only `verify`", "nobody", "of the rest"]]
    whole: dict[str, int] = dict.fromkeys(JUDGES, 0)
    for name, record in results["mutants"].items():
        found = {j: record.get("found", {}).get(j, 0) for j in JUDGES}
        whole = {j: whole[j] + found[j] for j in JUDGES}
        rows.append([name, *counted(found)])
    return table([*rows, ["all", *counted(whole)]])


def counted(found: Mapping[str, int]) -> list[str]:
    """The numbers of one row; last the share of what shapes let pass that the certificate refuses."""
    total = sum(found.values())
    rest = total - found["shapes"]
    share = f"{100 * found['types'] / rest:.1f}%" if rest else "-"
    return [str(n) for n in (total, *(found[j] for j in JUDGES))] + [share]


def listed(results: Mapping[str, Any]) -> str:
    """Count the architectures that are accepted, with a row for each that is not."""
    records = results["architectures"]
    asked = {name: r for name, r in records.items() if "failed" not in r}
    refused = {name: r for name, r in asked.items() if not r["ok"]}
    late = [name for name, r in records.items() if r.get("failed") == "out of time"]
    without = [f"{n} ({r['failed'].split(':')[0]})" for n, r in records.items() if "failed" in r and n not in late]
    head = (
        f"{len(records)} of the {len(architectures())} architectures of the list were asked for at tp=2, {len(asked)} "
        f"have a program there, and of these {len(asked) - len(refused)} are accepted."
    )
    rows = [["architecture", "operator", "by", "the checker's words"]]
    for name, record in refused.items():
        no = record["refusal"]
        rows.append([name, f"`{no['op']}`", no["kind"], no["detail"].split("\n")[0].replace("|", "\\|")])
    parts = [head, table(rows) if refused else "None is refused."]
    parts += [f"Without a program: {', '.join(without)}."] if without else []
    return "\n\n".join([*parts, f"Out of time: {', '.join(late)}."] if late else parts)


def table(rows: Sequence[Iterable[str]]) -> str:
    """A table of Markdown; the first row is its head."""
    head, *rest = [list(row) for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["mutants", "architectures", "render"])
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    results = load()
    if given.what != "render":
        results["made"][given.what] = made("benchmarks.lists.certificate", arguments)
    if given.what == "mutants":
        for name in track(PROGRAMS, console=Console(stderr=True), description="mutants"):
            results["mutants"][name] = run(tried, name, limit=10 * given.limit)
            keep(results)
    if given.what == "architectures":

        def add(architecture: Architecture, record: Record) -> str:
            results["architectures"][architecture.name] = record
            keep(results)
            return str(record.get("failed") or record["said"])

        chosen = choose(given, results["architectures"], "certified-architectures")
        each(chosen, lambda architecture: run(certified, architecture, limit=given.limit), add, given.jobs)
    keep(results, made_now() if given.what == "mutants" else None)


if __name__ == "__main__":
    main()
