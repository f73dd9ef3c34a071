"""Gradients of parameters added up in a wider type than the parameters have: over tp, over dp, over micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autotp.comm import conversions
from autotp.errors import InputError
from autotp.ir.marks import mark

WIDE = {"float32": torch.float32, "float64": torch.float64}


def read_reduce_dtype(request: Any) -> torch.dtype | None:
    """The type that a public function's argument asks for, checked.

    Raises:
        InputError: it is none that gradients are added up in.
    """
    dtype: Any = WIDE.get(request, request) if isinstance(request, str) else request
    if dtype is not None and dtype not in WIDE.values():
        raise InputError(
            f"reduce_dtype={request!r}: give torch.float32 or torch.float64, or None for the parameters' own."
        )
    return dtype


def narrower(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers of a tensor have less precision than this type."""
    return x.is_floating_point() and x.dtype.itemsize < dtype.itemsize


def reduce_in(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Have the conversions of parameters in one rank's graph add up gradients in this type."""
    for node in graph.nodes:
        source: Any = node.args[0] if mark(node).conversion is not None else None
        val = source.meta.get("val") if isinstance(source, fx.Node) and source.op == "placeholder" else None
        if node.target in conversions.FUNCTIONS.values() and val is not None and narrower(val, dtype):
            node.kwargs = {**node.kwargs, "reduces": dtype}


def accumulate_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Have a parameter's gradient be of this type, so that those of several backwards are added up in it."""
    if parameter.requires_grad and narrower(parameter, dtype):
        parameter.grad_dtype = dtype
