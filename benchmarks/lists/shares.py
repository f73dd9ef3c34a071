"""Unlike shares over the list of architectures, proved forward and backward: writes results/shares.json.

python -m benchmarks.lists.shares                       # those of `CHOSEN`, at 2:1 and 3:2:1
python -m benchmarks.lists.shares --only llama mixtral  # a part; its results replace those in the file
python -m benchmarks.lists.shares --older               # on where it stopped, or is older than the code

Each architecture is built small, verified on simulated ranks in float64, every value and gradient, and where it can
generate, decodes two tokens with its cache. "uneven": whether some weight is dealt otherwise than by `torch.chunk`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import autotp
from benchmarks.helpers.build import Architecture, architectures, build
from benchmarks.helpers.command import add_choice, choose, each, made
from benchmarks.helpers.isolate import Record, Send, run
from benchmarks.helpers.measure import example, reason

from .generation import generates

RESULTS = Path(__file__).parents[1] / "results" / "shares.json"
LIMIT, TOKENS = 900.0, 2
SHARES = (2, 1), (3, 2, 1)
# Of every family some: dense and tied, fused weights, mixtures by expert, recurrent, encoders, both, vision.
CHOSEN = """
apertus bloom cohere2 exaone4 falcon gemma2 gemma3_text glm4 gpt2 gpt_bigcode gpt_neox gptj granite llama mpt nemotron
olmo2 opt phi3 qwen2 qwen3 smollm3 stablelm starcoder2 xglm
mixtral olmoe phimoe qwen2_moe qwen3_moe gpt_oss granitemoe deepseek_v2 deepseek_v3
mamba mamba2 falcon_h1 lfm2 bert electra modernbert roberta bart t5 m2m_100
"""


def measure(architecture: Architecture, send: Send) -> None:
    """Verify one architecture by each of the shares.

    Args:
        architecture: what to build. send: takes a part of the record as soon as it is known.
    """
    for shares in SHARES:
        name = ":".join(map(str, shares))
        try:
            model: Any = build(architecture)
            tokens = TOKENS if generates(architecture) and not model.config.is_encoder_decoder else None
            report = autotp.verify(model, len(shares), example(model), shares=shares, generate=tokens)
        except Exception as error:
            send({"shares": {name: {"ok": False, "why": reason(error)}}})
            continue
        assert report.plan is not None
        held = [p for p in report.plan.parameters if p.layout.stored is not None]
        uneven = sum(not p.layout.even(report.plan.tp) for p in held)
        found = {"ok": bool(report), "why": None if report else str(report)[:300], "split": len(held), "uneven": uneven}
        send({"shares": {name: found | {"decoded": tokens if report.decoded else None}}})


def line(record: Record) -> str:
    """One result, for the terminal."""
    told = (f"{shares} {'ok' if x['ok'] else 'FAILED ' + x['why']}" for shares, x in record.get("shares", {}).items())
    return "  ".join(told)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    results: Record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    results["made"] = made("benchmarks.lists.shares", arguments)
    order = {a.name: i for i, a in enumerate(architectures())}

    def one(architecture: Architecture) -> Record:
        record, why = run(measure, architecture, limit=given.limit * len(SHARES))
        for shares in SHARES if why else ():
            record.setdefault("shares", {}).setdefault(":".join(map(str, shares)), {"ok": False, "why": why})
        return record

    def keep(architecture: Architecture, record: Record) -> str:
        results["models"][architecture.name] = record
        results["models"] = dict(sorted(results["models"].items(), key=lambda x: order[x[0]]))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        return line(record)

    chosen = [a for a in choose(given, results["models"], "shares") if given.only or a.name in CHOSEN.split()]
    each(chosen, one, keep, given.jobs)


if __name__ == "__main__":
    main()
