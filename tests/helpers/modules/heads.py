"""A head with its loss, captured and computed node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autotp
from autotp.driver.compile import capture_model
from autotp.ir.graph import Capture
from autotp.proof.run import run

WIDTH, EXAMPLES, CLASSES = 16, 12, 4000


class Head(nn.Module):
    """Scores for every class, and their cross entropy."""

    def __init__(self, classes: int = CLASSES, width: int = WIDTH, **options: Any) -> None:
        super().__init__()
        self.options, self.head = options, nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), target, **self.options)


COLUMNS = {"head.weight": Shard(0), "head:output": Shard(1)}


def captured(model: nn.Module, *inputs: Tensor) -> Capture:
    return capture_model(model, autotp.Inputs(*inputs), torch.device("cpu"))[0]


def values(program: Capture, given: list[Tensor], model: nn.Module) -> Tensor:
    names = dict(model.named_parameters())
    env: dict[Any, Any] = {leaf.node: [v] for leaf, v in zip(program.inputs, given, strict=True)}
    for leaf in program.leaves:
        if not leaf.kind.passed:
            env[leaf.node] = [names[leaf.name] if leaf.kind.trained else program.constants[leaf.name]]
    return run(program, env).outputs[0][0]
