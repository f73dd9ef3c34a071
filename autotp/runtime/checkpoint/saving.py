"""Save a sharded module: to DCP, as each rank holds it, or whole in the original's Hugging Face layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim import Optimizer

from autotp._version import __version__
from autotp.comm.ranks import Ranks, agree, from_all, together
from autotp.comm.turn import Turn
from autotp.errors import InputError, StateError
from autotp.ir.files import PathLike
from autotp.runtime import state
from autotp.runtime.call_message import short
from autotp.runtime.storage import Box, ShardState
from autotp.text import read_bytes

from . import folders, optimizers, wholes
from .archives import Tensors
from .dcpfiles import Planner, Writer

FORMATS = ("dcp", "huggingface")
NOT_NEEDED = ("state_dict", "is_main_process", "save_function", "safe_serialization")
OLD_FILES = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
NOTE_CHARACTERS = 80  # of a note in a message
_thread = ThreadPoolExecutor(1, "autotp-checkpoint")  # writes in the background
_saving: set[Path] = set()  # folders that are written in the background


@torch.no_grad()
def save(
    shards: ShardState,
    path: PathLike,
    *,
    format: str = "dcp",
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    max_file: int = 5 * 10**9,
    weights: bool = True,
) -> Pending | None:
    """Save a checkpoint; `ShardedModule.save_checkpoint` says what the arguments are. A collective call.

    Args:
        shards: of the module. path, format, optimizer, extra, background, max_file: see there.
        weights: False saves the optimizer alone (DCP only), beside weights that are saved elsewhere.
    """
    place = Path(os.path.abspath(path))
    ranks = shards.planners
    alone = {"optimizer": optimizer, "extra": extra, "background": background or None}  # of dcp
    together(ranks, "looking at the module", lambda: _refuse(shards, place, format, alone))
    facts = {"path": place, "format": format, "background": background, "max_file": max_file}
    agree(ranks, "the options of a save", {**facts, "optimizer": optimizer is not None})
    shards.agree_on_writes("a save")
    shards.show_own()
    tensors, notes = {}, ""
    if format == "dcp":
        names = state.first_names(shards) if weights else ()
        tensors, local = together(ranks, "reading the state", lambda: collect(shards, optimizer, extra, names))
        if shards.staged:  # each stage of a pipeline has an optimizer of its own
            local["optimizer"] = optimizers.joined(from_all(ranks, local.get("optimizer"), "what is saved"))
        notes = together(ranks, "reading the state", lambda: as_json(local))
        texts = {n: _in_short(x) for n, x in local.items() if x is not None}
        agree(ranks, "what is saved beside the weights", texts)
    folders.write_on_first(ranks, "making the folder", place, lambda: folders.begin(place))
    with folders.dropped_on_failure(place, ranks.rank == 0):
        if format == "huggingface":
            wholes.save(shards, ranks, place, max_file)
            return None
        pending = Pending(ranks, place, notes, _copies(tensors) if background else tensors)
    return pending.start() if background else pending.result()


def _refuse(shards: ShardState, place: Path, format: str, alone: Mapping[str, Any]) -> None:
    if format not in FORMATS:
        raise InputError(f"format={format!r}: a checkpoint is saved as one of {', '.join(FORMATS)}.")
    if format != "dcp" and any(x is not None for x in alone.values()):
        raise InputError(
            f"format={format!r} holds the model alone, and is written at once: for optimizer=, extra= and background= "
            "save with format='dcp'."
        )
    state.refuse_meta(shards)
    if place in _saving:
        raise StateError(f"{place} is still being written in the background: wait for that save's result() first.")


def collect(
    shards: ShardState, optimizer: Optimizer | None, extra: Mapping[str, Any] | None, names: Iterable[str]
) -> tuple[Tensors, dict[str, Any]]:
    """Return this rank's tensors to write: stored name -> (the whole's shape, its boxes), and our own notes.

    Args:
        shards: of the module. optimizer, extra: of the notes; None for none. names: of the weights.
    """
    tensors = {}
    for first in names:
        tensors["model." + first] = shards.storage_of(first).shape, state.boxes(shards, first)
    notes: dict[str, Any] = {"autotp": __version__, "extra": dict(extra or {})}
    if optimizer is not None:
        states, notes["optimizer"] = optimizers.collect(shards, optimizer)
        tensors |= states
    return tensors, notes


def _copies(tensors: Tensors) -> Tensors:
    """Copy tensors to the CPU: steps beside a save in the background do not change the copies."""
    out = {}
    for name, (shape, boxes) in tensors.items():
        out[name] = shape, [Box(box.offset, box.tensor.to("cpu", copy=True)) for box in boxes]
    return out


def as_json(notes: Mapping[str, Any]) -> str:
    """Return notes as text, without those that are None."""
    try:
        return json.dumps({k: v for k, v in notes.items() if v is not None})
    except (TypeError, ValueError) as error:
        raise StateError(f"extra= is saved as JSON, and cannot be: {error}.") from error


def _in_short(note: Any) -> str:
    """Return a short text for a note: its beginning, and a digest of all."""
    text = json.dumps(note)
    return text if len(text) <= NOTE_CHARACTERS else f"{text[:NOTE_CHARACTERS]}... ({short(text).hex()})"


class Pending:
    """A save in progress: planned, written by each rank, and put in its place when all ranks have written.

    Args:
        ranks: that save. place: the folder. notes: beside the tensors, as JSON. tensors: of this rank.
    """

    def __init__(self, ranks: Ranks, place: Path, notes: str, tensors: Tensors) -> None:
        self.ranks, self.place, self.writer, self.planner = ranks, place, Writer(place, notes), Planner(tensors)
        self.first = ranks.rank == 0
        self.write_future: Future[Any] | None = None
        self.finished = False
        # Of the plans of all ranks each makes the same whole: what several have is written by one of them.
        plans = from_all(ranks, together(ranks, "planning the save", self._plan), "plans of the save")
        plans, self.metadata = self.planner.create_global_plan(plans)
        self.mine = self.planner.finish_plan(self.writer.prepare_global_plan(plans)[ranks.rank])

    def _plan(self) -> SavePlan:
        self.writer.set_up_storage_writer(self.first)
        self.planner.set_up_planner({}, self.writer.storage_meta(), self.first)
        return folders.writing(self.place, lambda: self.writer.prepare_local_plan(self.planner.create_local_plan()))

    def start(self) -> Pending:
        """Write in a thread, without any collective."""
        _saving.add(self.place)
        self.write_future = _thread.submit(self._write)
        return self

    def _write(self) -> Any:
        items = folders.writing(self.place, lambda: self.writer.write_data(self.mine, self.planner).wait())
        return items, self.planner.digests

    def done(self) -> bool:
        """Return whether this rank's files are written."""
        return self.write_future is not None and self.write_future.done()

    @Turn("the end of a save in the background")
    def result(self) -> None:
        """Wait for the files of all ranks, and put the folder in its place. A collective call.

        Raises:
            StateError: it could not be written; what was at the path is still there.
            RankError: that is so on another rank.
        """
        if self.finished:
            return
        self.finished = True
        write = self.write_future.result if self.write_future is not None else self._write
        try:
            with folders.dropped_on_failure(self.place, self.first):
                results: Any = from_all(self.ranks, together(self.ranks, "writing", write), "results of the save")
                doing = "putting the checkpoint in its place"
                finish = partial(self.writer.finish, self.metadata, results)
                folders.write_on_first(self.ranks, doing, self.place, finish)
        finally:
            _saving.discard(self.place)


def save_pretrained(self: Any, save_directory: PathLike, max_shard_size: int | str = "5GB", **kwargs: Any) -> None:
    """Write the whole weights and the config as transformers does, for its `from_pretrained`. A collective call.

    `save_checkpoint(format="huggingface")` replaces a folder in one step; this one writes into it, beside its other
    files.

    Args:
        save_directory: the folder.
        max_shard_size: largest size of one file, in bytes or such as "5GB"; with more, files have an index.
        kwargs: of those that transformers takes, what says how one process writes all is not needed here:
            state_dict, is_main_process, save_function and safe_serialization=True.

    Raises:
        InputError: another argument, or a size that cannot be read.
        StateError: the folder cannot be written.
        RankError: that is so on another rank.
    """
    shards: ShardState = self._shards
    ranks = shards.planners
    size = together(ranks, "reading the options", lambda: _size(max_shard_size, kwargs))
    into = Path(os.path.abspath(save_directory))
    draft = into / ".weights"
    save(shards, draft, format="huggingface", max_file=size)
    folders.write_on_first(ranks, "moving the weights", into, lambda: _move(draft, into))


def _size(limit: int | str, options: Mapping[str, Any]) -> int:
    """Return the size in bytes.

    Raises:
        InputError: it is no size, or an option asks for what is not written.
    """
    unknown = [name for name in options if name not in NOT_NEEDED]
    if unknown or not options.get("safe_serialization", True):
        raise InputError(
            f"save_pretrained({[*unknown, 'safe_serialization=False'][0]}): a sharded module writes safetensors files "
            "and the config, nothing else. Do the rest on rank 0 afterwards."
        )
    return int(read_bytes(limit, "max_shard_size", "bytes"))


def _move(draft: Path, into: Path) -> None:
    """Put the new files in the place of the old ones."""
    new = {p.name for p in draft.iterdir()}
    for pattern in OLD_FILES:
        for old in folders.matching(into, pattern):
            if old.name not in new:
                old.unlink()
    for name in sorted(new):
        os.replace(draft / name, into / name)
    shutil.rmtree(draft)
