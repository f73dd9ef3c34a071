"""How long planning takes, from 2 to 126 layers, beside one `torch.export` of the same model.

    python -m benchmarks.plan_time           # prints the table and a JSON line
    python -m benchmarks.plan_time --write   # and the section of docs/performance.md

Llama shapes and DeepSeek-V3 on the meta device, bfloat16, tp=8, batch and length symbolic; each figure is of a process
of its own. The comparison of the capture with the model, which is made unless `check_capture=False`, stands apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch.export import Dim

import autotp
from autotp.driver.compile import capture_model, solve_plan
from autotp.driver.options import Options
from autotp.errors import PlanError
from autotp.inputs import for_model
from benchmarks.helpers.command import made, versions
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.performance import table, write_section

from .helpers import isolate

HEADING = "Planning time"
TP, LIMIT, ROUNDS = 8, 300.0, 3
# name -> layers, hidden size, feed-forward size, heads; 8 heads of keys and values, a vocabulary of 128256
MODELS = {
    "8B shape, 2 layers": (2, 4096, 14336, 32),
    "8B shape, 8 layers": (8, 4096, 14336, 32),
    "Llama-8B": (32, 4096, 14336, 32),
    "Llama-70B": (80, 8192, 28672, 64),
    "Llama-405B": (126, 16384, 53248, 128),
}
DEEPSEEK = "DeepSeek-V3, 61 layers"  # by its class's own config


def build(name: str) -> transformers.PreTrainedModel:
    """A model of these shapes on the meta device."""
    if name == DEEPSEEK:
        with torch.device("meta"):
            config: Any = transformers.DeepseekV3Config(use_cache=False)
            return transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    layers, hidden, wide, heads = MODELS[name]
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=wide, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def export(name: str, send: Send) -> None:
    """CPU seconds of `torch.export` alone."""
    model = build(name)
    inputs: Any = for_model(model)
    given = {k: v.to("meta") for k, v in inputs.kwargs.items()}
    sizes = {k: dict.fromkeys(range(v.ndim), Dim.AUTO) for k, v in given.items()}
    began = time.process_time()
    torch.export.export(model, (), given, dynamic_shapes=sizes, strict=False)
    send({"export": time.process_time() - began})


def plan(name: str, send: Send) -> None:
    """CPU seconds of capture and of planning, and the process's peak memory."""
    model = build(name)
    inputs: Any = for_model(model)
    began = time.process_time()
    captured, notes = capture_model(model, inputs, torch.device("cpu"), check=False)
    between = time.process_time()
    solve_plan(captured, notes, Options.read(TP), name)
    ended = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    send({"capture": between - began, "plan": ended - between, "total": ended - began, "peak_gb": peak})


def choose(name: str, send: Send) -> None:
    """CPU seconds from the module to the plan of the best degree of 1, 2, ... 32, or to the error that none fits."""
    model = build(name)
    began = time.process_time()
    with suppress(PlanError):
        autotp.plan(model, "auto", check_capture=False)
    send({"auto": time.process_time() - began})


def compare(name: str, send: Send) -> None:
    """CPU seconds of a capture that is compared with the model."""
    model = build(name)
    inputs: Any = for_model(model)
    began = time.process_time()
    capture_model(model, inputs, torch.device("cpu"))
    send({"compared": time.process_time() - began})


def shard(name: str, send: Send) -> None:
    """CPU seconds from the module to the sharded module of one rank."""
    model = build(name)
    began = time.process_time()
    autotp.compile(model, TP)
    send({"compile": time.process_time() - began})


def measured(name: str, rounds: int) -> Record:
    """Medians over processes, one after another."""
    found: dict[str, list[float]] = {}
    for round_ in range(rounds):
        for function in (plan, choose, compare, shard, export)[: 5 if round_ == 0 else 4]:
            record, why = isolate.run(function, name, limit=LIMIT)
            if why:
                raise RuntimeError(f"{name}, {function.__name__}: {why}")
            for key, value in record.items():
                found.setdefault(key, []).append(value)
    times = {key: round(statistics.median(values), 2) for key, values in found.items()}
    times["default"] = round(times["compared"] + times["plan"], 2)
    times["comparison"] = round(times.pop("compared") - times["capture"], 2)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"processes for each figure (default {ROUNDS})")
    given = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    rows = track([*MODELS, DEEPSEEK], "measuring", console=Console(stderr=True), transient=True)
    results = {name: measured(name, given.rounds) for name in rows}
    head = ("", "torch.export", "capture", "plan", "module to plan", "comparison", "default call",
            "module to sharded module", "peak memory, GB", 'module to plan, tp="auto"')  # fmt: skip
    keys = "export", "capture", "plan", "total", "comparison", "default", "compile", "peak_gb", "auto"
    shown = table(head, [[n, *(_cell(r[k]) for k in keys)] for n, r in results.items()])
    record = {"benchmark": "plan_time", **made("benchmarks.plan_time", arguments), "load_before": round(before, 1)}
    record |= {"tp": TP, "rounds": given.rounds, "models": results}
    print(shown)
    if given.write:
        write_section(HEADING, f"{_told(record)}\n\n{shown}")
    print(json.dumps(record))


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _told(record: Record) -> str:
    machine = f"{os.cpu_count()} cores of {record['machine']}"
    return f"""\
`{record["command"]}`: CPU seconds at tp={TP}, median of {record["rounds"]} processes (`torch.export`: one), on the
meta device with symbolic batch and length; "auto" is the best of 1, 2, ... 32, or that none fits. Equal blocks are
traced once: capture grows by the bookkeeping of a layer, not by its trace. A default call compares the capture with
the model besides, as the seconds to the sharded module have it in them; `check_capture=False` leaves it out. {machine};
{versions(record)}, {record["date"]}, load average {record["load_before"]} before the run."""


if __name__ == "__main__":
    main()
