"""Save a sharded module: to DCP, as each rank holds it, or whole in the original's Hugging Face layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from autotp import state
from autotp._version import __version__
from autotp.errors import AutoTPError, InputError, StateError
from autotp.ranks import Ranks, together

from . import folders, huggingface, optimizers
from .boxes import Box, boxes, whole
from .dcpfiles import Place, Planner, Writer

if TYPE_CHECKING:
    from autotp.module import ShardedModule

FORMATS = ("dcp", "huggingface")
_groups: dict[str, ProcessGroup] = {}  # of the ranks that save in the background, by the group that they are
_thread = ThreadPoolExecutor(1, "autotp-checkpoint")  # of a process without ranks
_saving: set[Path] = set()  # folders that are written in the background


@torch.no_grad()
def save(
    sharded: ShardedModule,
    path: str | os.PathLike[str],
    *,
    format: str = "dcp",
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    max_file: int = 5 * 10**9,
) -> Future[None] | None:
    """Save a checkpoint as the folder `path`, for any number of ranks. A collective call.

    The folder appears in one step when all is on disk. A save that is cut off anywhere leaves the previous one whole,
    and files of it that hold no weights, such as a tokenizer's, are carried over.

    Args:
        sharded: the module.
        path: the folder; with several nodes on a file system that all of them see.
        format: "dcp" (torch.distributed.checkpoint): each rank writes what it holds, under "model.<name>".
            "huggingface": whole tensors in safetensors files as transformers writes them, by one rank.
        optimizer: saved too (DCP only), under the original parameters' names.
        extra: anything that JSON can say, such as the step; `load` gives it back (DCP only).
        background: copy to the CPU, return at once and write in a thread (`dcp.async_save`; DCP only).
        max_file: largest size of one safetensors file in bytes; with more, files have an index.

    Returns: None; with `background` a future, whose `result()` waits and raises where the save failed.

    Raises:
        InputError: an argument that cannot be used.
        StateError: `path` cannot be written, or the optimizer's state cannot be said in the original's names.
        RankError: that is so on another rank.
    """
    _refuse(format, optimizer, extra, background)
    place = Path(os.path.abspath(path))
    ranks = sharded._source.ranks.planners if sharded._source.ranks is not None else None
    together(ranks, "looking at the module", lambda: _ready(sharded, place))
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    first = ranks is None or ranks.rank == 0
    if format == "huggingface":
        together(ranks, "making the folder", lambda: folders.begin(place) if first else None)
        huggingface.save(sharded, ranks, place, max_file)
        return None
    tensors, notes = together(ranks, "reading the state", lambda: _collect(sharded, optimizer, extra))
    together(ranks, "making the folder", lambda: folders.begin(place) if first else None)
    return _save_dcp(ranks, place, tensors, notes, background)


def _refuse(format: str, optimizer: Any, extra: Any, background: bool) -> None:
    if format not in FORMATS:
        raise InputError(f"format={format!r}: a checkpoint is saved as one of {', '.join(FORMATS)}.")
    if format != "dcp" and (optimizer is not None or extra is not None or background):
        raise InputError(
            f"format={format!r} holds the model alone, and is written at once: for optimizer=, extra= and background= "
            "save with format='dcp'."
        )


def _ready(root: ShardedModule, place: Path) -> None:
    state.refuse_meta(root)
    if place in _saving:
        raise StateError(f"{place} is still being written in the background: wait for that save's result() first.")


Tensors = dict[str, tuple[tuple[int, ...], list[Box]]]


def _collect(root: ShardedModule, optimizer: Optimizer | None, extra: Mapping[str, Any] | None) -> tuple[Tensors, str]:
    """What this rank writes: stored name -> (the whole's shape, its boxes), and our own notes as JSON."""
    found: Tensors = {}
    for first in dict.fromkeys(first for _, first in state.named_tensors(root)):  # what is tied once
        storage = root._storages.get(first)
        if storage is not None:
            found["model." + first] = storage.shape, boxes(storage, state.pieces(root, first))
        else:
            buffer = state.buffer_of(root, first)
            found["model." + first] = tuple(buffer.shape), whole(buffer)
    notes: dict[str, Any] = {"autotp": __version__, "extra": dict(extra or {})}
    if optimizer is not None:
        states, notes["optimizer"] = optimizers.collect(root, optimizer)
        found |= states
    try:
        return found, json.dumps(notes)
    except (TypeError, ValueError) as error:
        raise StateError(f"extra= is saved as JSON, and cannot be: {error}.") from error


def _save_dcp(ranks: Ranks | None, place: Path, tensors: Tensors, notes: str, background: bool) -> Future[None] | None:
    staged: dict[str, torch.Tensor] = {}
    places: dict[str, Place] = {}
    for name, (shape, held) in tensors.items():
        for i, box in enumerate(held):
            key = f"{name}@{i}"
            # dcp.async_save does not copy what is on the CPU already
            staged[key] = box.tensor.to("cpu", copy=True) if background else box.tensor
            places[key] = name, box.offset, shape
    writer, planner = Writer(place, notes), Planner(places)
    if not background:
        try:
            if ranks is None:
                _alone(staged, writer, planner)
            else:
                dcp.save(staged, storage_writer=writer, planner=planner, process_group=ranks.group)
        except Exception as error:
            raise _failed(place, error) from error
        return None
    done: Future[None] = Future()
    _saving.add(place)
    made: Any = (
        _thread.submit(_alone, staged, writer, planner)
        if ranks is None
        else dcp.async_save(staged, storage_writer=writer, planner=planner, process_group=_group(ranks))
    )
    made.add_done_callback(lambda finished: _finish(finished, done, place))
    return done


def _alone(staged: dict[str, torch.Tensor], writer: Writer, planner: Planner) -> None:
    """`dcp.save` in one plain process, without its warning that it is one."""
    writer.set_up_storage_writer(True)
    planner.set_up_planner(staged, writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def _finish(finished: Future[Any], done: Future[None], place: Path) -> None:
    _saving.discard(place)
    error = finished.exception()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(_failed(place, error))


def _failed(place: Path, error: BaseException) -> StateError:
    """The error of a save, with what each rank said."""
    failures: Any = getattr(error, "failures", None)
    told = [f"  rank {rank}: {what[0]}" for rank, what in failures.items()] if failures else [f"  {error}"]
    if isinstance(error, AutoTPError):
        told = [f"  {error}"]
    return StateError(f"{place} could not be saved; what was there is still there.\n" + "\n".join(told))


def _group(ranks: Ranks) -> ProcessGroup:
    """A CPU group of the same ranks for the background: the module's own collectives go on at the same time."""
    if ranks.group_name not in _groups:
        members = dist.get_process_group_ranks(ranks.group)
        made: Any = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        _groups[ranks.group_name] = made
    return _groups[ranks.group_name]
