"""The objective of a plan, training with an optimizer or inference: weights over the terms of a cost, and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autotp.errors import InputError

from .terms import TERMS, Cost

NAMES = ("training", "prefill", "decode")
STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1}
PLAIN_SUFFIX = "-plain"  # suffix: states in the parameter's own dtype, no fp32 copy of half-precision weights
OPTIMIZERS = (*STATES, *(name + PLAIN_SUFFIX for name in STATES))
FP32 = 4  # bytes


@dataclass(frozen=True)
class Objective:
    """The use that a plan is priced for.

    Attributes:
        name: "training" counts forward and backward; "prefill" a forward alone; "decode" a forward of one new token a
            sequence against a cache as long as the example inputs.
        optimizer: one of `OPTIMIZERS`. Half-precision weights are trained with an fp32 copy and fp32 states (mixed
            precision: Micikevicius et al. 2018), other weights with states in their own dtype. With "-plain" behind its
            name there is no copy and every state has the weight's dtype, as torch.optim does it.
    """

    name: str = "training"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for what, value, choices in (("objective", self.name, NAMES), ("optimizer", self.optimizer, OPTIMIZERS)):
            if value not in choices:
                raise InputError(f"{what}={value!r} is not known; choose one of {', '.join(map(repr, choices))}.")

    @property
    def training(self) -> bool:
        return self.name == "training"

    @property
    def weights(self) -> Mapping[str, float]:
        """Return what each term weighs in the seconds of a step."""
        return _weights(self.name)

    def seconds(self, cost: Cost) -> float:
        """Seconds of a step that this cost comes to."""
        return cost.weighted(self.weights)

    def states(self, itemsize: int) -> int:
        """Bytes of optimizer states for one element of a parameter that takes `itemsize` bytes."""
        count = STATES[self.optimizer.removesuffix(PLAIN_SUFFIX)]
        if itemsize >= FP32 or self.optimizer.endswith(PLAIN_SUFFIX):
            return count * itemsize
        return (count + 1) * FP32

    def budget_bytes(self, parameter_bytes: float, val: Tensor) -> float:
        """Bytes of a part of a parameter with its gradient and states; frozen ones have neither.

        Args:
            parameter_bytes: bytes of the part alone.
            val: the whole parameter, by its dtype and `requires_grad`.
        """
        if not (self.training and trained(val)):
            return parameter_bytes
        return parameter_bytes * (2 + self.states(val.element_size()) / val.element_size())


@cache
def _weights(objective: str) -> dict[str, float]:
    return {name: term.step for name, term in TERMS.items() if term.step and objective in (term.objectives or NAMES)}


def trained(val: Any) -> bool:
    """Return whether a parameter gets a gradient, and with it states of the optimizer."""
    return isinstance(val, Tensor) and val.requires_grad and torch.is_floating_point(val)


TRAINING = Objective()
