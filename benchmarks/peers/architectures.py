"""Which of twelve architectures of transformers each way runs at all, over two ranks and over three."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp
from benchmarks.helpers import isolate
from benchmarks.helpers.build import architectures, build
from benchmarks.helpers.gloo import on_ranks
from benchmarks.helpers.isolate import Send
from benchmarks.helpers.measure import example, reason
from benchmarks.helpers.performance import table
from benchmarks.lists.hand_plans import theirs

from . import deepspeed_autotp

TWELVE = "llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "opt", "falcon", "mamba2", "t5", "bert", "vit", "whisper"
DEGREES, LIMIT, CLOSE = (2, 3), 180.0, 1e-4
Way = Callable[[Any, Mapping[str, Any], int], nn.Module]


def _deepspeed(model: Any, inputs: Mapping[str, Any], tp: int) -> nn.Module:
    return deepspeed_autotp.inference(model).module


def _planned(model: Any, inputs: Mapping[str, Any], tp: int) -> nn.Module:
    if not getattr(model, "_tp_plan", None):
        raise LookupError("the model has no tp_plan")
    return theirs(model, inputs, tp)


WAYS: dict[str, Way] = {
    "autotp": lambda model, inputs, tp: autotp.compile(model, tp, example_inputs=dict(inputs)),
    "DeepSpeed AutoTP": _deepspeed,
    "tp_plan": _planned,
}


def run() -> dict[str, Any]:
    """Return by way, architecture and degree what was found."""
    out: dict[str, Any] = {way: {} for way in WAYS}
    for way in WAYS:
        for name in TWELVE:
            out[way][name] = {}
            for tp in DEGREES:
                found, why = isolate.run(_launch, way, name, tp, limit=LIMIT, parent=True)
                out[way][name][str(tp)] = found.get("found") or {"why": why}
    return out


def _launch(way: str, name: str, tp: int, send: Send) -> None:
    try:
        found = on_ranks(functools.partial(one, way, name, tp), tp)
        send({"found": max(found, key=lambda rank: "why" in rank)})
    except Exception as error:
        send({"found": {"why": reason(error).splitlines()[-1]}})


def one(way: str, name: str, tp: int) -> dict[str, Any]:
    """Return how far the first output is off the whole model's, and the share of the numbers that a rank holds."""
    model: Any = build(next(a for a in architectures() if a.name == name))
    inputs = example(model)
    with torch.no_grad():
        wanted = _first(model(**inputs))
        numbers = sum(p.numel() for p in model.parameters())
        try:
            module: Any = WAYS[way](model, inputs, tp)
            found = _first(module(**inputs))
        except Exception as error:
            return {"why": reason(error)}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
    held = max(_everyone(held))
    off = float((found - wanted).abs().max() / wanted.abs().max()) if found.shape == wanted.shape else float("inf")
    return {"off": off, "held": held / numbers}


def _everyone(value: int) -> list[int]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _first(output: Any) -> Tensor:
    found = output[0]
    return found.full_tensor() if isinstance(found, DTensor) else found


def page(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Say for each architecture what a rank holds, or why it is not run."""
    rows = []
    for name in TWELVE:
        cells = [_cell(found[way].get(name, {}).get(str(tp), {})) for way in WAYS for tp in DEGREES]
        rows.append([name, *cells])
    counts = [sum(not cell[0].isalpha() for cell in column) for column in list(zip(*rows, strict=True))[1:]]
    rows.append(["run and split", *(f"{count} of {len(TWELVE)}" for count in counts)])
    head = ["an architecture, small", *(f"{way}, tp={tp}" for way in WAYS for tp in DEGREES)]
    return f"""\
Twelve architectures with eight heads and four of keys and values, outputs beside the whole model's within {CLOSE:.0e}:
the share of its numbers that the fullest rank holds, `wrong` where outputs differ, `whole` where nothing is split, `no`
where it is refused or fails. Megatron-Core has model classes of its own, and torch's styles are written for each model.

{table(head, rows)}"""


def _cell(found: Mapping[str, Any]) -> str:
    if "off" not in found:
        return "no"
    if not found["off"] <= CLOSE:
        return "wrong"
    return "whole" if found["held"] > 0.99 else f"{found['held']:.2f}"
