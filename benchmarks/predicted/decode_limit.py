"""The limit of decoding for Llamas of 8B and 70B on the described clusters, and what their plans predict.

    python -m benchmarks.predicted.decode_limit            # prints the tables
    python -m benchmarks.predicted.decode_limit --write    # and writes the section of docs/performance.md

Nothing runs on devices: bytes come from plans of models on the meta device, seconds from the clusters' descriptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from autotp.driver.compile import capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.plans.plan import Plan
from benchmarks.helpers.performance import table, write_section
from benchmarks.plan_time import build

HEADING = "Llama 8B and 70B on the described clusters"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
MODELS = ("Llama-8B", "Llama-70B")
CLUSTERS = ("h100", "h200", "a100", "a100-pcie", "l40s")
DEGREES, SEQUENCES, LENGTH = (1, 2, 4, 8), 1, 4096
ONE_SHOT, NCCL = 6.3e-6, 23e-6  # s of an all-reduce of a few KB within a node: torchtitan's notes on RL inference
HEAD = ["", "tp", "read", "reading alone", f"+ {ONE_SHOT * 1e6:g} us", f"+ {NCCL * 1e6:g} us", "as priced", "predicted",
        "share"]  # fmt: skip


def captured(name: str) -> Capture:
    """The model's graph for one sequence."""
    ids = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    return capture_model(build(name), Inputs(input_ids=ids), torch.device("cpu"), check=False)[0]


def row(plan: Plan) -> list[str]:
    """Gigabytes that a rank reads for a token, tokens a second by each way to price collectives, and the prediction."""
    found = plan.decoding
    if found is None:
        raise RuntimeError(f"{plan.model} on {plan.cluster}: this is no plan for decoding")
    limit, count = found.limit, sum(c.forward is not None for c in plan.collectives)
    each = [limit.reading, *(limit.reading + count * seconds for seconds in (ONE_SHOT, NCCL)), limit.seconds]
    read = f"{(limit.weights + limit.cache) / 1e9:.2f}"
    rates = [f"{found.sequences / seconds:.0f}" for seconds in (*each, found.seconds)]
    fits = "" if plan.memory.peak <= CAPACITY[plan.cluster] else "*"
    return [plan.cluster, f"{plan.tp}{fits}", read, *rates, f"{found.share_of_limit:.0%}"]


CAPACITY = {name: Options.read(1, Steering(cluster=name)).cluster.memory_size for name in CLUSTERS}


def rows(name: str, clusters: Sequence[str] = CLUSTERS) -> Iterator[list[str]]:
    """A row for each cluster and degree."""
    graph = captured(name)
    for cluster in clusters:
        for tp in DEGREES:
            steering = Steering(cluster=cluster, objective="decode")
            yield row(solve_plan(graph, [], Options.read(tp, steering), name))


def section(models: Sequence[str] = MODELS) -> str:
    """The section of docs/performance.md."""
    tables = "\n".join(f"{name}:\n\n{table(HEAD, rows(name))}" for name in models)
    return f"""\
`python -m benchmarks.predicted.decode_limit --write`: bfloat16, {SEQUENCES} sequence, a cache of {LENGTH} tokens.
*read*: gigabytes of weights and cache that a rank reads for a token. Then tokens a second: the limit of reading alone,
with every collective taking {ONE_SHOT * 1e6:g} us (a one-shot kernel) or {NCCL * 1e6:g} us (NCCL), which is what
torchtitan's notes on RL inference give for the messages of decoding, and as the cost model prices them. *predicted* is
the plan's step, with an eager launch for each kernel; *share* is of the limit as priced. A degree with a star does not
fit into a device.

{tables}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    text = section()
    print(text)
    if given.write:
        write_section(HEADING, text, PAGE)


if __name__ == "__main__":
    main()
