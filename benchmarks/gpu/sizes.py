"""How large what is measured is: on a GPU, and so small that a CPU runs the same code in a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.helpers.kernel_work import MODELS
from benchmarks.helpers.kernel_work import Sizes as KernelSizes
from benchmarks.helpers.llama.megatron import Shape


@dataclass(frozen=True)
class Scale:
    """Sizes, and how they run.

    Attributes:
        device: "cuda" or "cpu". dtype: of models. backend: of what is compiled.
        rounds: that a median is of.
        tp: ranks, of which one is run.
        kernels: sizes of a rank's kernels by model; dtypes: of each.
        layers: of a stack by model; tokens: of one sequence.
        decoder, prompt: a model that decodes, and tokens before the first that it decodes.
        trained, examples, length: a model that trains, and its batch.
        products: rows, contracting dimension and columns by name.
    """

    device: str
    dtype: torch.dtype
    backend: str
    rounds: int
    tp: int
    kernels: Mapping[str, KernelSizes]
    dtypes: Mapping[str, torch.dtype]
    layers: Mapping[str, Shape]
    tokens: tuple[int, ...]
    decoder: Shape
    prompt: int
    trained: Shape
    examples: int
    length: int
    products: Mapping[str, tuple[int, int, int]]


def products(name: str, shape: Shape, tokens: int, tp: int) -> dict[str, tuple[int, int, int]]:
    """The products of a rank's layer: (rows, contracting dimension, columns) by name."""
    narrow = (shape.heads + 2 * shape.kv_heads) * shape.width // tp
    sizes = {
        "q, k, v": (tokens, shape.hidden, narrow),
        "attention's output": (tokens, shape.hidden // tp, shape.hidden),
        "gate and up": (tokens, shape.hidden, 2 * shape.wide // tp),
        "down": (tokens, shape.wide // tp, shape.hidden),
    }
    return {f"{name}, {what}": size for what, size in sizes.items()}


TP, TOKENS = 8, (1024, 8192)
SHAPES = {  # of the published configs
    "8B": Shape(hidden=4096, layers=2, heads=32, kv_heads=8, wide=14336, vocabulary=128256),
    "70B": Shape(hidden=8192, layers=2, heads=64, kv_heads=8, wide=28672, vocabulary=128256),
}
FULL = Scale(
    "cuda", torch.bfloat16, "inductor", 20, TP,
    MODELS, {"fp32": torch.float32, "bf16": torch.bfloat16},
    SHAPES, TOKENS,
    Shape(hidden=4096, layers=16, heads=32, kv_heads=8, wide=14336, vocabulary=128256), 1024,
    Shape(hidden=2048, layers=16, heads=32, kv_heads=8, wide=8192, vocabulary=128256), 2, 2048,
    {k: v for name, shape in SHAPES.items() for k, v in products(name, shape, TOKENS[-1], TP).items()},
)  # fmt: skip
_SMALL = Shape(hidden=32, layers=1, heads=4, kv_heads=2, wide=48, vocabulary=64)
TINY = Scale(
    "cpu", torch.float32, "eager", 1, 2,
    {"8B": KernelSizes(16, 32, 24, 40)}, {"fp32": torch.float32},
    {"8B": _SMALL}, (8,),
    _SMALL, 8,
    _SMALL, 2, 8,
    products("8B", Shape(hidden=128, layers=1, heads=8, kv_heads=2, wide=256, vocabulary=64), 16, 2),
)  # fmt: skip
SCALES = {"cuda": FULL, "cpu": TINY}
