"""`generate()` of one architecture, unsharded and on gloo ranks: tokens must be the same, logits nearly."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autotp

from .build import Architecture, build
from .doubled import doubled
from .isolate import Record, Send
from .measure import example, reason

EXACT = 1e-9  # of the largest logit
CACHES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}


def generated(architecture: Architecture, tokens: int, rank: int, tp: int, folder: str, send: Send) -> None:
    """One of the ranks, which all generate what the whole model generates.

    Args:
        architecture: what to build. tokens: how many to generate.
        rank, tp: this rank among how many. folder: where the ranks find each other.
        send: takes {"own": why the model itself does not}, or {cache: {"ok", "why", "gap", "same", "programs"}}.
    """
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: Any = dist.FileStore(f"{folder}/store", tp)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=timedelta(minutes=3))
    with doubled(), torch.no_grad():
        try:
            model: Any = build(architecture).double()
            if not callable(getattr(model, "generate", None)):
                raise LookupError("its class has no generate()")
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("batched_mm")  # the grouped product knows no float64 on the CPU
            inputs = prompts(model)
            wanted = {name: _run(model, inputs, tokens, more) for name, more in CACHES.items()}
        except Exception as error:
            return send({"own": reason(error)})
        if isinstance(wanted["dynamic"], Exception):
            return send({"own": reason(wanted["dynamic"])})
        try:
            sharded = autotp.compile(model, tp, example_inputs=_whole(model, inputs))
        except Exception as error:
            return send({"dynamic": {"ok": False, "why": reason(error)}})
        for name, own in wanted.items():
            if not isinstance(own, Exception):
                send({name: _compared(sharded, own, _run(sharded, inputs, tokens, CACHES[name]))})
    dist.destroy_process_group()
    return None


def prompts(model: Any) -> dict[str, Any]:
    """Example inputs with the first prompt padded; for the decoder that follows an encoder its own start."""
    found = {k: v for k, v in example(model).items() if not k.startswith("decoder_")}
    ids = found.get("input_ids")
    if ids is None:
        return found
    pad = getattr(model.generation_config, "pad_token_id", None)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    if "pixel_values" not in found:
        ids = ids.masked_fill(mask == 0, 0 if pad is None else pad)
    return {**found, "input_ids": ids, "attention_mask": mask}


def _whole(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is planned for."""
    more = {k: v for k, v in example(model).items() if k.startswith("decoder_")}
    names = set(inputs) - ({"attention_mask"} if "attention_mask" not in _arguments(model) else set())
    return {**{k: inputs[k] for k in names}, **more}


def _arguments(model: Any) -> set[str]:
    code = type(model).forward.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _run(model: Any, inputs: Mapping[str, Any], tokens: int, more: Mapping[str, Any]) -> Any:
    """The results of `generate`, or its error."""
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "num_beams": 1}
    given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    try:
        torch.manual_seed(0)
        return model.generate(**given, **asked, output_logits=True, return_dict_in_generate=True, **more)
    except Exception as error:
        return error


def _compared(sharded: Any, own: Any, got: Any) -> Record:
    if isinstance(got, Exception):
        return {"ok": False, "why": reason(got)}
    same = own.sequences.shape == got.sequences.shape and bool((own.sequences == got.sequences).all())
    pairs = list(zip(own.logits or (), got.logits or (), strict=False))
    gap = max((_gap(a, b) for a, b in pairs), default=0.0)
    ok, programs = same and gap <= EXACT, len(sharded._programs_made)
    why = None if ok else "other tokens" if not same else f"logits are off by {gap:.1e} of the largest"
    return {"ok": ok, "why": why, "gap": gap, "same": same, "programs": programs}


def _gap(wanted: Tensor, got: Tensor) -> float:
    """The largest difference, as a part of the largest logit; suppressed ones are infinite in both."""
    finite = wanted.isfinite()
    if not bool((finite == got.isfinite()).all()):
        return float("inf")
    return float((wanted - got)[finite].abs().max() / wanted[finite].abs().max().clamp(min=1e-30))
