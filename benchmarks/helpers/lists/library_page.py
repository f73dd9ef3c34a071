"""The part of docs/models.md on other libraries, from libraries.json and libraries_causes.toml of benchmarks/."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CAUSES = Path(__file__).resolve().parents[2] / "libraries_causes.toml"
PROVED = 0.97  # of the models that torch.export.export takes
MOST = {"2": (0.6, 0.65), "4": (0.35, 0.45)}  # shares of parameters and flops on a rank, by degree
Record = Mapping[str, Any]

HEAD = """\
## Other libraries

Models of other libraries, at a width of 512 or more with few layers and random weights, in eval mode:
[benchmarks/libraries.toml](../benchmarks/libraries.toml) has {listed} of {libraries} libraries, with their versions and
how each is built and called; it was written down before the first run. Of these, {run} were run. `python -m
benchmarks.lists.libraries --install FOLDER` installs them without their dependencies, `--folder FOLDER` runs them.

{made}

- **exports**: whether `torch.export.export` takes the model with static shapes.
- **proved**: whether `autotp.verify` found everything equal at tp=2.
- **parameters, flops**: the share of the fullest rank, in percent, at tp=2 and tp=4, planned for `h100`.

The goals: of the models that export takes, recurrent networks apart, {goal:.0f}% are proved; a rank has at most {most}.
"""


def libraries(results: Mapping[str, Any], made: str, causes: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The section; nothing where there are no results.

    Args:
        results: of `python -m benchmarks.lists.libraries`. made: with what they were made, in words.
        causes: cause and way out by model; default those in the file.
    """
    models = results["models"]
    if not models:
        return
    causes = tomllib.loads(CAUSES.read_text()) if causes is None else causes
    most = "; ".join(f"{p:g} of parameters and {f:g} of flops at tp={tp}" for tp, (p, f) in MOST.items())
    count = {"listed": results["listed"], "libraries": results["libraries"], "run": len(models)}
    yield HEAD.format(**count, made=made, goal=100 * PROVED, most=most)
    yield lines(["of the models", "reached", "of", "share"], _totals(models))
    yield lines(["model", "exports", "proved", "parameters", "flops"], [_row(k, m) for k, m in models.items()])
    yield "### What falls short\n"
    rows = [[k, what, *_cause(causes, k)] for k, m in models.items() for what in short(m)]
    yield lines(["model", "what", "cause", "way out"], rows) if rows else "Nothing does.\n"


def counted(record: Record) -> bool:
    """Whether the goals are for this model: it was built, export takes it, and it is not recurrent."""
    return record.get("export", "") is None and not record["recurrent"]


def within(record: Record, tp: str) -> bool:
    """Whether a rank has as little of the parameters and flops as asked at this degree."""
    found = record["tp"].get(tp, {})
    return "flops" in found and found["parameters"] <= MOST[tp][0] and found["flops"] <= MOST[tp][1]


def short(record: Record) -> list[str]:
    """In what one model falls short, a sentence each."""
    if "failed" in record:
        return [f"not built: {_cell(record['failed'])}"]
    first = record["tp"].get("2", {})
    texts = [] if record.get("export") is None else [f"export: {_cell(record['export'])}"]
    texts += [] if first.get("ok") else [f"tp=2: {_cell(first.get('why') or 'not run')}"]
    for tp in MOST:
        found = record["tp"].get(tp, {})
        if "failed" in found:
            texts.append(f"tp={tp}: {_cell(found['failed'])}")
        elif "flops" in found and not within(record, tp):
            shares = f"{100 * found['parameters']:.1f} parameters, {100 * found['flops']:.1f} flops"
            texts.append(f"tp={tp}: {shares}; whole: {', '.join(found['whole'])}")
    return texts


def _totals(models: Mapping[str, Record]) -> list[list[str]]:
    taken = [m for m in models.values() if counted(m)]
    proofs = [m["tp"].get("2", {}).get("ok", False) for m in taken]
    rows = [("run: built and called", [("failed" not in m) for m in models.values()])]
    rows += [("run: taken by export", [m.get("export", "") is None for m in models.values()])]
    rows += [("run: proved at tp=2", [m["tp"].get("2", {}).get("ok", False) for m in models.values()])]
    rows += [("taken by export and not recurrent: proved at tp=2", proofs)]
    rows += [(f"the same: shares within the goal at tp={tp}", [within(m, tp) for m in taken]) for tp in MOST]
    return [[what, str(sum(x)), str(len(x)), f"{100 * sum(x) / max(len(x), 1):.1f}%"] for what, x in rows]


def _row(name: str, record: Record) -> list[str]:
    tried = [record["tp"][tp] for tp in MOST if "flops" in record["tp"].get(tp, {})]
    shares = [" ".join(f"{100 * r[side]:.1f}" for r in tried) or "-" for side in ("parameters", "flops")]
    ok = record["tp"].get("2", {}).get("ok", False)
    mark = " (recurrent)" if record["recurrent"] else ""
    exports = "-" if "failed" in record else _word(record.get("export") is None)
    return [f"{name}{mark}", exports, _word(ok), *shares]


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _cause(causes: Mapping[str, Any], name: str) -> list[str]:
    known = causes.get(name, {})
    return [_cell(known.get("cause", "not looked into")), _cell(known.get("way_out", "-"))]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def lines(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])
