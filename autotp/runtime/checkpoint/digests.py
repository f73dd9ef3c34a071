"""Digests of the bytes of tensors, by which a load notices those that are not what was saved.

A digest is of a block's words of 8 bytes: the sum of each row, times an odd number that no other row has, all added
modulo 2**64. That takes as long as memory takes to be read. It notices with certainty whatever changes within one word,
so each flipped bit or byte; of all else, such as pages of zeros, of another file, or in another order, it misses less
than one in 2**40. It is against worn disks and copies that went wrong, not against malice.

A block has about 4 MiB. Blocks are cut of a tensor's bytes in order, where a row is 4 KiB; and of up to 16 strips of
columns for each dimension by which ranks may split it, so that a rank checks the columns that it reads, not all. The
digests of strips side by side add up to the digest of the strip that they make together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autotp.errors import StateError
from autotp.ir.files import opened, read_json
from autotp.log import log
from autotp.runtime.storage import Box

from .folders import DIGESTS, OWN

FORMAT, MAX_FILE_BYTES = 1, 1 << 30
TABLES = ("*.safetensors", ".metadata", OWN)  # what says which bytes are which tensor's
BLOCK, PAGE, WORD = 4 << 20, 4096, 8  # bytes
STRIPS, NARROWEST = (16, 8, 4, 2), 256  # of a row; bytes of one


View = Callable[[int, int], Tensor]  # the bytes of a stored tensor from one place to another


def bytes_view(data: Tensor) -> View:
    """Return a view of bytes that are in memory."""
    return lambda start, stop: data[start:stop]


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


@dataclass(frozen=True)
class Grid:
    """Blocks of a tensor whose bytes lie in rows of `row`, which are cut into strips."""

    row: int
    strips: int

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.row}/{self.strips}"

    @property
    def width(self) -> int:
        """Bytes of a strip."""
        return self.row // self.strips

    @property
    def height(self) -> int:
        """Rows of a block."""
        return max(1, BLOCK // self.width)

    def windows(self, rows: range, size: int) -> Iterator[tuple[int, int]]:
        """Return the bytes of some rows, 4 MiB at a time, of a tensor of `size` bytes; its last row may be cut off."""
        step, end = max(1, BLOCK // self.row) * self.row, min(rows.stop * self.row, size)
        yield from ((at, min(at + step, end)) for at in range(rows.start * self.row, end, step))

    def sums(self, data: Tensor, parts: int = 1, columns: slice = slice(None)) -> Tensor:
        """Return each row's sums of words, `[rows, parts]`; what a cut-off row lacks is zeros.

        Args:
            data: bytes of rows. parts: equal ones that a row is cut into. columns: words of each part that count.
        """
        whole = data.numel() // self.row * self.row
        if whole < data.numel():
            rest = pad(data[whole:], (0, whole + self.row - data.numel()))
            return torch.cat([self.sums(x, parts, columns) for x in (data[:whole], rest)])
        words = (data.clone() if data.storage_offset() % WORD else data).view(torch.int64)
        return words.view(whole // self.row, parts, self.row // WORD // parts)[:, :, columns].sum(2)

    def digests(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the digests `[blocks, parts]` of blocks, of the sums of all their rows in order."""
        rows = torch.cat([*sums])
        rows = pad(rows, (0, 0, 0, -len(rows) % self.height)).view(-1, self.height, rows.shape[1])
        return (rows * _odd(self.height, rows.device)).sum(1)


@cache
def _odd(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, device=device)[:, None]


BYTES = Grid(PAGE, 1)  # in order


def grids(shape: Sequence[int], itemsize: int) -> list[Grid]:
    """Return the ways in which a tensor is cut."""
    out = [BYTES]
    for d in range(1, len(shape)):
        row = math.prod(shape[d:]) * itemsize
        strips = next((n for n in STRIPS if row % (WORD * n) == 0 and row // n >= NARROWEST), 1)
        if strips > 1 and math.prod(shape) * itemsize > BLOCK:
            out.append(Grid(row, strips))
    return out


@dataclass(frozen=True)
class Region:
    """Rows of a grid and strips of these, in which a box lies."""

    grid: Grid
    rows: range
    strips: range = range(1)

    @property
    def columns(self) -> slice:
        """Columns of its rows, in words."""
        width = self.grid.width // WORD
        return slice(self.strips.start * width, self.strips.stop * width)


def region(shape: Sequence[int], itemsize: int, box: Box, keys: Collection[str]) -> Region:
    """Return the fewest whole blocks in which a box of a tensor lies.

    Args:
        shape, itemsize: of the tensor. box: in it. keys: of the grids to choose from.
    """
    inner = [math.prod(shape[d:]) * itemsize for d in range(len(shape) + 1)]  # bytes of these dimensions
    first, last = box.offset[0] * inner[1], (box.offset[0] + box.tensor.shape[0]) * inner[1]
    out = []
    for grid in grids(shape, itemsize):
        strips, high = range(1), grid.height * grid.row
        if grid.strips > 1:
            d = max(d for d in range(1, len(shape)) if inner[d] == grid.row)
            start = box.offset[d] * inner[d + 1]
            stop = start + box.tensor.shape[d] * inner[d + 1]
            strips = range(start // grid.width, math.ceil(stop / grid.width))
        stop = min(math.ceil(last / high) * grid.height, math.ceil(inner[0] / grid.row))
        rows = range(first // high * grid.height, stop)
        out.append(Region(grid, rows, strips))
    return min((x for x in out if x.grid.key in keys), key=lambda x: x.grid.width * len(x.rows) * len(x.strips))


def measured(ways: Iterable[Grid], size: int, view: View) -> dict[str, str]:
    """Return the digests of a tensor of `size` bytes, by grid: 16 hexadecimal digits for each block and strip."""
    out = {}
    for grid in ways:
        windows = grid.windows(range(math.ceil(size / grid.row)), size)
        sums = [grid.sums(view(start, stop), grid.strips) for start, stop in windows]
        digests = grid.digests(sums) if sums else torch.zeros(0)
        out[grid.key] = bytes(as_bytes(digests).tolist()).hex()
    return out


def recorded(of: Region, text: str) -> Tensor:
    """Return the digests `[blocks]` of a region, of its strips together.

    Args:
        of: the region. text: of its grid, as `measured` has put it down.

    Raises:
        ValueError: there are too few.
    """
    first, count = of.rows.start // of.grid.height, math.ceil(len(of.rows) / of.grid.height)
    data = bytearray.fromhex(text)[first * of.grid.strips * WORD : (first + count) * of.grid.strips * WORD]
    if len(data) != count * of.grid.strips * WORD:
        raise ValueError(f"the text of {of.grid.key} ends too early")
    return torch.frombuffer(data, dtype=torch.int64).view(count, -1)[:, of.strips.start : of.strips.stop].sum(1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in the order of its elements, `[bytes]`."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


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
        """Return what is wrong with the tables of these files, so far as they are there."""
        there = [f for f in files if f.name in self.tables and f.exists()]
        others = [f.name for f in there if _table(f) != self.tables[f.name]]
        return [f"{name} is not what was saved: it is damaged, or another one. {self.remedy}" for name in others]

    def fill(self, table: str, name: str, entry: Entry, box: Box, view: View, at: Sequence[int] = ()) -> None:
        """Fill a box from a stored tensor, whose bytes are checked as they are read.

        Args:
            table: the file that says where the tensor lies. With a digest of this there is one of each tensor.
            name: of the tensor. entry: the tensor, or the part of it that begins at `at` in the whole.
            box: in the entry. view: of the entry's bytes.

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
            _pour(view, Region(Grid(math.prod(shape[1:]) * itemsize, 1), rows), shape, entry.dtype, box, False)
            return
        try:
            digests = self.tensors[name][position(at or (0,) * len(entry.shape))]
            of = region(shape, itemsize, box, digests)
            saved = recorded(of, digests[of.grid.key])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{self.file} holds no digests of {name}: {error}. {self.remedy}") from error
        present = of.grid.digests(_pour(view, of, shape, entry.dtype, box, True))[:, 0]
        if wrong := (present != saved).nonzero().flatten().tolist():
            size, block, first = math.prod(shape) * itemsize, of.grid.height * of.grid.row, of.rows.start * of.grid.row
            start, stop = first + wrong[0] * block, first + (wrong[-1] + 1) * block
            raise StateError(
                f"{entry.file} is damaged: bytes {entry.start + start} to {entry.stop - max(0, size - stop)}, of "
                f"{name}, are not what was saved. Copy the file again, or load another checkpoint. {self.remedy}"
            )


def _pour(view: View, of: Region, shape: Sequence[int], dtype: torch.dtype, box: Box, checked: bool) -> list[Tensor]:
    """Fill a box, each row as soon as what is read holds it.

    Args:
        view: of bytes. of: the region to read, with the box in it. shape, dtype: of what is stored.
        box: in that. checked: whether sums are wanted.

    Returns: the sums of the region's rows.
    """
    row, first = math.prod(shape[1:]) * dtype.itemsize, box.offset[0]
    at, last, sums = first, first + len(box.tensor), list[Tensor]()
    for start, stop in of.grid.windows(of.rows, shape[0] * row):
        base = min(start, at * row) if at < last else start
        data = view(base, stop)
        ready = min(stop // row, last)
        if ready > at:
            part = data[at * row - base : ready * row - base]
            part = part.clone() if part.storage_offset() % dtype.itemsize else part
            rows = part.view(dtype).view(ready - at, *shape[1:])
            box.tensor[at - first : ready - first].copy_(rows[(slice(None), *box.slices[1:])])
            at = ready
        if checked:  # after the copy, when all is in the processor's cache
            sums.append(of.grid.sums(data[start - base :], 1, of.columns))
    return sums


def position(at: Sequence[int]) -> str:
    """Return where a part begins in the whole, as text."""
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
    """Return the digest of a file, or of a safetensors file's header."""
    with opened(file, error=StateError) as stream:
        header = stream.read(WORD) if file.suffix == ".safetensors" else b""
        content = stream.read(int.from_bytes(header, "little")) if header else stream.read()
    return hashlib.blake2b(header + content, digest_size=16).hexdigest()


@cache
def mention(folder: Path) -> None:
    """Say that a folder has no digests, once in a process."""
    if not (folder / DIGESTS).exists():
        log.warning("%s has no digests: damage to its files would load unnoticed. Save again to have them.", folder)
