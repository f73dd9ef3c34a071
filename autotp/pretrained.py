"""A sharded module from a folder of the transformers library: no rank ever holds the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autotp.comm.ranks import Ranks, together
from autotp.driver.configs import first_line, from_config
from autotp.runtime.lazy import LazyModule
from autotp.runtime.module import ShardedModule

from .api import compile as compile_model
from .errors import InputError

CONFIG, GENERATION = "config.json", "generation_config.json"


def from_pretrained(
    folder: str | os.PathLike[str],
    tp: int | Literal["auto"] | None = None,
    *,
    dtype: torch.dtype | None = None,
    example_inputs: Any = None,
    mesh: DeviceMesh | None = None,
    prepare: Callable[[nn.Module], Any] | None = None,
    trusted: bool = False,
    **options: Any,
) -> ShardedModule:
    """Shard a model that `save_pretrained` of transformers wrote. Run it by torchrun, alike on all ranks.

    The model of the class that the folder's config names is built on the meta device, compiled by `autotp.compile`, and
    every rank reads its own slices of the files (`ShardedModule.load_checkpoint`). It is in eval mode, and has the
    folder's generation config.

    Args:
        folder: with config.json and weights; nothing is downloaded, and no code that it names is run.
        tp, mesh: see `autotp.compile`.
        dtype: of the weights; others in the files are cast to it. None takes the config's.
        example_inputs: see `autotp.compile`; where the config says enough they may be left out.
        prepare: called with the model on the meta device before it is sharded, such as to freeze parameters.
        trusted: allow pickled weights (.bin), which torch opens with `weights_only=True`.
        options: the other arguments of `autotp.compile`, such as `objective="decode"` or `backend="inductor"`.

    Returns: the `ShardedModule` with its weights.

    Raises:
        InputError: the folder or its config cannot be used, or there are too few ranks. StateError: the weights do not
            fit the config. All ranks raise together.
    """
    axis = "cp" if options.get("cp") else "dp"
    path, world = Path(folder), Ranks.find(mesh=mesh, dp=options.get(axis) or 1, axis=axis)
    model = together(world and world.planners, "reading the folder", lambda: _empty(path, dtype))
    if world is None and tp not in (None, 1, "auto"):
        raise InputError(
            f"tp={tp}, and this is one process: weights are read by the ranks. Start it with "
            f"torchrun --nproc-per-node {tp}. A plan alone is what autotp.plan makes, without weights."
        )
    if prepare is not None:
        together(world and world.planners, "preparing the model", lambda: prepare(model))
    sharded = compile_model(model, tp, example_inputs=example_inputs, mesh=mesh, **options)
    if isinstance(sharded, LazyModule):
        raise InputError(
            f"{path}: the config of {type(model).__name__} does not say what the model is called with. Give "
            "example_inputs, as for autotp.compile."
        )
    sharded.load_checkpoint(path, cast=dtype is not None, trusted=trusted)
    return sharded


def _empty(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """The folder's model on the meta device, with its generation config."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder. Give one that save_pretrained wrote; nothing is downloaded, so of a name on a hub "
            "give the folder of its snapshot."
        )
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} holds no {CONFIG}. Give a folder that save_pretrained of transformers wrote.")
    model = from_config(folder / CONFIG, dtype, {}).eval()
    if (folder / GENERATION).is_file():
        model.generation_config = _generation(folder)
    return model


def _generation(folder: Path) -> Any:
    from transformers import GenerationConfig  # noqa: PLC0415  only where a folder is read

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a file of another version lacks
        raise InputError(f"{folder / GENERATION} cannot be read: {first_line(error)}") from error
