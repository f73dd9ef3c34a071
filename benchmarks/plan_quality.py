"""Bytes of four plans for one model, as multiples of Megatron's: autotp's, DTensor's usual one, transformers' tp_plan.

    python -m benchmarks.plan_quality                 # decoders, an encoder, models with parallel blocks; tp 2
    python -m benchmarks.plan_quality --only llama --tp 2 4
    python -m benchmarks.plan_quality --write         # also writes the section of docs/performance.md

Each plan runs a step forward and backward as rank 0 of torch's "fake" process group on fake tensors, and every
collective that is called is counted (`benchmarks.hand_plans`). Megatron's bytes are counted from the model's blocks
(`autotp.megatron`). DTensor's usual plan is `parallelize_module` with `ColwiseParallel` and `RowwiseParallel` on every
`nn.Linear` that Megatron splits so, the embedding by rows, and the head by columns with whole outputs.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autotp

from . import isolate
from .build import Architecture, architectures, wide
from .command import made
from .hand_plans import counted, ours, theirs
from .isolate import Record, Send
from .measure import LENGTH, ROWS, reason
from .performance import table, write_section

MODELS = ("llama", "qwen3", "gpt2", "bert", "gpt_neox", "gptj", "falcon")
SIDES = ("autotp", "DTensor", "transformers")
LIMIT = 300.0
TITLE = "Bytes of plans against Megatron's"


def compare(architecture: Architecture, tps: Sequence[int], send: Send) -> None:
    """Count the plans of one architecture; for `isolate.run`."""
    inputs = {"input_ids": torch.ones(ROWS, LENGTH, dtype=torch.long)}
    make = functools.partial(wide, architecture)
    for tp in tps:
        try:
            plan = autotp.plan(make(), tp, example_inputs=inputs)
        except Exception as error:
            return send({str(tp): {"failed": reason(error)}})
        found: Record = {"Megatron": round(plan.totals.megatron_bytes), "planned": round(sent(plan))}
        written = bool(getattr(make(), "_tp_plan", None))
        for side, distribute in zip(SIDES, (ours, usual, theirs if written else None), strict=True):
            if distribute is not None:
                found[side] = counted(distribute, make, inputs, tp)
                found[side].pop("whole", None)
        send({str(tp): found})
    return None


def sent(plan: autotp.Plan) -> float:
    """Bytes that a rank sends in a step, by the plan."""
    return plan.totals.forward_bytes + plan.totals.backward_bytes


def usual(model: Any, inputs: Mapping[str, Any], tp: int) -> nn.Module:
    """The model by DTensor's usual plan: every linear layer by itself, by the role that it has in Megatron's plan."""
    pins = {"vocab": Shard(0), "heads": Shard(0), "mlp": Shard(0)}
    plan = autotp.plan(model, tp, example_inputs=dict(inputs), pins=pins)
    roles = {name: p.role for p in plan.parameters for name in (p.name, *p.aliases)}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        role = roles.get(f"{name}.weight", "")
        if module is table:
            styles[name] = RowwiseParallel(input_layouts=Replicate())
        elif module is head:
            styles[name] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(module, nn.Linear) and role in ("column-parallel", "row-parallel"):
            styles[name] = ColwiseParallel() if role == "column-parallel" else RowwiseParallel()
    if len(styles) < 3:
        raise LookupError("its layers are no nn.Linear, and DTensor has a style for no other")
    return parallelize_module(model, init_device_mesh("cpu", (tp,)), styles)


def ratios(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Bytes over Megatron's for each side; None for what cannot be run."""
    out: dict[str, float | None] = {}
    for side in SIDES:
        ways = found.get(side, {})
        total = ways["forward"]["bytes"] + ways["backward"]["bytes"] if "backward" in ways else None
        out[side] = round(total / found["Megatron"], 3) if total is not None and found.get("Megatron") else None
    return out


def section(results: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """The section of the page."""
    rows = [
        (name, tp, *("-" if x is None else f"{x:.2f}" for x in ratios(found).values()))
        for name, record in results.items()
        for tp, found in record.items()
        if "Megatron" in found
    ]
    return (
        "`python -m benchmarks.plan_quality --write`: bytes that rank 0 sends in a step, forward and backward, counted "
        f"call by call, over those of Megatron's plan. Two layers 1024 wide, {ROWS} x {LENGTH} tokens, bfloat16, "
        f"whole outputs, h100.\n\n{table(('model', 'tp', *SIDES), rows)}\n"
        "autotp minimises time, not bytes, so it may send more where that is faster. DTensor reduces the gradient of a "
        "value once for every layer that reads it (q, k and v; gate and up). A dash: there is no such plan, or it does "
        "not run without changes to the model (a number of heads that the forward takes from the config).\n\n"
        f"autotp {about['autotp']}, torch {about['torch']}, transformers {about['transformers']}, Python "
        f"{about['python']}, {about['machine']}, {about['date']}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2], help="degrees (default: 2)")
    parser.add_argument("--only", nargs="+", default=MODELS, help="model types of benchmarks/architectures.toml")
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    listed = {a.name: a for a in architectures()}
    results: dict[str, Any] = {}
    for name in given.only:
        record, why = isolate.run(compare, listed[name], given.tp, limit=LIMIT * len(given.tp))
        results[name] = record
        for tp, found in record.items():
            failed = {side: found[side]["failed"] for side in SIDES if "failed" in found.get(side, {})}
            print(f"{name:12} tp={tp} {ratios(found)} {failed or ''}", flush=True)
        if why:
            print(f"{name:12} {why}", flush=True)
    about = made("benchmarks.plan_quality", arguments)
    if given.write:
        write_section(TITLE, section(results, about))
    told = {name: {tp: ratios(found) for tp, found in record.items()} for name, record in results.items()}
    print(json.dumps({"benchmark": "plan_quality", "made": about, "bytes over Megatron's": told}))


if __name__ == "__main__":
    main()
