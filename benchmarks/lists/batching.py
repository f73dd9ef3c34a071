"""Continuous batching over the list of architectures: writes results/batching.json.

python -m benchmarks.lists.batching                        # all decoders, at tp=2 and 3
python -m benchmarks.lists.batching --only llama gpt_oss   # a part; its results replace those in the file
python -m benchmarks.lists.batching --older                # on where it stopped, or is older than the code

Each architecture is built small, in float64, and answers twelve requests that come and go: tokens and logits must be
those of `generate()` from each prompt, tokens those of the unsharded model's own engine too, where it serves the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.helpers.build import Architecture
from benchmarks.helpers.command import add_choice, choose, each, made
from benchmarks.helpers.isolate import Record, run
from benchmarks.helpers.lists.batched import batched

RESULTS = Path(__file__).parents[1] / "results" / "batching.json"
DECODERS, LIMIT = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 900.0


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 3], help="degrees (default: 2 3)")
    add_choice(parser, LIMIT)
    given = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    results["made"] = made("benchmarks.lists.batching", arguments)

    def one(architecture: Architecture) -> Record:
        record, why = run(batched, architecture, given.tp, limit=given.limit * len(given.tp), parent=True)
        return {**record, "own": why} if why else record

    def keep(architecture: Architecture, record: Record) -> str:
        results["models"][architecture.name] = record
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        return json.dumps(record)

    chosen = choose(given, results["models"], "batched-generators")
    each([a for a in chosen if a.mapping == DECODERS], one, keep, given.jobs)


if __name__ == "__main__":
    main()
