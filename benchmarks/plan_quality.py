"""Bytes of four plans for one model, as multiples of Megatron's: autotp's, DTensor's usual one, transformers' tp_plan.

    python -m benchmarks.plan_quality                 # decoders, an encoder, models with parallel blocks; tp 2 and 4
    python -m benchmarks.plan_quality --only llama --tp 2 --layers 2 4 8
    python -m benchmarks.plan_quality --write         # also writes the section of docs/performance.md

Each plan runs a step forward and backward as rank 0 of torch's "fake" process group on fake tensors, and every
collective that is called is counted (`benchmarks.lists.hand_plans`). Megatron's bytes are counted from the model's
blocks (`benchmarks.helpers.hand_count`). DTensor's usual plan is `parallelize_module` with `ColwiseParallel` and
`RowwiseParallel` on every `nn.Linear` that Megatron splits so, the embedding by rows, and the head by columns with
whole outputs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autotp
from benchmarks.helpers.build import Architecture, architectures, model_class, wide
from benchmarks.helpers.command import made
from benchmarks.helpers.hand_count import hand_bytes
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.measure import LENGTH, ROWS, reason
from benchmarks.helpers.performance import table, write_section
from benchmarks.lists.hand_plans import counted, ours, theirs

from .helpers import isolate

MODELS = ("llama", "qwen3", "gpt2", "bert", "gpt_neox", "gptj", "falcon")
SIDES = ("autotp", "DTensor", "transformers")
LIMIT = 300.0
TOKENS = ROWS * LENGTH  # in sequences of LENGTH, or as long as the model takes
TITLE = "Bytes of plans against Megatron's"
LAYERS = (2, 12)
TOLD = """\
autotp puts parameters per rank first (within 3% of the least) and time second, so it may send more where a matrix
outside of the layers is a large part of the model: of BERT with two layers the matrix before the head, which Megatron
leaves whole, is 4% of what a rank holds at tp=2 and 12% at tp=4. Splitting it sends one all-reduce more, 8% of
Megatron's bytes. With twelve layers it is within the 3% and stays whole.

DTensor reduces the gradient of a value once for every layer that reads it (q, k and v; gate and up), and so does
transformers' `tp_plan`, which is made of the same two styles: of Llama 2 all-reduces forward and 5 backward in a
layer, where Megatron has 2 and 2. With L layers, the embedding, the head, and logits that take g all-reduces' bytes to
gather that is (7L + 2 + g) / (4L + 2 + g): 1.50 for two layers here (g = 2), 1.67 for eight, or for four whose logits
are not gathered, and 1.75 at most. The backward alone comes to 2.5 at most.

A dash: there is no such plan, or it does not run without changes to the model (such as a number of heads that the
forward takes from the config)."""


def deep(architecture: Architecture, layers: int) -> Architecture:
    """The same architecture with so many layers."""
    config: Any = model_class(architecture.mapping, architecture.name).config_class
    name = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    return replace(architecture, overrides={**architecture.overrides, name: layers})


def compare(architecture: Architecture, tps: Sequence[int], send: Send) -> None:
    """Count the plans of one architecture; for `isolate.run`."""
    make = functools.partial(wide, architecture)
    length = min(LENGTH, getattr(make().config, "max_position_embeddings", LENGTH))
    inputs = {"input_ids": torch.ones(TOKENS // length, length, dtype=torch.long)}
    for tp in tps:
        try:
            plan = autotp.plan(make(), tp, example_inputs=inputs)
        except Exception as error:
            return send({str(tp): {"failed": reason(error)}})
        counts: Record = {"Megatron": round(hand_bytes(plan)), "planned": round(sent(plan))}
        hand = theirs if getattr(make(), "_tp_plan", None) else None
        for side, distribute in zip(SIDES, (ours, usual, hand), strict=True):
            if distribute is not None:
                counts[side] = counted(distribute, make, inputs, tp)
                counts[side].pop("whole", None)
        send({str(tp): counts})
    return None


def sent(plan: autotp.Plan) -> float:
    """Bytes that a rank sends in a step, by the plan."""
    return plan.totals.forward_bytes + plan.totals.backward_bytes


def usual(model: Any, inputs: Mapping[str, Any], tp: int) -> nn.Module:
    """The model by DTensor's usual plan: every linear layer by itself, by the role that it has in Megatron's plan."""
    roles = written(model) or found(model, inputs, tp)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        if module is table:
            styles[name] = RowwiseParallel(input_layouts=Replicate())
        elif module is head:
            styles[name] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(module, nn.Linear) and roles.get(name):
            styles[name] = ColwiseParallel() if roles[name] == "column" else RowwiseParallel()
    if len(styles) < 3:
        raise LookupError("its layers are no nn.Linear, and DTensor has a style for no other")
    return parallelize_module(model, init_device_mesh("cpu", (tp,)), styles)


def written(model: nn.Module) -> dict[str, str]:
    """Module -> "column" or "row", where transformers' tp_plan says so."""
    words = {"colwise": "column", "rowwise": "row"}
    plan = {k: words[v] for k, v in dict(getattr(model, "_tp_plan", None) or {}).items() if v in words}
    names = [name for name, _ in model.named_modules()]
    return {n: side for n in names for pattern, side in plan.items() if fnmatchcase(n, pattern)}


def found(model: nn.Module, inputs: Mapping[str, Any], tp: int) -> dict[str, str]:
    """The same by the roles of weights in autotp's plan with heads, feed-forward width and vocabulary dealt out."""
    pins = {"vocab": Shard(0), "heads": Shard(0), "mlp": Shard(0)}
    plan = autotp.plan(model, tp, example_inputs=dict(inputs), pins=pins)
    words = {"column-parallel": "column", "row-parallel": "row"}
    inside = {name for block in plan.blocks if block.kind in ("attention", "mlp") for name in block.parameters}
    return {p.name.rpartition(".")[0]: words[p.role] for p in plan.parameters if p.role in words and p.name in inside}


def ratios(counts: Mapping[str, Any]) -> dict[str, float | None]:
    """Bytes over Megatron's for each side; None for what cannot be run."""
    out: dict[str, float | None] = {}
    for side in SIDES:
        ways = counts.get(side, {})
        total = ways["forward"]["bytes"] + ways["backward"]["bytes"] if "backward" in ways else None
        out[side] = round(total / counts["Megatron"], 3) if total is not None and counts.get("Megatron") else None
    return out


def section(results: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """The section of the page; `results` by model and layers ("llama, 2 layers")."""
    rows = [
        (name, tp, *("-" if x is None else f"{x:.2f}" for x in ratios(counts).values()))
        for name, record in results.items()
        for tp, counts in record.items()
        if "Megatron" in counts
    ]
    return (
        "`python -m benchmarks.plan_quality --write`: bytes that rank 0 sends in a step, forward and backward, counted "
        f"call by call, over those of Megatron's plan. Models 768 or 1024 wide, {TOKENS} tokens, bfloat16, "
        f"whole outputs, h100.\n\n{table(('model', 'tp', *SIDES), rows)}\n{TOLD}\n\n"
        f"autotp {about['autotp']}, torch {about['torch']}, transformers {about['transformers']}, Python "
        f"{about['python']}, {about['machine']}, {about['date']}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4], help="degrees (default: 2 4)")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="depths (default: 2 12)")
    parser.add_argument("--only", nargs="+", default=MODELS, help="model types of benchmarks/architectures.toml")
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    given = parser.parse_args(arguments)
    listed = {a.name: a for a in architectures()}
    results: dict[str, Any] = {}
    for kind, layers in itertools.product(given.only, given.layers):
        name = f"{kind}, {layers} layers"
        record, why = isolate.run(compare, deep(listed[kind], layers), given.tp, limit=LIMIT * len(given.tp))
        results[name] = record
        for tp, counts in record.items():
            failed = {side: counts[side]["failed"] for side in SIDES if "failed" in counts.get(side, {})}
            print(f"{name:20} tp={tp} {ratios(counts)} {failed or counts.get('failed', '')}", flush=True)
        if why:
            print(f"{name:20} {why}", flush=True)
    about = made("benchmarks.plan_quality", arguments)
    if given.write:
        write_section(TITLE, section(results, about))
    told = {name: {tp: ratios(counts) for tp, counts in record.items()} for name, record in results.items()}
    print(json.dumps({"benchmark": "plan_quality", "made": about, "bytes over Megatron's": told}))


if __name__ == "__main__":
    main()
