"""Trainings of a small Llama, and steps of a larger one, ordinary and with equal bits, over the ranks there are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autotp
from benchmarks.helpers.interleaved import interleaved
from benchmarks.helpers.llama.megatron import Shape, untouched
from benchmarks.helpers.llama.variants import training_step

SMALL = Shape(hidden=128, layers=2, heads=8, kv_heads=4, wide=256, vocabulary=512)
BATCH, WORDS, LENGTH, VIRTUAL = 4, 32, 256, 8
WAYS: dict[str, dict[str, Any]] = {"ordinary": {}, f"tp_invariant={VIRTUAL}": {"tp_invariant": VIRTUAL}}


def trained(steps: int) -> dict[str, list[float]]:
    """The loss of each step, ordinary and with equal bits, over the ranks that are there."""
    losses: dict[str, list[float]] = {}
    for name, options in WAYS.items():
        data = torch.Generator().manual_seed(1)
        model, ids = untouched(SMALL), torch.randint(SMALL.vocabulary, (BATCH, WORDS), generator=data)
        module: Any = autotp.compile(model, example_inputs=ids, check_capture=False, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        losses[name] = []
        for _ in range(steps):
            ids = torch.randint(SMALL.vocabulary, (BATCH, WORDS + 1), generator=data)
            loss = nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    return losses


def timed(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """This rank's seconds of a step of the larger Llama, each way in turn."""
    shape = Shape()
    model = untouched(shape)
    ids, targets = torch.randint(shape.vocabulary, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    steps = {}
    for name, options in WAYS.items():
        module = autotp.compile(model, example_inputs=ids, check_capture=False, **options)
        steps[name] = training_step(module, ids, targets)
    measured = interleaved(steps, rounds, before=dist.barrier)
    return {name: (times[0], times[1]) for name, times in measured.items()}
