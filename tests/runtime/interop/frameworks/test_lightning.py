"""Lightning's `strategy="ddp"` would wrap the parent of a sharded module: it says at once what to use instead."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import nn

import autotp
from tests.helpers.compare import mesh_of
from tests.helpers.errors import error_of


def strategies(rank: int, world: int, group: Any) -> tuple[str, str, float]:
    """What Lightning's strategy says to a module that holds a sharded one, where it is about to wrap it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's own imports
        lightning: Any = importlib.import_module("lightning.pytorch")
    module = lightning.LightningModule()
    module.model = autotp.compile(nn.Linear(8, 8), example_inputs=torch.randn(4, 8), mesh=mesh_of(group))
    strategy = lightning.strategies.DDPStrategy(parallel_devices=[torch.device("cpu")])
    return error_of(lambda: strategy._setup_model(module))


def test_ddp_is_refused_with_what_to_use(pool):
    for kind, text, _ in pool.run(strategies, world=2):
        assert kind == "StateError" and "a sharded module's parameters would be broadcast" in text, text
        assert "ModelParallelStrategy" in text and "configure_model" in text
