"""Safetensors files: their headers checked before anything is read, then slices and only those."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autotp.errors import StateError
from autotp.ir.files import opened, read_json
from autotp.runtime.storage import Box
from autotp.text import indented

from .archives import Archive
from .digests import Digests, Entry, measured, position, write
from .folders import matching

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
MAX_INDEX_BYTES = 100_000_000  # of millions of names
INDEX = ".safetensors.index.json"


class TensorFiles(Archive):
    """One safetensors file, or a folder of them with an index. Nothing but headers is read here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        faults: list[str] = []
        self.entries = (_of_folder if path.is_dir() else _header)(path, faults)
        self.digests = Digests(path if path.is_dir() else path.parent)
        faults += self.digests.faults(*dict.fromkeys(entry.file for entry in self.entries.values()))
        if faults:
            raise StateError(
                f"{path} cannot be loaded, and nothing was:\n{indented(faults)}The files are damaged, or not complete: "
                "download or save them again."
            )

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        entry = self.entries[name]
        for box in boxes:
            self.digests.fill(entry.file.name, name, entry, box, partial(mapped, entry))


def record(folder: Path) -> None:
    """Write the digests of a folder's safetensors files."""
    tensors = {}
    for file in matching(folder, "*.safetensors"):
        for name, entry in _header(file, []).items():
            digests = measured(entry.stop - entry.start, partial(mapped, entry))
            tensors[name] = {position((0,) * len(entry.shape)): digests}
    write(folder, tensors)


def mapped(entry: Entry, start: int, stop: int) -> Tensor:
    """Map bytes of a stored tensor; they are of the file as long as somebody holds this."""
    first = (entry.start + start) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with open(entry.file, "rb") as file:
            size = entry.start + stop - first
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=first)
    except (OSError, ValueError) as error:
        raise StateError(f"{entry.file} cannot be read: {error}") from error
    return torch.frombuffer(data, dtype=torch.uint8)[entry.start + start - first :]


def _of_folder(folder: Path, faults: list[str]) -> dict[str, Entry]:
    """Return the tensors of a folder: `model.safetensors`, else by the index, else of the one file there is."""
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
    """Return the tensors of the files that an index names; contradictions are added to `faults`."""
    try:
        weight_map = read_json(index, MAX_INDEX_BYTES, error=StateError)["weight_map"]
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
                f"{index.name}: {n} is outside of the folder, in {file}" for n, f in file_of.items() if f == file
            ]
        else:
            headers[file] = _header(index.parent / file, faults)
    entries = {}
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
    """Return the tensors of a file by its header; contradictions are added to `faults`."""
    try:
        # `safe_open` refuses a header that is not true of the file, such as sizes that overlap or end behind it.
        with opened(path, error=StateError) as file, safe_open(path, "numpy"):
            length = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        entries = {}
        for name, t in table.items():
            start, stop = t["data_offsets"]
            kind: Any = DTYPES.get(t["dtype"], t["dtype"])
            entries[name] = Entry(tuple(t["shape"]), kind, path, 8 + length + start, 8 + length + stop)
        return entries
    except (StateError, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        faults.append(f"{path.name}: the header cannot be read: {error}")
        return {}
