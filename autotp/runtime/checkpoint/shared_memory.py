"""Memory of a node that outlives its processes: the tensors of ranks after a step, in files of shared memory.

Each rank has two files, which it fills in turn, and beside each a record that is written last: the step, the place in
the file of each tensor's boxes, and digests of all of it. A file without its record is one whose copy was cut off.
A folder is of one run and one model, and every record says of which. A start of ranks is an epoch: its files
replace those of the epoch before once all of its ranks have kept a step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotp.comm.ranks import Ranks
from autotp.errors import StateError
from autotp.ir.op import dtype_name
from autotp.plans.pieces import Block
from autotp.runtime.storage import Box, ShardState

from .archives import Peers, Tensors
from .digests import BLOCK, IN_ORDER, PAGE, PAGES, Entry, as_bytes, as_text, measured, of_pages, words
from .tensorfiles import mapped

FOLDER, SHARED = "AUTOTP_MEMORY", "/dev/shm"  # names the folder of shared memory; where that is by default
RUN = "TORCHELASTIC_RUN_ID"
CHUNK = 64 * PAGE  # bytes that are copied and summed while the processor's cache has them
MARK = 32  # characters of a record's own digest

Copies = tuple[list[Any], Any]  # of each chunk the copies (function, target, source), its pages, their sums; all sums


@dataclass(frozen=True)
class Owner:
    """Owner of a folder: a run of torchrun, and a model."""

    run: str
    model: str

    @staticmethod
    def of(shards: ShardState) -> Owner:
        """Return the owner: the run of this process, and the module's class, names and shapes.

        Raises:
            StateError: torchrun has given this run no name of its own.
        """
        run = os.environ.get(RUN, "none")
        if run == "none":  # that of every run without a name
            raise StateError(
                "memory of the node is kept under the name of the run, and this one has none: start it with torchrun "
                "--standalone, or with --rdzv-backend c10d and an --rdzv-id of its own."
            )
        several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
        if several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise StateError(
                "agents of torchrun share one store over restarts, which holds addresses of ranks that are gone, and "
                "is gone itself with its agent: new ranks would not find each other. Start torchrun on every node with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and --rdzv-backend c10d."
            )
        tensors = {n: x for n, x in shards.bare.state_dict().items() if isinstance(x, Tensor)}
        shapes = {n: (tuple(x.shape), shards.aliases.get(n, n)) for n, x in tensors.items()}
        return Owner(run, _digest(f"{type(shards.bare).__qualname__} {shapes}"))

    @property
    def folder(self) -> Path:
        """Folder of its files on this node."""
        return _mine() / _digest(f"{self.run} {self.model}")

    def open(self) -> Path:
        """Make the folder, for this user alone, and say which process launched its ranks; clear those of ended runs."""
        root = _mine()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if root.stat().st_uid != os.getuid() or root.is_symlink():
            raise StateError(f"{root} is not this user's. Set {FOLDER} to a folder of shared memory that is.")
        for other in root.iterdir():
            if other != self.folder and not any(map(_lives, other.glob("launcher-*"))):
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / f"launcher-{_launcher(os.getppid())}").touch()
        return self.folder


def sealed(text: str) -> str:
    """Return a record's text with a digest of it, by which one that is damaged is told."""
    return _digest(text) + text


def _mine() -> Path:
    return Path(os.environ.get(FOLDER, SHARED)) / f"autotp-{os.getuid()}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=MARK // 2).hexdigest()


def _launcher(pid: int) -> str:
    """Return a process's name: its namespace, number, and start time, for numbers are reused."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        began = ""
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{began}"


def _lives(mark: Path) -> bool:
    """Return whether a launcher lives, or is of another container, of whose processes nothing is known here."""
    namespace, pid, _ = name = mark.name.removeprefix("launcher-").split("-")
    return namespace != _launcher(0).split("-")[0] or _launcher(int(pid)).split("-") == name


def drop(folder: Path, unwanted: Callable[[str], bool]) -> None:
    """Delete files whose names, without their endings, are unwanted; records first."""
    for pattern in ("*.json", "*.data"):
        for file in folder.glob(pattern):
            if unwanted(file.stem):
                file.unlink(missing_ok=True)


# ---- one file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Record of the contents of a file of the folder.

    Attributes:
        file: without its ending. run, model, epoch, step: of what it holds. place: of the rank, among `world` of them.
        settled: the step that all ranks had kept before.
        table: stored name -> the whole's shape, its type, and of each box where it begins, its shape, and its bytes.
        digests: of the file, as `measured` gives them. notes: beside the tensors.
    """

    file: Path
    run: str
    model: str
    epoch: int
    step: int
    place: int
    settled: int
    size: int
    table: dict[str, Any]
    digests: dict[str, str]
    notes: dict[str, Any]

    @staticmethod
    def read(path: Path, owner: Owner) -> Record | None:
        """Return the record at a path; None where it is damaged, or of another owner."""
        try:
            text = path.read_text(encoding="utf-8")
            record = Record(path.with_suffix(""), **json.loads(text[MARK:]))
        except (OSError, ValueError, TypeError):
            return None
        valid = sealed(text[MARK:]) == text and Owner(record.run, record.model) == owner
        return record if valid else None

    @property
    def entry(self) -> Entry:
        """File as one tensor of bytes."""
        return Entry((self.size,), torch.uint8, self.file.with_suffix(".data"), 0, self.size)

    def holds(self) -> bool:
        """Return whether the file has the bytes that were kept."""
        try:
            return measured(self.size, partial(mapped, self.entry)) == self.digests
        except StateError:
            return False

    def blocks(self, name: str) -> dict[Block, int]:
        """Blocks of a tensor that the file has, each with its first byte."""
        return {Block(tuple(at), tuple(shape)): start for at, shape, start in self.table[name][2]}


class Slot:
    """One of the files of a rank, mapped into memory, and its record."""

    def __init__(self, file: Path, size: int) -> None:
        self.record, path = file.with_suffix(".json"), file.with_suffix(".data")
        with open(path, "w+b") as stream:
            try:  # now: a page that is not there when it is written to ends the process
                os.posix_fallocate(stream.fileno(), 0, size)
            except OSError as error:
                free = shutil.disk_usage(path.parent).free
                what = f"only {free / 1e6:,.1f} MB are free" if error.errno == errno.ENOSPC else error
                raise StateError(f"{path.parent} cannot take {size / 1e6:,.1f} MB: {what}.") from error
            self.map = mmap.mmap(stream.fileno(), size)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)

    def begin(self) -> None:
        """Take back the record, before the bytes that it is of are written over."""
        self.record.unlink(missing_ok=True)

    def commit(self, text: str) -> None:
        """Write the record, in one step."""
        draft = self.record.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.record)


class Layout:
    """Places of the boxes of a rank in its files, and how they are copied there.

    Args:
        tensors: stored name -> (the whole's shape, this rank's boxes).
    """

    def __init__(self, tensors: Tensors) -> None:
        self.table: dict[str, Any] = {}
        self.sources: list[Tensor] = []
        self.starts: list[int] = []
        self.bytes = at = 0
        for name, (shape, boxes) in tensors.items():
            rows = []
            for box in boxes:
                rows.append((box.offset, tuple(box.tensor.shape), at))
                self.sources.append(box.tensor)
                self.starts.append(at)
                self.bytes += box.tensor.nbytes
                at += -(-box.tensor.nbytes // 64) * 64  # where any type may begin
            dtype = dtype_name(boxes[0].tensor.dtype) if boxes else "uint8"
            self.table[name] = shape, dtype, rows
        self.size = max(-(-at // PAGE), 1) * PAGE

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the memory that is copied: what is prepared for one layout serves another of an equal key."""
        return self.size, *((x.data_ptr(), x.shape, x.stride()) for x in self.sources)

    def copies_to(self, slot: Slot) -> Copies:
        """Prepare the copies to a file: of each chunk its copies, and then the pages to sum."""
        pieces: list[list[Any]] = [[] for _ in range(0, self.size, CHUNK)]
        for at, source in zip(self.starts, self.sources, strict=True):
            target = slot.data[at : at + source.nbytes]
            if source.device.type != "cpu" or not source.is_contiguous():  # a block may be a part of longer rows
                whole = target.view(source.dtype).view(source.shape)
                pieces[at // CHUNK].append((Tensor.copy_, whole, source))
                continue
            values, places = as_bytes(source).numpy(), target.numpy()
            for chunk in range(at // CHUNK, -(-(at + len(values)) // CHUNK)):
                part = slice(max(chunk * CHUNK - at, 0), (chunk + 1) * CHUNK - at)
                pieces[chunk].append((np.copyto, places[part], values[part]))
        sums = np.zeros(-(-self.size // BLOCK) * PAGES, np.int64)
        pages, count = words(slot.data).numpy(), CHUNK // PAGE
        rows = [(pages[i : i + count], sums[i : i + count]) for i in range(0, len(pages), count)]
        return [(copied, *row) for copied, row in zip(pieces, rows, strict=True)], sums


def copy(copies: Copies) -> dict[str, str]:
    """Make the copies to a file, and return its digests: each page is summed while the processor's cache has it."""
    for pieces, pages, sums in copies[0]:
        for copy_one, target, source in pieces:
            copy_one(target, source)
        np.add.reduce(pages, 1, None, sums[: len(pages)])
    return {IN_ORDER: as_text(of_pages(torch.from_numpy(copies[1]).view(-1, PAGES)))}


# ---- the files of all ranks ------------------------------------------------------------------------------------------


def records_of(owner: Owner) -> list[Record]:
    """Return the records in the folder of this node, in the order of their names."""
    files = sorted(owner.folder.glob("*.json")) if owner.folder.exists() else []
    return [record for file in files if (record := Record.read(file, owner))]


def latest(records: Sequence[tuple[Record, bool]]) -> list[Record]:
    """Return the records of the latest step that is kept whole, those of low places first; none where none is.

    Args:
        records: of all nodes, each with whether its file holds what was kept.

    Raises:
        StateError: a step had been kept by all ranks, and is not whole now.
    """
    steps: dict[tuple[int, int], list[Record]] = {}
    for record in sorted((record for record, holds in records if holds), key=lambda record: record.place):
        steps.setdefault((record.step, record.epoch), []).append(record)
    for key in sorted(steps, reverse=True):
        if _whole(steps[key]):
            return steps[key]
    if lost := max((record.settled for record, _ in records), default=0):
        raise StateError(
            f"memory of the nodes holds step {lost} of this run in part only: a node that had the rest is gone, or its "
            "copies are damaged. redundancy=1 keeps a second copy on another node. Start from a checkpoint, without "
            "resume=True."
        )
    return []


def _whole(records: Sequence[Record]) -> bool:
    """Return whether the blocks of these records, which are equal or disjoint, make up every tensor."""
    for name, (shape, _, _) in records[0].table.items():
        blocks = {block for record in records for block in record.blocks(name)}
        if sum(block.elements for block in blocks) != math.prod(shape):
            return False
    return True


class KeptStep(Peers):
    """A step that memory of the nodes holds: each rank has the tensors in the files of its node.

    Attributes:
        records: of all its files, also those of other nodes.
    """

    def __init__(self, ranks: Ranks, folder: Path, records: Sequence[Record], here: Sequence[Sequence[Record]]) -> None:
        """Map the files of this node.

        Args:
            ranks: of all nodes. folder: of this node. records: see the class. here: those of each rank's node.
        """
        self.records = records
        nodes = {id(members): members for members in here}  # ranks of one node have one list
        tables = {node: _places(members) for node, members in nodes.items()}
        every = [tables[id(members)] for members in here]
        files, have = dict[str, Tensor](), dict[str, list[Box]]()
        for name, (_, dtype, places) in every[ranks.rank].items():
            have[name] = []
            for block, (record, start) in places.items():
                file = record.file.name
                if file not in files:
                    files[file] = mapped(replace(record, file=folder / file).entry, 0, record.size)
                values = files[file][start : start + block.elements * dtype.itemsize]
                have[name].append(Box(block.offset, values.view(dtype).view(block.size)))
        super().__init__(ranks, have, every, records[0].notes, path=folder)


def _places(records: Iterable[Record]) -> dict[str, Any]:
    """Return of each tensor in files the whole's shape, its type, and of each block the record and first byte."""
    out = {}
    for record in records:
        for name, (shape, dtype, _) in record.table.items():
            for block, start in record.blocks(name).items():
                _, _, places = out.setdefault(name, (tuple(shape), getattr(torch, dtype), {}))
                places[block] = record, start
    return out
