"""Digests of the bytes of tensors, by which a load notices damage.

A tensor's bytes are cut into blocks of 4 MiB, in order. A block's digest is of its words of 8 bytes: the sum of each
page of 4 KiB, times an odd number that no other page has, all added modulo 2**64. That takes as long as memory takes to
be read. It notices with certainty whatever changes within one word, so each flipped bit or byte; of all else, such as
pages of zeros, of another file, or in another order, it misses less than one in 2**40. It is against worn disks and
copies that went wrong, not against malice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autotp.errors import StateError
from autotp.ir.files import opened, read_json
from autotp.runtime.storage import Box

from .folders import DIGESTS, OWN, matching

FORMAT, MAX_FILE_BYTES = 1, 1 << 30
TABLES = ("*.safetensors", ".metadata", OWN)  # what says which bytes are which tensor's
BLOCK, PAGE, WORD = 4 << 20, 4096, 8  # bytes
PAGES = BLOCK // PAGE  # of a block
IN_ORDER = "4096/1"  # names these digests in a file; those of columns, which were written once, are not read

View = Callable[[int, int], Tensor]  # the bytes of a stored tensor from one place to another


@dataclass(frozen=True)
class Entry:
    """A stored tensor, or a part of one: its shape and type, and its place in a file.

    Attributes:
        shape, dtype: a str where torch has no such type.
        file: that holds it. start, stop: the bytes of the file, a header of its own among them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: Path
    start: int = 0
    stop: int = 0

    def empty(self, device: torch.device | str | None = None) -> Tensor:
        """Return memory for all of it; its type is one that torch has."""
        assert isinstance(self.dtype, torch.dtype)
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def digest(block: Tensor) -> int:
    """Return the digest of the bytes of one block; its last page is padded with zeros."""
    if len(block) % PAGE or block.storage_offset() % WORD:  # words must begin where torch can read them
        block = pad(block, (0, -len(block) % PAGE))
    return int(of_pages(words(block).sum(1)))


def words(data: Tensor) -> Tensor:
    """Return the words of whole pages, `[pages, words]`; digests are made of their sums."""
    return data.view(torch.int64).view(-1, PAGE // WORD)


def of_pages(sums: Tensor) -> Tensor:
    """Return digests of blocks from the sums of their pages, `[..., pages]`."""
    return (sums * _factors(PAGES, sums.device)[: sums.shape[-1]]).sum(-1)


def as_text(digests: Tensor | Sequence[int]) -> str:
    """Return digests as a file has them: 16 hexadecimal digits for each."""
    return b"".join(int(n).to_bytes(WORD, "little", signed=True) for n in digests).hex()


@cache
def _factors(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, device=device)


def measured(size: int, view: View) -> dict[str, str]:
    """Return the digests of a tensor of `size` bytes as a file has them: 16 hexadecimal digits for each block."""
    numbers = [digest(view(start, min(start + BLOCK, size))) for start in range(0, size, BLOCK)]
    return {IN_ORDER: as_text(numbers)}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in the order of its elements, `[bytes]`."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def bytes_view(data: Tensor) -> View:
    """Return a view of bytes that are in memory."""
    return lambda start, stop: data[start:stop]


class Digests:
    """The digests of a folder's tensors, where it has them.

    Raises:
        StateError: they cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / DIGESTS
        self.remedy = f"If a file was changed on purpose, delete {self.file}: nothing is checked then."
        empty: dict[str, Any] = {"format": FORMAT, "tables": {}, "tensors": {}}
        data = read_json(self.file, MAX_FILE_BYTES, error=StateError) if self.file.exists() else empty
        parts = [data.get("tables"), data.get("tensors")] if isinstance(data, dict) else [None]
        if not all(isinstance(x, dict) for x in parts) or data.get("format") != FORMAT:
            raise StateError(f"{self.file} holds no digests of format {FORMAT}. {self.remedy}")
        self.tables: dict[str, Any] = data["tables"]
        self.tensors: dict[str, Any] = data["tensors"]

    def faults(self, *files: Path) -> list[str]:
        """Return the faults of the tables of these files, so far as they exist."""
        present = [f for f in files if f.name in self.tables and f.exists()]
        differing = [f.name for f in present if _table(f) != self.tables[f.name]]
        return [f"{name} is not what was saved: it is damaged, or another one. {self.remedy}" for name in differing]

    def fill(self, table: str, name: str, entry: Entry, box: Box, view: View, at: Sequence[int] = ()) -> None:
        """Fill a box from a stored tensor, whose bytes are checked as they are read.

        Args:
            table: the file that says where the tensor is stored. Where it has a digest, each tensor has one.
            name: of the tensor. entry: the tensor, or the part of it that begins at `at` in the whole.
            box: in the entry. view: of the entry's bytes.

        Raises:
            StateError: they are not what was saved. The box is filled with them by then.
        """
        assert isinstance(entry.dtype, torch.dtype)
        if not box.tensor.numel():
            return
        shape = entry.shape or (1,)
        box = box if entry.shape else Box((0,), box.tensor[None])
        size = math.prod(shape) * entry.dtype.itemsize
        saved = self._recorded(name, position(at or (0,) * len(entry.shape)), size) if table in self.tables else None
        if wrong := _pour(view, shape, entry.dtype, box, saved):
            start, stop = wrong[0] * BLOCK, min((wrong[-1] + 1) * BLOCK, size)
            raise StateError(
                f"{entry.file} is damaged: bytes {entry.start + start} to {entry.stop - (size - stop)}, of {name}, are "
                f"not what was saved. Copy the file again, or load another checkpoint. {self.remedy}"
            )

    def _recorded(self, name: str, at: str, size: int) -> list[int]:
        """Return the digests of the blocks of a part of a tensor, as they were saved.

        Args:
            name: of the tensor. at: where the part begins. size: its bytes.
        """
        try:
            data = bytearray.fromhex(self.tensors[name][at][IN_ORDER])
            if len(data) != math.ceil(size / BLOCK) * WORD:
                raise ValueError("there are not as many as blocks")
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{self.file} holds no digests of {name}: {error}. {self.remedy}") from error
        return torch.frombuffer(data, dtype=torch.int64).tolist()


def _pour(view: View, shape: Sequence[int], dtype: torch.dtype, box: Box, saved: Sequence[int] | None) -> list[int]:
    """Fill a box of a stored tensor, block by block, and check each block beside that.

    Args:
        view: of the tensor's bytes. shape, dtype: of it. box: in it.
        saved: the digests of all its blocks; None where nothing is checked.

    Returns: the blocks that are not what was saved.
    """
    row = math.prod(shape[1:]) * dtype.itemsize
    first, last = box.offset[0], box.offset[0] + len(box.tensor)
    at, wrong = first, list[int]()  # the next row to copy
    # A block can only be checked whole, so the first and the last one begin before and end behind the box's rows.
    for number in range(first * row // BLOCK, math.ceil(last * row / BLOCK)):
        start, stop = number * BLOCK, min((number + 1) * BLOCK, shape[0] * row)
        # A row that began in the block before is copied once its end is there too: its beginning is mapped again.
        base = min(start, at * row)
        data = view(base, stop)
        ready = min(stop // row, last)
        if ready > at:
            part = data[at * row - base : ready * row - base]
            part = part.clone() if part.storage_offset() % dtype.itemsize else part
            rows = part.view(dtype).view(ready - at, *shape[1:])
            box.tensor[at - first : ready - first].copy_(rows[(slice(None), *box.slices[1:])])
            at = ready
        # After the copy, when all is in the processor's cache.
        if saved is not None and digest(data[start - base :]) != saved[number]:
            wrong.append(number)
    return wrong


def position(at: Sequence[int]) -> str:
    """Return where a part begins in the whole, as text."""
    return ",".join(map(str, at))


def write(folder: Path, tensors: Mapping[str, Mapping[str, Mapping[str, str]]]) -> None:
    """Write the file of a folder.

    Args:
        folder: with all other files. tensors: by name and position of a part its digests, as `measured` gives them.
    """
    tables = {f.name: _table(f) for pattern in TABLES for f in matching(folder, pattern)}
    text = json.dumps({"format": FORMAT, "tables": tables, "tensors": tensors})
    (folder / DIGESTS).write_text(text + "\n", encoding="utf-8")


def _table(file: Path) -> str:
    """Return the digest of a file, or of a safetensors file's header."""
    with opened(file, error=StateError) as stream:
        header = stream.read(WORD) if file.suffix == ".safetensors" else b""
        content = stream.read(int.from_bytes(header, "little")) if header else stream.read()
    return hashlib.blake2b(header + content, digest_size=16).hexdigest()
