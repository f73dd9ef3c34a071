"""accelerate with a sharded module: what it wraps, deals out, gathers and saves, as that needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from autotp.errors import InputError
from autotp.runtime import checkpoint
from autotp.runtime.module import ShardedModule

from .deal import Parallelism, each_once, sizes_of


class ShardedAccelerator(Accelerator):
    """accelerate's `Accelerator` for a sharded module: used like that one.

    The module is not wrapped; the ranks of a tp group get the same batches; `gather` counts each row once; a schedule
    takes one step for each step of the optimizer; `save_state` writes of the module and its optimizer what each rank
    holds, and `load_state` reads that at any number of ranks.

    Args:
        model: the sharded module, over all ranks of the process group.
        kwargs: those of accelerate; `parallelism_config` is made here, and `cpu` follows the module.

    Raises:
        InputError: `model` is no sharded module, or not over all ranks.
    """

    def __init__(self, model: ShardedModule, **kwargs: Any) -> None:
        if "parallelism_config" in kwargs:
            raise InputError("parallelism_config=: ShardedAccelerator makes it from the sharded module. Leave it out.")
        self._tp, self._dp = sizes_of(model)
        kwargs.setdefault("cpu", model._shards.device.type == "cpu")
        super().__init__(parallelism_config=Parallelism(model), **kwargs)
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    # ---- what is prepared ------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's; a sharded module gets mixed precision, and is neither wrapped nor moved."""
        if not isinstance(model, ShardedModule):
            return super().prepare_model(model, device_placement, evaluation_mode)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _prepare_tp(self, *args: Any) -> Any:
        """Nothing: that would find parameters by their memory, and a rank's part of a small one may be empty."""
        return args

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As accelerate's, which takes as many steps at once as there are processes: here one."""
        prepared: Any = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    # ---- what is gathered ------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """The values of all ranks that have batches of their own; without dp the rank's own."""
        return tensor if self._dp == 1 else each_once(super().gather(tensor), self._tp)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors under the original's names. A collective call."""
        if isinstance(model, ShardedModule):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap=unwrap)

    # ---- what is saved ---------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As accelerate's, with what each rank holds of the module in `sharded_model_0`. A collective call."""
        with self._apart():
            return super().save_state(output_dir, **kwargs)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Load what `save_state` wrote, at any number of ranks. A collective call."""
        with self._apart():
            super().load_state(input_dir, **kwargs)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Within this context accelerate sees neither sharded modules nor their optimizers: the hooks save those."""
        models, optimizers = self._models, self._optimizers
        self._sharded = [m for m in models if isinstance(m, ShardedModule)]
        held = {id(p) for m in self._sharded for p in m.parameters()}
        self._over_them = [o for o in optimizers if any(id(p) in held for p in _parameters(o))]
        self._models = [m for m in models if not isinstance(m, ShardedModule)]
        self._optimizers = [o for o in optimizers if o not in self._over_them]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _places(self, folder: str) -> Iterator[tuple[Any, Path, Optimizer | None]]:
        """Sharded module, where it or an optimizer of it is kept, and that optimizer."""
        for i, model in enumerate(self._sharded):
            yield model, Path(folder) / f"sharded_model_{i}", None
        for i, optimizer in enumerate(self._over_them):
            first = id(next(iter(_parameters(optimizer))))
            owner = next(m for m in self._sharded if any(id(p) == first for p in m.parameters()))
            yield owner, Path(folder) / f"sharded_optimizer_{i}", getattr(optimizer, "optimizer", optimizer)

    def _save_sharded(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        for model, place, optimizer in self._places(folder):
            checkpoint.save(model._shards, place, optimizer=optimizer, weights=optimizer is None)

    def _load_sharded(self, models: list[nn.Module], folder: str) -> None:
        for model, place, optimizer in self._places(folder):
            checkpoint.load(model._shards, place, optimizer=optimizer, weights=optimizer is None)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
