"""Continuous batching of one architecture, unsharded and on gloo ranks: the same tokens, and nearly the same scores.

One process builds the model and answers twelve requests by transformers' own engine, and each by `generate()`; the
ranks are forked from it.
"""

from __future__ import annotations

import logging
import os
import resource
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

import autotp
from benchmarks.helpers.build import Architecture
from benchmarks.helpers.isolate import Record, Send
from benchmarks.helpers.measure import reason

from .captured_once import captured_once
from .forked import forked
from .generated import EXACT, SECONDS, doubled, in_float64
from .prompts import planned_for, prompts

LENGTHS, ALIKE, SHARED, NEW = (1, 2, 5, 7, 3, 9, 4, 6), 4, 12, 5
FIRST, LAST = 3, 90  # tokens of prompts


def requests() -> list[list[int]]:
    """Twelve prompts of unlike lengths, of which four begin alike for three pages."""
    draw = torch.Generator().manual_seed(1)
    alike, *others = [torch.randint(FIRST, LAST, (n,), generator=draw).tolist() for n in (SHARED, *LENGTHS)]
    return others + [[*alike, FIRST + n] for n in range(ALIKE)]


def options() -> dict[str, Any]:
    """Batches of few tokens, and a pool for half of the requests: they come and go."""
    config = ContinuousBatchingConfig(page_size=4, num_blocks=30, max_batch_tokens=24, seed=3)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return {"continuous_batching_config": config, "generation_config": generation}


def answers(model: Any, **more: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens of each request, and the scores of every batch.

    Args:
        model: sharded or not. more: arguments of `generate_batch` that differ from `options()`.
    """
    scores: list[torch.Tensor] = []
    sample = ModelRunner._sample

    def kept(self: Any, values: torch.Tensor, ids: Any) -> None:
        scores.append(values.clone())
        sample(self, values, ids)

    with patch.object(ModelRunner, "_sample", kept):
        results = model.generate_batch(requests(), **(options() | more))
    if len(results) < len(requests()) or any(x.error for x in results.values()):
        errors = [x.error for x in results.values() if x.error]
        raise RuntimeError(errors[0] if errors else "fewer results than requests")
    return [x.generated_tokens for x in results.values()], scores


def batched(architecture: Architecture, degrees: Sequence[int], send: Send) -> None:
    """All ranks at each of the degrees answer what the whole model answers.

    Args:
        architecture: what to build. degrees: numbers of ranks.
        send: takes {"own": why the engine does not serve the model itself, "tp": {degree: {"ok", "why", "gap",
            "programs"}}}, in parts.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS["capture"], resource.RLIM_INFINITY))
    with doubled(), torch.no_grad():
        try:
            model = in_float64(architecture)
            inputs = prompts(model)
            model.generation_config.eos_token_id = None  # all answers are as long
            alone = [_alone(model, prompt) for prompt in requests()]
        except Exception as error:
            return send({"own": reason(error)})
        try:
            same = answers(model)[0] == [own for own, _ in alone]
            send({"engine": "" if same else "other tokens than generate()"})
        except Exception as error:
            send({"engine": reason(error)})
        with captured_once():
            for tp in degrees:
                with tempfile.TemporaryDirectory() as folder:
                    each = forked(_rank, [(rank, tp, folder, model, inputs, alone) for rank in range(tp)])
                lost = {"ok": False, "why": "nothing was sent"}
                found = [record.get("result") or {**lost, **({"why": why} if why else {})} for record, why in each]
                send({"tp": {str(tp): next((x for x in found if not x["ok"]), found[0])}})
    return None


def _alone(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """What the model generates from one prompt: tokens, and the logits of each."""
    ids = torch.tensor([prompt])
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    more: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    results = model.generate(ids, attention_mask=torch.ones_like(ids), **given, **more)
    return results.sequences[0, len(prompt) :].tolist(), torch.cat(results.logits)


def _rank(rank: int, tp: int, folder: str, model: Any, inputs: Record, alone: Any, send: Send) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS["rank"], resource.RLIM_INFINITY))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: Any = dist.FileStore(f"{folder}/store", tp)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=timedelta(minutes=10))
    try:
        sharded: Any = autotp.compile(model, tp, example_inputs=planned_for(model, inputs), check_capture=False)
        before = sharded._programs_made.total
        tokens, scores = answers(sharded)
    except Exception as error:
        return send({"result": {"ok": False, "why": reason(error)}})
    why = "" if tokens == [own for own, _ in alone] else "other tokens than generate()"
    gap = max(_gap(own, scores) for _, own in alone)
    if gap > EXACT:
        why = why or f"logits are off by {gap:.1e} of the largest"
    programs = sharded._programs_made.total - before
    heads = sharded._carriers.cut("past_key_values.layers.0.keys")
    split = "whole" if heads is None else f"{heads.mine} of {heads.length} along {heads.dim}"
    return send({"result": {"ok": not why, "why": why, "gap": gap, "programs": programs, "heads": split}})


def _gap(wanted: torch.Tensor, scores: list[torch.Tensor]) -> float:
    """The largest difference of a token's logits from the nearest row of any batch, as a part of the largest logit."""
    rows = torch.cat([batch.flatten(0, -2) for batch in scores])
    nearest = [float((rows - own).abs().max(-1).values.min()) for own in wanted]
    return max(nearest) / float(wanted.abs().max().clamp(min=1e-30))
