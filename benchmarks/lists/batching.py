"""Continuous batching over the list of architectures: writes results/batching.json.

python -m benchmarks.lists.batching                        # all decoders, at tp=2 and 3
python -m benchmarks.lists.batching --only llama gpt_oss   # a part; its results replace those in the file

Each architecture is built small, in float64, and answers twelve requests that come and go: tokens and logits must be
those of `generate()` from each prompt, tokens those of the unsharded model's own engine too, where it serves the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.helpers.build import architectures
from benchmarks.helpers.command import made
from benchmarks.helpers.isolate import run
from benchmarks.helpers.lists.batched import batched

RESULTS = Path(__file__).parents[1] / "results" / "batching.json"
DECODERS, LIMIT = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", 900.0


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 3], help="degrees (default: 2 3)")
    parser.add_argument("--only", nargs="+", help="model types")
    asked = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    for each in architectures():
        if each.mapping != DECODERS or (asked.only and each.name not in asked.only):
            continue
        record, why = run(batched, each, asked.tp, limit=LIMIT, parent=True)
        results["made"] = made("benchmarks.lists.batching", arguments)
        results["models"][each.name] = record if not why else {**record, "own": why}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{each.name:24} {json.dumps(record)}", flush=True)


if __name__ == "__main__":
    main()
