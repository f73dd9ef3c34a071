"""Stored tensors read into boxes while their digests are checked, and the file of a folder that holds the digests."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotp.errors import StateError
from autotp.ir.files import opened, read_json
from autotp.log import log
from autotp.runtime.storage import Box

from .digests import WORD, Grid, Region, Source, as_bytes, recorded, region
from .folders import DIGESTS, OWN

FORMAT, LARGEST = 1, 1 << 30
TABLES = ("*.safetensors", ".metadata", OWN)  # what says which bytes are which tensor's


@dataclass(frozen=True)
class Entry:
    """A stored tensor, or a part of one: its shape and type, and where it lies.

    Attributes:
        shape, dtype: a str where torch has no such type.
        file: that holds it. start, stop: the bytes of the file, a header of its own among them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: Path
    start: int = 0
    stop: int = 0


class Digests:
    """The digests of a folder's tensors, where it has them.

    Raises:
        StateError: they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / DIGESTS
        self.remedy = f"If a file was changed on purpose, delete {self.file}: nothing is checked then."
        empty: dict[str, Any] = {"format": FORMAT, "tables": {}, "tensors": {}}
        data = read_json(self.file, LARGEST, error=StateError) if self.file.exists() else empty
        parts = [data.get("tables"), data.get("tensors")] if isinstance(data, dict) else [None]
        if not all(isinstance(x, dict) for x in parts) or data.get("format") != FORMAT:
            raise StateError(f"{self.file} holds no digests of format {FORMAT}. {self.remedy}")
        self.tables: dict[str, Any] = data["tables"]
        self.tensors: dict[str, Any] = data["tensors"]

    def faults(self, *files: Path) -> list[str]:
        """What is wrong with the tables of these files, so far as they are there."""
        there = [f for f in files if f.name in self.tables and f.exists()]
        others = [f.name for f in there if _table(f) != self.tables[f.name]]
        return [f"{name} is not what was saved: it is damaged, or another one. {self.remedy}" for name in others]

    def fill(self, table: str, name: str, entry: Entry, box: Box, source: Source, at: Sequence[int] = ()) -> None:
        """Fill a box from a stored tensor, whose bytes are checked as they are read.

        Args:
            table: the file that says where the tensor lies. With a digest of this there is one of each tensor.
            name: of the tensor. entry: the tensor, or the part of it that begins at `at` in the whole.
            box: in the entry. source: the entry's bytes.

        Raises:
            StateError: they are not what was saved. The box is filled with them by then.
        """
        assert isinstance(entry.dtype, torch.dtype)
        if not box.tensor.numel():
            return
        shape, itemsize = entry.shape or (1,), entry.dtype.itemsize
        box = box if entry.shape else Box((0,), box.tensor[None])
        if table not in self.tables:
            rows = range(box.offset[0], box.offset[0] + len(box.tensor))
            _pour(source, Region(Grid(math.prod(shape[1:]) * itemsize, 1), rows), shape, entry.dtype, box, False)
            return
        try:
            digests = self.tensors[name][position(at or (0,) * len(entry.shape))]
            of = region(shape, itemsize, box, digests)
            saved = recorded(of, digests[of.grid.key])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{self.file} holds no digests of {name}: {error}. {self.remedy}") from error
        present = of.grid.digests(_pour(source, of, shape, entry.dtype, box, True))[:, 0]
        if wrong := (present != saved).nonzero().flatten().tolist():
            size, block, first = math.prod(shape) * itemsize, of.grid.height * of.grid.row, of.rows.start * of.grid.row
            start, stop = first + wrong[0] * block, first + (wrong[-1] + 1) * block
            raise StateError(
                f"{entry.file} is damaged: bytes {entry.start + start} to {entry.stop - max(0, size - stop)}, of "
                f"{name}, are not what was saved. Copy the file again, or load another checkpoint. {self.remedy}"
            )


def _pour(
    source: Source, of: Region, shape: Sequence[int], dtype: torch.dtype, box: Box, checked: bool
) -> list[Tensor]:
    """Fill a box, each row as soon as what is read holds it.

    Args:
        source: of bytes. of: the region to read, with the box in it. shape, dtype: of what is stored.
        box: in that. checked: whether sums are wanted.

    Returns: the sums of the region's rows.
    """
    row, first = math.prod(shape[1:]) * dtype.itemsize, box.offset[0]
    same_bytes = box.tensor.is_cpu and box.tensor.dtype == dtype
    if same_bytes and tuple(box.tensor.shape[1:]) == tuple(shape[1:]) and box.tensor.is_contiguous():
        parts = _straight(source, of.grid.windows(of.rows, shape[0] * row), first * row, as_bytes(box.tensor))
        return [of.grid.sums(data, 1, of.columns) for data in parts if checked]
    at, last, sums = first, first + len(box.tensor), list[Tensor]()
    # A strip lies here and there in the file, so that reading it twice costs twice; in the box it is one piece.
    of_box = of.exact and same_bytes
    strip = Grid(of.grid.width * len(of.strips), 1)
    for start, stop in of.grid.windows(of.rows, shape[0] * row):
        base = min(start, at * row) if at < last else start
        data = source.view(base, stop)
        ready = min(stop // row, last)
        if ready > at:
            part = data[at * row - base : ready * row - base]
            part = part.clone() if part.storage_offset() % dtype.itemsize else part
            target = box.tensor[at - first : ready - first]
            target.copy_(part.view(dtype).view(ready - at, *shape[1:])[(slice(None), *box.slices[1:])])
            if checked and of_box:
                sums.append(strip.sums(as_bytes(target)))
            at = ready
        if checked and not of_box:  # after the copy, when all is in the processor's cache
            sums.append(of.grid.sums(data[start - base :], 1, of.columns))
    return sums


def _straight(source: Source, windows: Iterable[tuple[int, int]], first: int, out: Tensor) -> Iterator[Tensor]:
    """Fill bytes with those from `first` on, without a copy between; and give the bytes of each window."""
    for start, stop in windows:
        target = out[max(0, start - first) : max(0, stop - first)]
        if len(target) == stop - start:
            source.read(start, target)
            yield target
        else:  # a block that begins before the box or ends after it
            data, skipped = source.view(start, stop), max(0, first - start)
            target.copy_(data[skipped : skipped + len(target)])
            yield data


def position(at: Sequence[int]) -> str:
    """Where a part begins in the whole, as text."""
    return ",".join(map(str, at))


def write(folder: Path, tensors: Mapping[str, Mapping[str, Mapping[str, str]]]) -> None:
    """Write the file of a folder.

    Args:
        folder: with all other files. tensors: by name and position of a part its digests, as `measured` gives them.
    """
    tables = {f.name: _table(f) for pattern in TABLES for f in sorted(folder.glob(pattern))}
    text = json.dumps({"format": FORMAT, "tables": tables, "tensors": tensors})
    (folder / DIGESTS).write_text(text + "\n", encoding="utf-8")


def _table(file: Path) -> str:
    """The digest of a file, or of a safetensors file's header."""
    with opened(file, error=StateError) as stream:
        header = stream.read(WORD) if file.suffix == ".safetensors" else b""
        content = stream.read(int.from_bytes(header, "little")) if header else stream.read()
    return hashlib.blake2b(header + content, digest_size=16).hexdigest()


@cache
def mention(folder: Path) -> None:
    """Say that a folder has no digests, once in a process."""
    if not (folder / DIGESTS).exists():
        log.warning("%s has no digests: damage to its files would load unnoticed. Save again to have them.", folder)
