"""Safetensors files: their headers checked before anything is read, then slices and only those."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from autotp.errors import StateError
from autotp.ir.files import bounded, opened, read_json
from autotp.runtime.storage import Box

from .checked import Digests, Entry, position, write
from .digests import grids, measured

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
LARGEST_INDEX = 100_000_000  # bytes: of millions of names
INDEX = ".safetensors.index.json"


class TensorFiles:
    """One safetensors file, or a folder of them with an index. Nothing but headers is read here."""

    shared = False  # every tensor in it should be the model's

    def __init__(self, path: Path) -> None:
        self.path = path
        self.extra: dict[str, Any] = {}
        faults: list[str] = []
        if path.is_dir():
            self.entries = _of_folder(path, faults)
        else:
            self.entries = _header(path, faults)
        self.digests = Digests(path if path.is_dir() else path.parent)
        faults += self.digests.faults(*dict.fromkeys(entry.file for entry in self.entries.values()))
        if faults:
            raise StateError(
                f"{path} cannot be loaded, and nothing was:\n"
                + "".join(f"  {fault}\n" for fault in faults)
                + "The files are damaged, or not complete: download or save them again."
            )

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        entry = self.entries[name]
        for box in boxes:
            self.digests.fill(entry.file.name, name, entry, box, _Stored(entry))


def record(folder: Path) -> None:
    """Write the digests of a folder's safetensors files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file, []).items():
            assert isinstance(entry.dtype, torch.dtype)
            ways = grids(entry.shape, entry.dtype.itemsize)
            digests = measured(ways, entry.stop - entry.start, _Stored(entry))
            tensors[name] = {position((0,) * len(entry.shape)): digests}
    write(folder, tensors)


@dataclass(frozen=True)
class _Stored:
    """The bytes of a tensor in a file."""

    entry: Entry

    def view(self, start: int, stop: int) -> Tensor:
        """Map them; they are of the file as long as somebody holds this."""
        first = (self.entry.start + start) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._file() as file:
            size = self.entry.start + stop - first
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=first)
        return torch.frombuffer(data, dtype=torch.uint8)[self.entry.start + start - first :]

    def read(self, start: int, out: Tensor) -> None:
        """Read them."""
        with self._file() as file:
            file.seek(self.entry.start + start)
            if file.readinto(out.numpy().data) != len(out):
                raise ValueError("it ends too early")

    @contextmanager
    def _file(self) -> Iterator[BufferedReader]:
        try:
            with open(self.entry.file, "rb") as file:
                yield file
        except (OSError, ValueError) as error:
            raise StateError(f"{self.entry.file} cannot be read: {error}") from error


def _of_folder(folder: Path, faults: list[str]) -> dict[str, Entry]:
    """The tensors of a folder: `model.safetensors`, else by the index, else of the one file there is."""
    files = sorted(folder.glob("*.safetensors"))
    indices = sorted(folder.glob("*" + INDEX))
    file = folder / "model.safetensors"
    if file in files:
        return _header(file, faults)
    if len(indices) == 1:
        return _of_index(indices[0], faults)
    if len(files) == 1 and not indices:
        return _header(files[0], faults)
    raise StateError(
        f"{folder} holds {len(files)} safetensors files and {len(indices)} indices, and no model.safetensors: which of "
        "them are the model is not said. Give one file, or a folder with one index."
    )


def _of_index(index: Path, faults: list[str]) -> dict[str, Entry]:
    """The tensors of the files that an index names; what cannot be true of it is added to `faults`."""
    try:
        weight_map = read_json(index, LARGEST_INDEX, error=StateError)["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (StateError, KeyError, TypeError, AttributeError) as error:
        faults.append(f"{index.name}: no index of tensors: {type(error).__name__} {error}")
        return {}
    # Each file's header once: a hundred tensors of model-00001-of-00002.safetensors would read it a hundred times.
    headers: dict[str, dict[str, Entry]] = {}
    for file in dict.fromkeys(file_of.values()):
        place = PurePosixPath(file)
        # The index may be anybody's: "../../other/model.safetensors" would be read from outside.
        if place.is_absolute() or ".." in place.parts or "\\" in file or ":" in file:
            faults += [
                f"{index.name}: {n} lies outside of the folder, in {file}" for n, f in file_of.items() if f == file
            ]
        else:
            headers[file] = _header(index.parent / file, faults)
    entries: dict[str, Entry] = {}
    for name, file in file_of.items():
        if name in headers.get(file, {}):
            entries[name] = headers[file][name]
        # Of a file that is missing or cut off its header has said so, once and not for each tensor.
        elif headers.get(file):
            faults.append(f"{file}: does not hold {name}, which {index.name} says it does")
    for tensors in headers.values():  # what the index does not name is left to the comparison with the model
        entries = tensors | entries
    return entries


def _header(path: Path, faults: list[str]) -> dict[str, Entry]:
    """The tensors of a file by its header; what cannot be true of the file is added to `faults`."""
    try:
        with opened(path, error=StateError) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                faults.append(
                    f"{path.name}: has {size} bytes, and a header of {length}: empty, cut off, or another format"
                )
                return {}
            table = json.loads(file.read(length), object_pairs_hook=_once)
        bounded(table, path.name, error=StateError)
        table.pop("__metadata__", None)
        records = {name: (t["dtype"], tuple(t["shape"]), *t["data_offsets"]) for name, t in table.items()}
        return _checked(path, records, 8 + length, size - 8 - length, faults)
    except (StateError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        faults.append(f"{path.name}: the header cannot be read: {type(error).__name__}: {error}")
        return {}


def _checked(path: Path, records: dict[str, Any], data: int, size: int, faults: list[str]) -> dict[str, Entry]:
    """The entries of a header, where every tensor lies in the file, has its shape's bytes, and overlaps no other.

    Args:
        path: of the file. records: of the header. data, size: where the data start, and their bytes.
        faults: what is not so is added here.
    """
    end, places = 0, dict[str, tuple[int, int]]()
    for name, (kind, shape, start, stop) in sorted(records.items(), key=lambda x: (x[1][2], x[1][3])):
        itemsize = DTYPES[kind].itemsize if kind in DTYPES else 0
        numbers = (*shape, start, stop)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers) or stop < start:
            faults.append(f"{path.name}: {name} has shape {list(shape)} at bytes {start} to {stop}")
            continue
        places[name] = data + start, data + stop
        if stop > size:
            faults.append(f"{path.name}: {name} ends at byte {stop} of the data, which end at {size}: cut off")
        elif itemsize and stop - start != math.prod(shape) * itemsize:
            faults.append(f"{path.name}: {name} is {kind} {list(shape)} and has {stop - start} bytes")
        elif start != end:
            faults.append(f"{path.name}: {name} starts at byte {start}, and the tensor before it ends at {end}")
        end = max(end, stop)
    if end < size:
        faults.append(f"{path.name}: {size - end} bytes belong to no tensor")
    return {
        name: Entry(shape, DTYPES[kind] if kind in DTYPES else str(kind), path, *places.get(name, ()))
        for name, (kind, shape, *_) in records.items()
    }


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
    return table
