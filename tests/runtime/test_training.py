"""Trained sharded, a model goes through the losses and gradient norms of one device, step by step.

Tiny models and gentle learning rates: higher ones blow rounding up, and then two unsharded runs that only sum in
another order part as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp
from autotp.comm import conversions
from autotp.comm.conversions import ConversionKind
from autotp.ir.specs import INVARIANT, REPLICATED
from tests.helpers.compare import mesh_of
from tests.helpers.models import inputs_of
from tests.helpers.modules.trained import model_of
from tests.helpers.processes.pool import WorkerError

BATCH, LENGTH, RATE, WARM_UP = 4, 24, 3e-4, 10
STEPS = {torch.float32: 100, torch.float64: 20}
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-10}
Curve = list[tuple[float, float]]  # loss and gradient norm of every step


@cache
def text() -> Tensor:
    """Real text: a source of the standard library as bytes."""
    return torch.frombuffer(bytearray(Path(random.__file__).read_bytes()), dtype=torch.uint8).long()


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Other tokens at every step, and what to predict from them; the last tokens of one sequence do not count."""
    generator, made = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        starts = torch.randint(len(text()) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([text()[s : s + LENGTH + 1] for s in starts])
        labels = rows[:, 1:].clone()
        labels[0, -5:] = -100
        made.append({"input_ids": rows[:, :-1], "labels": labels})
    return made


def train(model: Any, steps: int) -> Curve:
    """AdamW with warm-up and clipping; the loss is computed in float64, outside of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    curve = []
    for batch in batches(steps):
        logits = model(input_ids=batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append((loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()))
    return curve


@cache
def one_device(name: str, dtype: torch.dtype) -> Curve:
    """The run of the model itself, which all degrees are held against."""
    return train(model_of(name, dtype), STEPS[dtype])


def on_ranks(rank: int, world: int, group: Any, name: str, dtype: torch.dtype, steps: int | None = None) -> Curve:
    model = model_of(name, dtype)
    return train(autotp.compile(model, example_inputs=inputs_of(model), mesh=mesh_of(group)), steps or STEPS[dtype])


def apart(found: Curve, wanted: Curve) -> float:
    """Largest relative difference of a loss or gradient norm."""
    assert len(found) == len(wanted)
    pairs = ((a, b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True))
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize("dtype", STEPS, ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "tp"), [("llama", 1), *((name, tp) for name in ("llama", "gpt2", "bert") for tp in (2, 4))]
)
def test_losses_and_gradient_norms_are_those_of_one_device(pool, name, tp, dtype):
    wanted = one_device(name, dtype)
    for found in pool.run(on_ranks, name, dtype, world=tp):
        assert apart(found, wanted) <= CLOSE[dtype], (tp, apart(found, wanted))


def test_it_learns():
    losses = [loss for loss, _ in one_device("llama", torch.float32)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def without_f(rank: int, world: int, group: Any) -> Curve:
    """f is nothing forward; here it is nothing backward either."""
    own: Callable[..., Any] = conversions._Real.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, *[None] * 7) if ctx.conversion[:2] == (INVARIANT, REPLICATED) else own(ctx, grad)

    with patch.object(conversions._Real, "backward", staticmethod(backward)):
        return on_ranks(rank, world, group, "llama", torch.float64, 1)


def with_two_biases(rank: int, world: int, group: Any) -> Curve:
    """Every rank adds the bias of a row-parallel product, not one of them."""
    with patch.dict(conversions.KINDS, {("I", "P"): ConversionKind("keep_first_i")}):
        return on_ranks(rank, world, group, "gpt2", torch.float64, 1)


def test_a_wrong_conversion_is_noticed(pool):
    for found in pool.run(with_two_biases, world=2):
        assert apart(found, one_device("gpt2", torch.float64)[:1]) > 1e-3
    with pytest.raises(WorkerError, match="do not agree on the gradients of the step"):  # of weights that all hold
        pool.run(without_f, world=2)
