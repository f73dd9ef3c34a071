"""DeepSpeed's AutoTP, for training and for inference, over ranks of a CPU."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn


def say_rank() -> None:
    """Say in the environment which rank this is, as a launcher does."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # which nobody asks, for the group is there


def deepspeed() -> Any:
    """Return the package, told that this is a CPU and which rank this is."""
    say_rank()
    os.environ["DS_ACCELERATOR"] = "cpu"
    found = importlib.import_module("deepspeed")
    found.utils.logger.setLevel("ERROR")
    return found


def training(model: nn.Module) -> Any:
    """Return the engine of a model of transformers; gradients are not clipped, as by default they are at 1."""
    package, tp = deepspeed(), dist.get_world_size()
    model = package.tp_model_init(model, tp_size=tp, dtype=torch.float32)
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": tp}, "gradient_clipping": 0.0}
    config |= {"zero_optimization": {"stage": 0}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    return package.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def inference(model: nn.Module) -> Any:
    """Return the engine of a model of transformers, with its own modules."""
    options = {"tensor_parallel": {"tp_size": dist.get_world_size()}, "replace_with_kernel_inject": False}
    return deepspeed().init_inference(model, dtype=torch.float32, **options)


class OverGloo(nn.Module):
    """A module of DeepSpeed's whose sums go through the process group, and not through its operator for one host."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose sums ask for each which instructions the processor has."""
        backend = importlib.import_module("deepspeed.comm.comm").cdb
        with mock.patch.object(backend, "shm_vector_kernel_level", 0):
            return self.inner(*args, **kwargs)
