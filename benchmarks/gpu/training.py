"""A compiled training step of a 1B model: the tp=1 program beside plain `torch.compile`."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autotp
from benchmarks.helpers.isolate import Record
from benchmarks.helpers.llama.megatron import Shape
from benchmarks.helpers.performance import table

from .clock import compiled, in_turns, median_ratio, settle
from .sizes import Scale

TITLE = "A compiled training step"
ASKED = 1.01
PLAIN, OURS = "torch.compile", "autotp, tp=1"
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the loss, before and after a step


def items(scale: Scale) -> dict[str, Callable[[], Record]]:
    """What is measured, by name."""
    return {"1B": functools.partial(trained, scale)}


def config_of(shape: Shape) -> Any:
    """transformers' config of a Llama."""
    return transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.wide, vocab_size=shape.vocabulary, use_cache=False,
        max_position_embeddings=8192,
    )  # fmt: skip


def trained(scale: Scale) -> Record:
    """Seconds of a step: forward, loss, backward, AdamW."""
    models = [_model(scale) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(scale.trained.vocabulary, (scale.examples, scale.length), device=scale.device)
    inputs = {"input_ids": ids, "labels": ids}
    plain: Any = compiled(models[0], scale.backend, whole=False)
    ours: Any = autotp.compile(models[1], 1, example_inputs=inputs, backend=scale.backend, check_capture=False)
    steps, losses, first = {}, {}, {}
    for name, module, parameters in ((PLAIN, plain, models[0].parameters()), (OURS, ours, ours.parameters())):
        steps[name] = functools.partial(step, module, _optimizer(parameters, scale.device), inputs)
        began = time.perf_counter()
        losses[name] = [float(steps[name]()) for _ in range(2)]
        settle(scale.device)
        first[name] = time.perf_counter() - began
    off = max(abs(a - b) / abs(b) for a, b in zip(losses[OURS], losses[PLAIN], strict=True))
    if not off <= CLOSE[scale.dtype]:
        raise RuntimeError(f"losses are {off:.1e} apart: {losses}")
    times = in_turns(steps, scale.device, scale.rounds)
    return {
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "ratio": median_ratio(times[OURS], times[PLAIN]),
        "first": first, "off": off, "fired": list(ours.plan.fired),
    }  # fmt: skip


def _model(scale: Scale) -> nn.Module:
    with torch.device(scale.device):
        model: Any = transformers.LlamaForCausalLM(config_of(scale.trained))
        return model.to(scale.dtype)


def _optimizer(parameters: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-4, fused=device == "cuda")


def step(module: Any, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Tensor]) -> Tensor:
    """One step of training; the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    loss = module(**inputs).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def section(results: Mapping[str, Record]) -> str:
    """A table of what was found."""
    head = [
        "",
        f"{PLAIN}, ms",
        f"{OURS}, ms",
        f"ratio, asked {ASKED}",
        f"{PLAIN}, first steps, s",
        f"{OURS}, first steps, s",
    ]
    rows = []
    for name, r in results.items():
        told = f"{r['ratio']:.3f}{' missed' * (r['ratio'] > ASKED)}"
        ms, first = ([f"{k * r[what][n]:.1f}" for n in (PLAIN, OURS)] for what, k in (("seconds", 1e3), ("first", 1.0)))
        rows.append([name, *ms, told, *first])
    return f"Forward, loss, backward and AdamW of a Llama of 1B parameters.\n\n{table(head, rows)}"
