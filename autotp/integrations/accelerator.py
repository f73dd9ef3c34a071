"""accelerate with a sharded module: its wrapping, distribution of batches, gathering and saving are adapted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import gather, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from autotp.comm.lockstep import meet_everywhere
from autotp.compat import tree_leaves
from autotp.errors import InputError
from autotp.runtime import checkpoint
from autotp.runtime.checkpoint.optimizers import updated_by
from autotp.runtime.interop.ownership import LOADED
from autotp.runtime.module import ShardedModule

HOW = "Compile it over all ranks, with tp ranks that follow each other: autotp.compile(model, tp=..., dp=...)."
DP = (
    "The module has dp={}, by which transformers' Trainer would multiply its loss: ShardedParallelism is for tp alone. "
    "Take ShardedTrainer or ShardedAccelerator, both of autotp.integrations."
)


def sizes_of(model: Any) -> tuple[int, int]:
    """Return the number of ranks that share a batch, those of tp and of cp, and the degree of data parallelism.

    Raises:
        InputError: it is no sharded module, one that is not sharded before its first call, or one in stages.
    """
    if not isinstance(model, ShardedModule):
        raise InputError(
            f"{type(model).__name__} is no sharded module: give what autotp.compile(model, ...) returned, itself and "
            "not inside another module. One without autotp goes to the library's own class."
        )
    shards, pipeline = model._shards, model._source.pipeline
    if pipeline is not None:
        raise InputError(
            "The module is in stages: accelerate and transformers' Trainer call a module and its backward, in which no "
            "stages overlap, and clip by one rank's norm. Write the loop with pipe.step and pipe.clip_grad_norm_."
        )
    return shards.tp * shards.axis.cp, shards.axis.dp


def each_once(values: Any, tp: int, dp: int) -> Any:
    """Gather values once for each tp group. A collective call where there are several.

    Args:
        values: tensors with a first dimension of rows, in containers or not; or a list of other objects.
        tp, dp: the degrees.
    """
    if dp == 1:
        return values
    meet_everywhere("gather of accelerate")
    try:
        return recursively_apply(lambda rows: _blocks(gather(rows), tp), values, error_on_other_type=True)
    except TypeError:  # not tensors alone
        everyone: list[Any] = [None] * (tp * dp)
        dist.all_gather_object(everyone, values)
        return [*chain.from_iterable(everyone[::tp])]


def _blocks(gathered: Any, tp: int) -> Tensor:
    """Return, of rows that were gathered from all ranks, those of the first rank of each tp group."""
    blocks = gathered.unflatten(0, (-1, tp, gathered.shape[0] // dist.get_world_size()))
    return blocks[:, 0].flatten(0, 1)


class GroupAccelerator(Accelerator):
    """accelerate's `Accelerator` where the ranks of a tp group do the same; each that is given a `Parallelism` is one.

    The module is not wrapped; the ranks of a tp group get the same batches; `gather_for_metrics` has each row once; a
    schedule takes one step for each step of the optimizer; `save_state` writes of the module and its optimizer what
    each rank holds, and `load_state` reads that at any number of ranks.
    """

    @property
    def _degrees(self) -> tuple[int, int]:
        config: Any = self.parallelism_config
        return config.tp_size, config.dp_shard_size

    # ---- what is prepared ------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare as accelerate does; a sharded module gets mixed precision, and is neither wrapped nor moved."""
        if not isinstance(model, ShardedModule):
            return super().prepare_model(model, device_placement, evaluation_mode)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def _prepare_tp(self, *args: Any) -> Any:
        """Do nothing: that would find parameters by their memory, and a rank's part of a small one may be empty."""
        return args

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare as accelerate does, which takes as many steps at once as there are processes: here one."""
        prepared: Any = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    # ---- what is gathered ------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Gather as accelerate does, after a turn in which a rank that is elsewhere, or has ended, is named."""
        meet_everywhere("gather of accelerate")
        return super().gather(tensor)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce as accelerate does, after such a turn."""
        meet_everywhere("reduce of accelerate")
        return super().reduce(tensor, *args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Wait as accelerate does, after such a turn."""
        meet_everywhere("barrier of accelerate")
        super().wait_for_everyone()

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the rows of all batches, each once and without those that fill up the last batch; of objects, lists.

        Args:
            input_data, use_gather_object: see `accelerate.Accelerator.gather_for_metrics`.
        """
        config: Any = self.parallelism_config
        if config.sequences_in_parts and any(isinstance(x, Tensor) and x.ndim > 1 for x in tree_leaves(input_data)):
            raise InputError(
                "gather_for_metrics: over cp a rank has its part of each sequence, in its own order. "
                "Gather one number for each row, such as its loss; with Trainer set prediction_loss_only=True."
            )
        rows, remainder = each_once(input_data, *self._degrees), self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder <= 0:
            return rows
        return rows[:remainder] if isinstance(rows, list) else recursively_apply(lambda rows: rows[:remainder], rows)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole tensors under the original's names. A collective call."""
        if isinstance(model, ShardedModule):
            return model.full_state_dict(live=True)
        return super().get_state_dict(model, unwrap=unwrap)

    # ---- what is saved ---------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Save as accelerate does, with each rank's part of the module in `sharded_model_0`. A collective call."""
        with self._hidden(), self.register_save_state_pre_hook(self._save_sharded):
            return super().save_state(output_dir, **kwargs)

    def load_state(self, input_dir: str | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Load what `save_state` wrote, at any number of ranks. A collective call."""
        with self._hidden(), self.register_load_state_pre_hook(self._load_sharded):
            super().load_state(input_dir, **kwargs)

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hide sharded modules and their optimizers from accelerate within this context: the hooks save those."""
        models, optimizers = self._models, self._optimizers
        self._sharded = [m for m in models if isinstance(m, ShardedModule)]
        ids = {id(p) for m in self._sharded for p in m.parameters()}
        self._over_them = [o for o in optimizers if not ids.isdisjoint(map(id, updated_by(o)))]
        self._models = [m for m in models if not isinstance(m, ShardedModule)]
        self._optimizers = [o for o in optimizers if o not in self._over_them]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _places(self, folder: str) -> Iterator[tuple[Any, Path, Optimizer | None]]:
        """Yield each sharded module, the folder of it or of an optimizer of it, and that optimizer."""
        for i, model in enumerate(self._sharded):
            yield model, Path(folder) / f"sharded_model_{i}", None
        for i, optimizer in enumerate(self._over_them):
            first = id(next(iter(updated_by(optimizer))))
            owner = next(m for m in self._sharded if first in map(id, m.parameters()))
            yield owner, Path(folder) / f"sharded_optimizer_{i}", getattr(optimizer, "optimizer", optimizer)

    def _save_sharded(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        for model, place, optimizer in self._places(folder):
            checkpoint.save(model._shards, place, optimizer=optimizer, weights=optimizer is None)

    def _load_sharded(self, models: list[nn.Module], folder: str) -> None:
        for model, place, optimizer in self._places(folder):
            checkpoint.load(model._shards, place, optimizer=optimizer, weights=optimizer is None)


class ShardedAccelerator(GroupAccelerator):
    """accelerate's `Accelerator` for a sharded module: used like that one, also with dp.

    It does what `GroupAccelerator` says, and `gather` too has each row once.

    Args:
        model: the sharded module, over all ranks of the process group.
        kwargs: those of accelerate; `parallelism_config` is made here, and `cpu` follows the module.

    Raises:
        InputError: `model` is no sharded module, or not over all ranks.
    """

    def __init__(self, model: ShardedModule, **kwargs: Any) -> None:
        if "parallelism_config" in kwargs:
            raise InputError("parallelism_config=: ShardedAccelerator makes it from the sharded module. Leave it out.")
        config = Parallelism(model)
        kwargs.setdefault("cpu", model._shards.device.type == "cpu")
        super().__init__(parallelism_config=config, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Return the values of all ranks that have batches of their own; without dp the rank's own."""
        return each_once(tensor, *self._degrees)


class Parallelism(ParallelismConfig):
    """Ranks that share a sharded module's batches, for accelerate, on every device.

    An `Accelerator` that it is given to is a `GroupAccelerator` from then on.

    Args:
        model: the sharded module.

    Raises:
        InputError: it is none, or its ranks are not all there are in the order in which accelerate counts them.
    """

    def __init__(self, model: ShardedModule) -> None:
        tp, dp = sizes_of(model)
        super().__init__(tp_size=tp, dp_shard_size=dp)
        self.sequences_in_parts = model._shards.axis.cp > 1
        ranks, world, here = model._shards.ranks, 1, 0
        if ranks.mesh is not None:
            world, here = dist.get_world_size(), dist.get_rank()
        place = divmod(here, tp)
        module_place = ranks.along("dp").rank, ranks.along("cp").rank * ranks.tp + ranks.rank
        if world != tp * dp or place != module_place:
            raise InputError(
                f"accelerate and transformers' Trainer deal out batches to all {world} ranks, and this sharded module "
                f"is at place {module_place} of {dp} x {tp} on rank {here}. {HOW}"
            )
        vars(model)[LOADED] = True  # a trainer that is told of the ranks neither moves nor wraps it, and saves on all

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh of the module's ranks; None of a single one."""
        if self.device_mesh is None and device_type is not None and self.total_size > 1:
            names = {"dp_shard": self.dp_shard_size, "tp": self.tp_size}
            dims = {name: int(size or 1) for name, size in names.items() if size != 1}
            self.device_mesh = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        return self.device_mesh

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mesh, which is of these processes: a trainer pickles its arguments with this in them."""
        return {name: value for name, value in vars(self).items() if name != "device_mesh"}

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Check an `Accelerator` that is made with this.

        accelerate's own would refuse the CPU here: it allows meshes on accelerators alone.

        Raises:
            InputError: accelerate counts other processes than the module has ranks, and would scale losses by that.
        """
        if self.total_size != accelerator.num_processes:
            raise InputError(
                f"accelerate counts {accelerator.num_processes} processes, and the sharded module has "
                f"{self.total_size} ranks. It reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: start "
                "with torchrun, or set them before anything of accelerate or transformers' trainer is made."
            )
        kind = type(accelerator)
        if not issubclass(kind, GroupAccelerator):
            accelerator.__class__ = (
                GroupAccelerator if kind is Accelerator else type(kind.__name__, (GroupAccelerator, kind), {})
            )


class ShardedParallelism(Parallelism):
    """`parallelism_config=` of accelerate's `Accelerator` and transformers' `TrainingArguments` for a sharded module.

    Args:
        model: the sharded module, over all ranks of the process group, without dp.

    Raises:
        InputError: it is none, or its ranks are not all there are, or it has dp.
    """

    def __init__(self, model: ShardedModule) -> None:
        super().__init__(model)
        if self.data_parallel_size > 1:
            raise InputError(DP.format(self.data_parallel_size))
