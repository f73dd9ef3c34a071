"""Models that torchao quantised; without it their tests are skipped."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from autotp import compat


def torchao(name: str = "torchao.quantization") -> Any:
    """A module of torchao, which warns of CUDA libraries that it does not find."""
    level, root = logging.root.level, logging.getLogger("torchao")
    root.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        pytest.skip("torchao is not installed")
    finally:
        logging.root.setLevel(level)


def quantised(model: nn.Module, kind: str = "int8") -> nn.Module:
    """The model, in evaluation mode, after torchao quantised its linear layers.

    Args:
        kind: "int8", "int8 groups", "int8 dynamic", "int4 groups", "int4 dynamic", "float8", "float8 rowwise" or
            "float8 tensorwise"; "dynamic" and the last two are of activations too. Groups have 16 numbers.
    """
    q = torchao()
    groups, int4 = q.PerGroup(16), vars(torch)["int4"]
    if kind in ("float8 rowwise", "float8 tensorwise"):
        return _float8(model.eval(), q.PerRow() if kind == "float8 rowwise" else q.PerTensor())
    config = {
        "int8": lambda: q.Int8WeightOnlyConfig(version=2),
        "int8 groups": lambda: q.Int8WeightOnlyConfig(granularity=groups, version=2),
        "int8 dynamic": lambda: q.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4 groups": lambda: q.IntxWeightOnlyConfig(weight_dtype=int4, granularity=groups),
        "int4 dynamic": lambda: q.Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=groups),
        "float8": q.Float8WeightOnlyConfig,
    }[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q.quantize_(model.eval(), config)
    return model


def _float8(model: nn.Module, granularity: Any) -> nn.Module:
    """By the tensors themselves: torchao's function wants a GPU for these, and torch computes them on the CPU too."""
    kinds = torchao("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    torchs = torchao("torchao.quantization.quantize_.common").KernelPreference.TORCH
    options = {"granularity": granularity, "kernel_preference": torchs}
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        made = kinds.Float8Tensor.from_hp(
            layer.weight.detach(), mm_config=torchao("torchao.float8.inference").Float8MMConfig(),
            act_quant_kwargs=kinds.QuantizeTensorToFloat8Kwargs(**options), **options,
        )  # fmt: skip
        layer.weight = nn.Parameter(made, requires_grad=False)
    return model


def share(model: nn.Module) -> float:
    """Of the bytes of all weights how many are those of quantised ones, with their scales."""
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    return sum(_bytes(t) for t in held if compat.wraps_tensors(t)) / sum(map(_bytes, held))


def _bytes(tensor: Any) -> int:
    if not compat.wraps_tensors(tensor):
        return tensor.numel() * tensor.itemsize
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(getattr(tensor, name)) for name in names)
