"""docs/models.md, from benchmarks/results/models.json and benchmarks/results/hand_plans.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.helpers.build import SCALE
from benchmarks.helpers.measure import LENGTH, ROWS

from .generation_page import generation
from .library_page import libraries
from .real_page import real_sizes

HERE = Path(__file__).resolve().parents[2]
PAGE = HERE.parent / "docs" / "models.md"
Record = Mapping[str, Any]
WHOSE = {"theirs": "transformers'", "ours": "autotp's"}

HEAD = """\
# Architectures

What autotp makes of {count} architectures of the transformers library, each small and with random weights. The list
is [benchmarks/architectures.toml](../benchmarks/architectures.toml): model types, and the few sizes that do not
follow from their config classes. `make models` runs it and writes this page, from
[models.json](../benchmarks/results/models.json) and
[hand_plans.json](../benchmarks/results/hand_plans.json). `make zoo` runs it as tests, at tp=2.

{made}

- **passes**: the degrees at which [`autotp.verify`](guide.md#proving-a-plan) found every output, every value and
  every gradient equal to the original's, in float64. A degree that was tried and is missing is under [what does not
  pass](#what-does-not-pass), with the reason.
- **parameters, flops**: the share of the fullest rank, in percent, at each degree tried (2, 4 and 8 unless listed
  otherwise). Parameters that nothing reads for these inputs are left out. Perfect are 50, 25 and 12.5.
- **collectives**: forward + backward in a repeated layer, at the smallest degree. Megatron's are 2 + 2.
- **bytes / Megatron's**: what a rank sends in a step over what it would send by Megatron's scheme, for plans of text
  models that are {scale} times as wide, in bfloat16, for {rows} sequences of {length} tokens, or as many as the model
  has positions for. In the small models themselves latency decides, and a plan may send more bytes in fewer
  collectives. A dash: it is no such model, or its plan took more than two minutes. [How Megatron's are
  counted](#megatrons-count).

Every model has two layers (one of each kind, where kinds differ), eight heads of 8, a width of 64, and is in eval
mode. Inputs are `autotp.inputs.for_model`'s: two sequences of 16 tokens, images of 32 x 32 pixels, and so on. A model
of text and images gets both where its config says how many tokens an image is, and otherwise its text alone.
"""

MEGATRON = """\
## Megatron's count

For a text model that is made of attention and feed-forward blocks: at least nine tenths of the weights in matrices,
those of embeddings and heads aside. Other models have a dash. With b sequences of s tokens, width h, vocabulary V and
N ranks, an all-reduce of a value sends 2(N-1)/N of its bytes, an all-gather (N-1)/N. Blocks are those of
`plan.blocks`.

- Every attention block and every feed-forward block: one all-reduce of b·s·h forward and one backward. The
  feed-forward blocks of a layer with experts count as one. Cross-attention also reduces the gradient of the encoder's
  output.
- The embedding, split by vocabulary: one all-reduce of b·s·h forward.
- The head, split by vocabulary: one all-reduce of b·s·h backward, and one all-gather of its b·s·V outputs, because
  autotp's outputs are whole.
- Where the plan splits the sequence: an all-reduce of the gradient of every norm's weights.

No count for heads that the ranks do not divide: Megatron refuses those.
"""

HAND = """\
## Against hand-written plans

transformers ships a tensor-parallel plan for many of its models, written by hand. Both are run as rank 0 of torch's
`fake` process group, in which collectives have their real shapes and send nothing, and every collective that is
called, forward and backward, is counted. The table has what one rank sends in a step: for the small models and inputs
of the tables above, and for the wide ones that Megatron's count is compared with (the tensors are fake there, too).
*held* is the share of the parameters that a rank holds, theirs and autotp's: a plan that splits less has less to
send. transformers' plans are applied as `from_pretrained(..., distributed_config=DistributedConfig(tp_size=N))` does
it. This counts; it does not say that their results are right.

{made}
"""


def load(name: str) -> dict[str, Any]:
    """The results in a file of benchmarks/results; empty where there is none."""
    path = HERE / "results" / name
    return json.loads(path.read_text()) if path.exists() else {"made": {}, "models": {}}


def render(models: Mapping[str, Any] | None = None, hand: Mapping[str, Any] | None = None) -> str:
    """The page, from results or from those in the files."""
    models = load("models.json") if models is None else models
    hand = load("hand_plans.json") if hand is None else hand
    records = models["models"]
    head = HEAD.format(count=len(records), made=made(models), scale=SCALE, rows=ROWS, length=LENGTH)
    parts = [head, *_summary(records)]
    for family in dict.fromkeys(r["family"] for r in records.values()):
        parts += _family(family, {n: r for n, r in records.items() if r["family"] == family})
    parts += [*_failures(records, models.get("skipped", [])), MEGATRON]
    generated = load("generation.json")
    parts += generation(generated, made(generated))
    others = load("libraries.json")
    parts += libraries(others, made(others))
    real = load("real_sizes.json")
    parts += real_sizes(real, made(real))
    parts += [HAND.format(made=made(hand)), *_hand(hand["models"])] if hand["models"] else []
    return "\n".join(parts)


def made(results: Mapping[str, Any]) -> str:
    """Say with what results were made, from the first to the last of their days."""
    if not (run := results["made"]):
        return ""
    days = sorted({record.get("date", run["date"]) for record in results["models"].values()}) or [run["date"]]
    when = f"on {days[0]}" if len(days) == 1 else f"between {days[0]} and {days[-1]}"
    named = ", ".join(f"{k} {run[k]}" for k in ("autotp", "torch", "transformers", "python"))
    return f"Made {when} with {named}, on {run['machine']}, the last of them by `{run['command']}`."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _tps(records: Mapping[str, Record]) -> list[str]:
    return sorted({tp for r in records.values() for tp in r["tp"]}, key=int)


def _summary(records: Mapping[str, Record]) -> Iterator[str]:
    tps = _tps(records)
    families: dict[str, list[Record]] = {}
    for record in records.values():
        families.setdefault(record["family"], []).append(record)
    rows = [_counts(family, own, tps) for family, own in families.items()]
    rows.append(_counts("all", list(records.values()), tps))
    yield table(["family", "architectures", *(f"pass at tp={tp}" for tp in tps)], rows)


def _counts(name: str, records: Sequence[Record], tps: Sequence[str]) -> list[str]:
    """A line of the summary: how many pass at each degree, of those tried."""
    cells = []
    for tp in tps:
        tried = [r["tp"][tp] for r in records if tp in r["tp"]]
        cells.append(f"{sum(r['ok'] for r in tried)} of {len(tried)}")
    return [name, str(len(records)), *cells]


def _family(family: str, records: Mapping[str, Record]) -> Iterator[str]:
    built = {n: r for n, r in records.items() if "failed" not in r}
    head = ["architecture", "passes", "parameters", "flops", "collectives", "bytes / Megatron's"]
    yield f"## {family[0].upper()}{family[1:]}\n"
    yield table(head, [_row(name, record) for name, record in built.items()])


def _row(name: str, record: Record) -> list[str]:
    tried = [record["tp"][tp] for tp in sorted(record["tp"], key=int)]
    shown = [r for r in tried if "flops" in r]
    passed = " ".join(tp for tp in sorted(record["tp"], key=int) if record["tp"][tp]["ok"])
    layer = shown[0]["per_layer"] if shown else None
    wide = record.get("wide", {})
    against = [f"{r['bytes'] / r['megatron']:.2f}" for tp in sorted(wide, key=int) if (r := wide[tp]).get("megatron")]
    return [
        name,
        passed or "none",
        " ".join(_percent(r["parameters"]) for r in shown) or "-",
        " ".join(_percent(r["flops"]) for r in shown) or "-",
        f"{layer[0]:g} + {layer[1]:g}" if layer else "-",
        " ".join(against) or "-",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _failures(records: Mapping[str, Record], skipped: Sequence[str]) -> Iterator[str]:
    yield "## What does not pass\n"
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, record in records.items():
        if "failed" in record:
            reasons.setdefault((name, f"not built: {record['failed']}"), [])
        for tp, result in record["tp"].items():
            if not result["ok"]:
                reasons.setdefault((name, result["why"]), []).append(tp)
    rows = [[name, " ".join(tps) or "-", _cell(why)] for (name, why), tps in reasons.items()]
    yield table(["architecture", "at tp", "reason"], rows) if rows else "Everything passes.\n"
    if skipped:
        yield f"The installed transformers does not have: {', '.join(skipped)}.\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _hand(records: Mapping[str, Record]) -> Iterator[str]:
    cases = sorted({c for r in records.values() for c in r if c.startswith(("small", "wide"))}, key=_order)
    head = ["architecture"]
    for case in cases:
        name, tp = case.split()
        head += [f"{name}, tp={tp}: theirs", "autotp's", "ratio"]
    yield table([*head, f"held, tp={cases[0].split()[1]}"], [_hand_row(n, r, cases) for n, r in records.items()])
    sides = ((n, side, found) for n, r in records.items() for c in cases for side, found in r.get(c, {}).items())
    failed = sorted({(n, f"{WHOSE[side]} plan", found["failed"]) for n, side, found in sides if "failed" in found})
    yield "Not counted, where the table has a dash:\n"
    yield table(["architecture", "whose plan", "reason"], [[name, whose, _cell(why)] for name, whose, why in failed])


def _order(case: str) -> tuple[int, str]:
    name, tp = case.split()
    return int(tp), name


def _hand_row(name: str, record: Record, cases: Sequence[str]) -> list[str]:
    cells = [name]
    for case in cases:
        sides = [record.get(case, {}).get(side, {}) for side in ("theirs", "ours")]
        sent = [s["forward"]["bytes"] + s["backward"]["bytes"] if "forward" in s else None for s in sides]
        cells += [_bytes(x) for x in sent]
        cells.append(f"{sent[1] / sent[0]:.2f}" if sent[0] and sent[1] is not None else "-")
    held = [record.get(cases[0], {}).get(side, {}).get("parameters") for side in ("theirs", "ours")]
    whole = record.get("parameters")
    shares = [_percent(x / whole) if x and whole else "-" for x in held]
    return [*cells, " ".join(shares)]


def _bytes(sent: float | None) -> str:
    if sent is None:
        return "-"
    return f"{sent / 1024:.1f} KiB" if sent < 2**20 else f"{sent / 2**20:.1f} MiB"
