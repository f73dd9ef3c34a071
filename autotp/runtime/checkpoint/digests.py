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

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from autotp.runtime.storage import Box

BLOCK, PAGE, WORD = 4 << 20, 4096, 8  # bytes
STRIPS, NARROWEST = (16, 8, 4, 2), 256  # of a row; bytes of one


class Source(Protocol):
    """The bytes of a stored tensor."""

    def view(self, start: int, stop: int) -> Tensor:
        """Those from one place to another, of which no more are read than are looked at."""
        ...

    def read(self, start: int, out: Tensor) -> None:
        """Read as many as `out` has, from `start` on."""
        ...


@dataclass(frozen=True)
class Memory:
    """Bytes that are in memory."""

    data: Tensor

    def view(self, start: int, stop: int) -> Tensor:
        """A slice."""
        return self.data[start:stop]

    def read(self, start: int, out: Tensor) -> None:
        """Copy."""
        out.copy_(self.data[start : start + len(out)])


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
        """The bytes of some rows, about 4 MiB at a time; of a tensor of `size` bytes, whose last row may be cut off."""
        step, end = max(1, BLOCK // self.row) * self.row, min(rows.stop * self.row, size)
        yield from ((at, min(at + step, end)) for at in range(rows.start * self.row, end, step))

    def sums(self, data: Tensor, parts: int = 1, columns: slice = slice(None)) -> Tensor:
        """Each row's sums of words, `[rows, parts]`; what a cut-off row lacks is zeros.

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
        """The digests `[blocks, parts]` of blocks, of the sums of all their rows in order."""
        rows = torch.cat([*sums])
        rows = pad(rows, (0, 0, 0, -len(rows) % self.height)).view(-1, self.height, rows.shape[1])
        return (rows * _odd(self.height, rows.device)).sum(1)


@cache
def _odd(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, device=device)[:, None]


BYTES = Grid(PAGE, 1)  # in order


def grids(shape: Sequence[int], itemsize: int) -> list[Grid]:
    """The ways in which a tensor is cut."""
    out = [BYTES]
    for d in range(1, len(shape)):
        row = math.prod(shape[d:]) * itemsize
        strips = next((n for n in STRIPS if row % (WORD * n) == 0 and row // n >= NARROWEST), 1)
        if strips > 1 and math.prod(shape) * itemsize > BLOCK:
            out.append(Grid(row, strips))
    return out


@dataclass(frozen=True)
class Region:
    """Rows of a grid and strips of these, in which a box lies; `exact` where they are the box and nothing else."""

    grid: Grid
    rows: range
    strips: range = range(1)
    exact: bool = False

    @property
    def columns(self) -> slice:
        """Of its rows, in words."""
        width = self.grid.width // WORD
        return slice(self.strips.start * width, self.strips.stop * width)


def region(shape: Sequence[int], itemsize: int, box: Box, keys: Collection[str]) -> Region:
    """The fewest whole blocks in which a box of a tensor lies.

    Args:
        shape, itemsize: of the tensor. box: in it. keys: of the grids to choose from.
    """
    inner = [math.prod(shape[d:]) * itemsize for d in range(len(shape) + 1)]  # bytes of these dimensions
    first, last = box.offset[0] * inner[1], (box.offset[0] + box.tensor.shape[0]) * inner[1]
    out = []
    for grid in grids(shape, itemsize):
        strips, high, of_box = range(1), grid.height * grid.row, 0
        if grid.strips > 1:
            d = max(d for d in range(1, len(shape)) if inner[d] == grid.row)
            start = box.offset[d] * inner[d + 1]
            stop = start + box.tensor.shape[d] * inner[d + 1]
            strips = range(start // grid.width, math.ceil(stop / grid.width))
            of_box = box.tensor.numel() * itemsize
        stop = min(math.ceil(last / high) * grid.height, math.ceil(inner[0] / grid.row))
        rows = range(first // high * grid.height, stop)
        out.append(Region(grid, rows, strips, of_box == len(rows) * len(strips) * grid.width))
    return min((x for x in out if x.grid.key in keys), key=lambda x: x.grid.width * len(x.rows) * len(x.strips))


def measured(ways: Iterable[Grid], size: int, source: Source) -> dict[str, str]:
    """The digests of a tensor of `size` bytes, by grid: 16 hexadecimal digits for each block and strip."""
    out = {}
    for grid in ways:
        windows = grid.windows(range(math.ceil(size / grid.row)), size)
        sums = [grid.sums(source.view(start, stop), grid.strips) for start, stop in windows]
        digests = grid.digests(sums) if sums else torch.zeros(0)
        out[grid.key] = bytes(as_bytes(digests).tolist()).hex()
    return out


def recorded(of: Region, text: str) -> Tensor:
    """The digests `[blocks]` of a region, of its strips together.

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
    """The bytes of a tensor in the order of its elements, `[bytes]`."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
