"""What plans predict for pairs of unlike cards, evenly and by the shares that are found.

    python -m benchmarks.predicted.unequal            # prints the table
    python -m benchmarks.predicted.unequal --write    # and writes the section of docs/performance.md

Nothing runs on devices: models are on the meta device, seconds come from the cards' descriptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import autotp
from autotp.cli.flags import ModelOptions
from autotp.cli.models import load
from autotp.cost import Cluster
from autotp.errors import PlanError
from benchmarks.helpers.performance import table, write_section

HEADING = "Pairs of unlike cards"
MODELS = ("llama-3-8b", "phi-4", "gpt-neox-20b")
PAIRS = ("rtx4090,rtx3090", "rtx5090,rtx4090", "rtx3090,rtx3060", "rtx4090,rtx4060ti", "rtx4080,rtx3060",
         "rtx4060ti,rtx3060")  # fmt: skip
LENGTH = 1024
NONE = "does not fit"


def rows(models: Sequence[str], pairs: Sequence[str]) -> Iterator[list[str]]:
    """A row for each model and pair: bytes that the ranks hold, tokens a second evenly and unevenly, and the shares."""
    for name in models:
        source = load(name, ModelOptions(batch=1, seq=LENGTH, dtype="bfloat16"), training=False)
        for pair in pairs:
            try:
                keywords = {"example_inputs": source.inputs, "cluster": pair, "objective": "decode"}
                plan = autotp.plan(source.model, 2, check_capture=False, **keywords)
            except PlanError:
                yield [name, pair, NONE, NONE, "-", "-"]
                continue
            choice = plan.share_choice
            assert choice is not None
            even = f"{1 / choice.even:.1f}" if choice.even_fits else NONE
            size = " + ".join(f"{x / 2**30:.1f}" for x in choice.memory)
            most = max(choice.dealt, key=lambda each: each.length)
            yield [name, pair, even, f"{1 / choice.seconds:.1f}", size, ":".join(map(str, most.units))]


def section(found: Sequence[Sequence[str]]) -> str:
    """The section of docs/performance.md."""
    sizes = ", ".join(
        f"`{name}` {Cluster.preset(name).memory_size / 1e9:.0f} GB" for name in sorted({*",".join(PAIRS).split(",")})
    )
    head = ["model", "cards", "even, tokens/s", "uneven, tokens/s", "held, GiB", "of the longest dimension"]
    return f"""\
`python -m benchmarks.predicted.unequal --write`: one sequence of {LENGTH} tokens in bfloat16, decoded on two cards, by
the cards' peaks and eager launches; predicted, not measured. Memory: {sizes}.

{table(head, found)}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--models", nargs="+", default=MODELS, help="these models")
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="these pairs")
    given = parser.parse_args(arguments)
    found = []
    for row in rows(given.models, given.pairs):
        print("  ".join(row), flush=True)
        found.append(row)
    if given.write:
        write_section(HEADING, section(found))


if __name__ == "__main__":
    main()
