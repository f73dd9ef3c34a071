"""What autotp makes of one architecture: proved or not, shares, collectives per layer, bytes against Megatron's."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Size, nn

import autotp
from autotp.inputs import MAKERS, for_model
from autotp.plans.plan import Plan
from benchmarks.results import clean

from .build import SCALE, Architecture, build, wide
from .hand_count import hand_bytes, layer
from .isolate import Record, Send

RULELESS = re.compile(r"operators without a rule run whole: (.*) \(autotp")  # as a plan's notes say it
TEXT = {"input_ids", "decoder_input_ids"}
ROWS, LENGTH = 4, 64 * SCALE  # tokens that wide models are planned for


def measure(architecture: Architecture, tps: Sequence[int], send: Send) -> None:
    """Verify one architecture at each of `tps`.

    Args:
        architecture: what to build. tps: degrees, one after another.
        send: takes a part of the record as soon as it is known.
    """
    try:
        model = build(architecture)
        inputs = example(model)
    except Exception as error:
        return send({"failed": reason(error)})
    send({"class": type(model).__name__, "inputs": {k: list(v.shape) for k, v in inputs.items()}})
    for tp in tps:
        began = time.process_time()
        found = proved(model, inputs, tp)
        send({"tp": {str(tp): found | {"cpu_seconds": round(time.process_time() - began, 1)}}})
    return None


def widened(architecture: Architecture, tps: Sequence[int], send: Send) -> None:
    """Plan a text model at `SCALE` times the width, at each of `tps`; arguments as `measure` has them."""
    inputs = example(build(architecture))
    for tp in tps if set(inputs) <= TEXT else ():
        send({"wide": {str(tp): planned(architecture, inputs, tp)}})


def example(model: nn.Module) -> dict[str, Any]:
    """autotp's own example inputs, with an image and its placeholders where the model takes both and says how many."""
    made = for_model(model)
    if made is None:
        raise LookupError("the config does not say what the inputs are")
    config: Any = model.config
    token = next((t for k in ("image_token_id", "image_token_index") if isinstance(t := getattr(config, k, 0), int)), 0)
    if not token or set(made.kwargs) != {"input_ids"} or not hasattr(model, "get_image_features"):
        return made.kwargs
    ids = made.kwargs["input_ids"]
    try:
        pixels = MAKERS["pixel_values"](config, torch.Generator().manual_seed(0))
        with torch.no_grad():
            found: Any = model.get_image_features(pixel_values=pixels)  # type: ignore[operator]
            found = getattr(found, "pooler_output", found)
            rows = sum(x.numel() // x.shape[-1] for x in (found if isinstance(found, (list, tuple)) else [found]))
            both = {"input_ids": torch.cat([ids.new_full((len(ids), rows // len(ids)), token), ids], 1)}
            model(**both, pixel_values=pixels)
    except Exception:  # it wants the image in another form: its text alone is run
        return made.kwargs
    return both | {"pixel_values": pixels}


def proved(model: nn.Module, inputs: Mapping[str, Any], tp: int) -> Record:
    """Verdict and figures at one degree."""
    try:
        report = autotp.verify(model, tp, dict(inputs))
    except Exception as error:
        return {"ok": False, "why": reason(error)}
    assert report.plan is not None
    why = None if report.ok else clean(str(report))
    return {"ok": report.ok, "why": why, **figures(report.plan, inputs)}


def planned(architecture: Architecture, inputs: Mapping[str, Any], tp: int) -> Record:
    """Figures of a plan for the wide model and `ROWS` sequences of at most `LENGTH` tokens; nothing is computed."""
    try:
        model = wide(architecture)
        named = (getattr(model.config, name, None) for name in ("max_position_embeddings", "n_positions"))
        length = min([LENGTH, *(most for most in named if isinstance(most, int))])
        long = {k: v.new_zeros(ROWS, length) for k, v in inputs.items()}
        return figures(autotp.plan(model, tp, example_inputs=long), long)
    except Exception as error:
        return {"failed": reason(error)}


def figures(plan: Plan, inputs: Mapping[str, Any]) -> Record:
    """Shares of the fullest rank, collectives per layer, bytes, and the operators that have no rule."""
    inside = {name for block in plan.blocks for name in block.parameters}  # every parameter that is read
    read = [p for p in plan.parameters if p.name in inside]
    held = sum(Size(p.local).numel() for p in read) / max(sum(Size(p.shape).numel() for p in read), 1)
    named = [found.group(1) for note in plan.notes if (found := RULELESS.search(note))]
    ruleless = re.sub(r" \(\d+ times\)", "", named[0]).split(", ") if named else []
    return {
        "parameters": round(held, 4),
        "flops": round(plan.totals.local_flops / max(plan.totals.flops, 1.0), 4),
        "per_layer": per_layer(plan),
        "bytes": round(plan.totals.forward_bytes + plan.totals.backward_bytes),
        "megatron": megatron(plan, inputs),
        "without_rule": [x for x in ruleless if not x.startswith("aten.sym_")],  # these make no tensor
    }


def per_layer(plan: Plan) -> list[float] | None:
    """Collectives forward and backward in repeated layers, over the number of those."""
    count = len({layer(p.name) for p in plan.parameters} - {""})
    inside = [c for c in plan.collectives if layer(c.module if c.block is None else plan.blocks[c.block].module)]
    sides = [sum(c.forward is not None for c in inside), sum(c.backward is not None for c in inside)]
    return [round(n / count, 2) for n in sides] if count else None


def megatron(plan: Plan, inputs: Mapping[str, Any]) -> int | None:
    """Bytes that a rank sends in a step by Megatron's scheme; None for what is not a text model."""
    text = set(inputs) <= TEXT and "input_ids" in inputs
    return (round(hand_bytes(plan)) or None) if text else None


def reason(error: Exception) -> str:
    """An error as one line."""
    return clean(f"{type(error).__name__}: {error}")
