"""The activations that kernels apply, and their derivatives: for Triton and for the twins."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import jit, tl

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2}  # what KIND means


@jit
def act(x, KIND: tl.constexpr):
    """The activation of float32 values."""
    if KIND == 0:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 1:  # 0.5 (1 + tanh u) is the sigmoid of 2u
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = x * tl.sigmoid(x)
    return y


@jit
def slope(x, KIND: tl.constexpr):
    """The activation's derivative at float32 values."""
    if KIND == 0:
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 1:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        s = tl.sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    return y


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation by its name in `ACTIVATIONS`."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def act_slope(x: Tensor, activation: str) -> Tensor:
    """The activation's derivative."""
    if activation == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    s = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return s + x * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
