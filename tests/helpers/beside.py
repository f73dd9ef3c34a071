"""A model in float64 beside itself, sharded: both made, run backward, and their parameters compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.models import inputs_of
from tests.helpers.modules.trained import model_of

EXACT = 1e-10  # of gradients in float64


def pair(group: Any, name: str = "gpt2-short", change: Callable[[Any], Any] = lambda m: m) -> tuple[Any, Any, dict]:
    """A model in float64, itself and sharded, and its inputs."""
    model: Any = model_of(name, torch.float64)
    change(model)
    inputs = inputs_of(model)
    return model, autotp.compile(model, example_inputs=inputs, mesh=mesh_of(group)), inputs


def backward(module: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss = module(**inputs).logits.square().mean()
    loss.backward()
    return loss


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def states_differ(sharded: Any, model: nn.Module) -> float:
    """Largest difference of a parameter."""
    state = sharded.full_state_dict()
    return max(float((state[n] - t).abs().max()) for n, t in model.state_dict().items())
