"""The part of docs/models.md on `generate()`, from benchmarks/results/generation.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

HEAD = """\
## Generation

`generate()` of each architecture, unsharded and on gloo ranks, in float64, from two prompts of which one is padded:
the same tokens, and the logits of every step within 1e-9 of the largest. Counted are architectures whose own
`generate()` runs; *static* those that also run with `cache_implementation="static"`.

{made}
"""


def generation(results: Mapping[str, Any], made: str) -> Iterator[str]:
    """The section; nothing where there are no results."""
    models = results["models"]
    if not models:
        return
    yield HEAD.format(made=made)
    lines = ["| architectures | tp | dynamic | static |", "| --- | --- | --- | --- |"]
    for tp in sorted({tp for m in models.values() for tp in m["tp"]}, key=int):
        tried = [m["tp"][tp] for m in models.values() if tp in m["tp"] and "own" not in m["tp"][tp]]
        static = [x["static"] for x in tried if "static" in x]
        dynamic = [x.get("dynamic", {"ok": False}) for x in tried]
        lines.append(f"| {len(tried)} | {tp} | {_share(dynamic)} | {_share(static)} |")
    yield "\n".join(lines) + "\n"
    reasons = list(_reasons(models))
    if reasons:
        yield "\n".join(["| architecture | tp | what | reason |", "| --- | --- | --- | --- |", *reasons]) + "\n"


def _share(results: list[Any]) -> str:
    return f"{sum(x['ok'] for x in results)} of {len(results)}"


def _reasons(models: Mapping[str, Any]) -> Iterator[str]:
    for name, model in models.items():
        if "own" in model:
            yield f"| {name} | - | its own `generate()` | {_cell(model['own'])} |"
        for tp, record in model["tp"].items():
            if "own" in record:
                yield f"| {name} | {tp} | its own `generate()` | {_cell(record['own'])} |"
            wrong = {cache: x for cache, x in record.items() if isinstance(x, dict) and not x["ok"]}
            yield from (f"| {name} | {tp} | {cache} | {_cell(x['why'])} |" for cache, x in wrong.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
