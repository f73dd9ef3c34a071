"""What a row of the table of historic bugs is, and where its link leads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .mutants import Mutant

BATCH, LENGTH, WIDTH, HEADS, EXPERTS = 2, 4, 16, 4, 4
SIZE = WIDTH // HEADS
REPOSITORIES = {
    "TGI": "huggingface/text-generation-inference", "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers", "Megatron": "NVIDIA/Megatron-LM", "DeepSpeed": "deepspeedai/DeepSpeed",
    "vllm": "vllm-project/vllm", "diffusers": "huggingface/diffusers", "pytorch": "pytorch/pytorch",
    "autoparallel": "meta-pytorch/autoparallel", "xtuner": "InternLM/xtuner", "TE": "NVIDIA/TransformerEngine",
    "Primus": "AMD-AGI/Primus", "Automodel": "NVIDIA-NeMo/Automodel", "mcore-bridge": "modelscope/mcore-bridge",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge", "ART": "OpenPipe/ART", "gpt-oss": "openai/gpt-oss",
}  # fmt: skip
REFERENCE = re.compile(r"([\w-]+)(#(\d+)| ([0-9a-f]{7})\b)")


def hidden(*shape: int) -> Tensor:
    """A fixed input, of tokens by default."""
    draw = torch.Generator().manual_seed(3)
    return torch.randn(shape or (BATCH, LENGTH, WIDTH), generator=draw).requires_grad_()


@dataclass(frozen=True)
class Row:
    """A bug of another system, and the module that would show it here.

    Attributes:
        number: in the table. where: references, such as "torchtitan#4245". symptom: what was seen.
        module, inputs: the smallest model that has the place, and one call of it.
        mutant: the bug itself, put back into the program of the ranks, in words by `bug`.
        value: pattern of the value that must be named; of the captured graph.
        pins: that make the layers lie as they did there. sequence: sequence parallelism, where the bug needs it.
        degrees: at which the mutant is made. seed: of a plan that is legal and not the cheapest (tests/fuzz/plans.py),
            where that has no such place.
        precision: of large products, as for `autotp.compile`.
    """

    number: int
    where: str
    symptom: str
    module: Callable[[], nn.Module]
    mutant: Mutant
    bug: str
    value: str
    pins: Mapping[str, Any] = field(default_factory=dict)
    sequence: bool | None = None
    inputs: Callable[[], Any] = hidden
    degrees: tuple[int, ...] = (2, 4)
    seed: int | None = None
    precision: Any = None


def linked(where: str) -> str:
    """The references with their pages."""

    def page(found: re.Match[str]) -> str:
        name, text, number, commit = found.groups()
        repository = REPOSITORIES[name]
        path = f"issues/{number}" if number else f"commit/{commit}"
        return f"[{name}{text}](https://github.com/{repository}/{path})"

    return REFERENCE.sub(page, where)
