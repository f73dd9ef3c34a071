"""Results of compositions and docs/composition.md, which is written from them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from tests.matrix import ROOT, commit

from .features import FEATURES, meaning, pairs, triples

RESULTS, PAGE = Path(__file__).with_name("results.json"), ROOT / "docs/composition.md"
VERSIONS = ("torch", "transformers", "peft", "accelerate", "torchao", "spmd_types")
Names = tuple[str, ...]
HEAD = """# Everything with everything

Each feature with each other, and {triples} triples drawn at random, on up to 8 CPU processes beside one device: a Llama
of two layers in float64, or with ep a Mixtral of four experts, with tp=2 in every cell. `python -m tests.composition`
runs all of it and writes this page from `tests/composition/results.json`; a sample runs in `make test`, and all of it
in `make slow`.

Of {meaningful} combinations that have a meaning {equal} are equal ({share}), {refused} are refused by a
sentence{failed}; {rest} have no meaning.

A number is the largest difference from one device, as a part of the largest value: of losses, gradients, norms and
weights over two steps of SGD with clipping, or of the logits of what is generated. Two ways to use a module are one
after the other on the same module. Where numbers are drawn by counters or scaled for float8, one device is autotp's
with tp=1, for each slice over dp. "typed": a certificate has no figure. r: [refused](#what-is-refused).
-: [without meaning](#without-meaning). x: wrong. ?: not run.

"""


def key(names: Names) -> str:
    """The name of a composition among the results."""
    return " + ".join(names)


def results() -> dict[str, Any]:
    """All that is kept."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cells": {}}


def record(names: Names, found: dict[str, Any]) -> None:
    """Keep what came of a composition, with what it ran with, and write the page."""
    known = results()
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    known |= {"python": platform.python_version(), "machine": platform.machine(), **versions}
    said = first_line(found["said"]) if isinstance(found["said"], str) else found["said"]
    known["cells"][key(names)] = found | {"said": said, "commit": commit(RESULTS, PAGE), "date": str(date.today())}
    wanted = [key(n) for n in [*pairs(), *triples()]]
    known["cells"] = {name: known["cells"][name] for name in wanted if name in known["cells"]}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")


def mark(names: Names, cells: dict[str, Any]) -> str:
    """A cell of the table."""
    found = cells.get(key(names))
    if meaning(names):
        return "-"
    if found is None:
        return "?"
    if found["kind"] == "failed":
        return "x"
    if found["kind"] == "refused":
        return "r"
    return "typed" if "certify" in names and not found["said"] else digits(found["said"])


def digits(figure: float) -> str:
    """A figure in one digit."""
    return "0" if not figure else f"{figure:.0e}".replace("e-0", "e-")


def page(known: dict[str, Any]) -> str:
    """The page that shows the results."""
    cells, drawn = known["cells"], triples()
    every = [*pairs(), *drawn]
    kinds = Counter(cells.get(key(n), {"kind": "missing"})["kind"] for n in every if not meaning(n))
    meaningful = sum(kinds.values())
    words = {"failed": "are wrong", "missing": "were not run"}
    rest = "".join(f", {kinds[kind]} {said}" for kind, said in words.items() if kinds[kind])
    head = HEAD.format(
        triples=len(drawn), meaningful=meaningful, equal=kinds["equal"], share=f"{kinds['equal'] / meaningful:.0%}",
        refused=kinds["refused"], failed=rest, rest=len(every) - meaningful,
    )  # fmt: skip
    parts = [head, *table(cells), "\n## Triples\n\n| | |\n| --- | --- |\n"]
    parts += [f"| {key(names)} | {mark(names, cells)} |\n" for names in drawn]
    for title, kind in (("What is refused", "refused"), ("What is wrong", "failed")):
        shown = [n for n in every if cells.get(key(n), {}).get("kind") == kind and not meaning(n)]
        parts += [f"\n## {title}\n\n"] if shown else []
        parts += [f"- {key(names)}: {first_line(cells[key(names)]['said'])}\n" for names in shown]
    parts += ["\n## Without meaning\n\n"]
    reasons: dict[str, list[str]] = {}
    for names in pairs():
        if meaning(names):
            reasons.setdefault(meaning(names), []).append(key(names))
    parts += [f"- {', '.join(which)}: {why}\n" for why, which in reasons.items()]
    made = ", ".join(f"{name} {known[name]}" for name in ("python", *VERSIONS) if name in known)
    dates = sorted({found["date"] for found in cells.values() if "date" in found}) or [""]
    parts += [f"\nRun {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with {made}; "]
    return "".join([*parts, "each commit is kept with its result.\n"])


def table(cells: dict[str, Any]) -> list[str]:
    """Rows of all features, columns by number."""
    numbers = [str(i + 1) for i in range(len(FEATURES))]
    rows = [f"| | | {' | '.join(numbers)} |\n", f"| ---: | --- |{' ---: |' * len(numbers)}\n"]
    for i, feature in enumerate(FEATURES):
        own = [mark(tuple(dict.fromkeys((FEATURES[j].name, feature.name))), cells) for j in range(i + 1)]
        rows.append(f"| {i + 1} | {feature.name} | {' | '.join(own + [''] * (len(FEATURES) - i - 1))} |\n")
    return rows


def first_line(said: Any) -> str:
    """The sentence of an error, or the figure."""
    return str(said).strip().split("\n")[0].replace("|", "\\|")[:400]
