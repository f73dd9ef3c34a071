"""DCP folders (`torch.distributed.checkpoint`): boxes written and read under the original's names."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from autotp.errors import StateError
from autotp.ir.files import MAX_NUMBER, opened, read_json
from autotp.plans.pieces import Block
from autotp.runtime.storage import Box
from autotp.text import indented, message_of

from . import folders
from .archives import Archive, Tensors
from .digests import Digests, Entry, View, as_bytes, bytes_view, measured, position, write

TABLE = ".metadata"
MAX_TABLE_BYTES, MAX_NOTES_BYTES = 1 << 30, 100_000_000  # of .metadata, and of our own notes


class Planner(DefaultSavePlanner):
    """Planner of a save by boxes; boxes that several ranks have are written once.

    Args:
        tensors: stored name -> (the whole's shape, this rank's boxes).
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.tensors, self.boxes = tensors, dict[MetadataIndex, Tensor]()
        self.digests: dict[str, dict[str, dict[str, str]]] = {}  # of what this rank has written

    def create_local_plan(self) -> SavePlan:
        """Return one item for each box of this rank."""
        items = []
        for name, (shape, boxes) in self.tensors.items():
            for box in boxes:
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offset), box.tensor.shape),
                    properties=TensorProperties.create_from_tensor(box.tensor),
                    size=torch.Size(shape),
                )
                index = MetadataIndex(name, torch.Size(box.offset))
                self.boxes[index] = box.tensor
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        # "model.a.b" is b of a of the model: so torch's own tools read it as {"model": state_dict}
        nested = {name: tuple(name.split(".", 1)) for name in self.tensors}
        self.plan = SavePlan(items, planner_data=nested)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the box."""
        return self.boxes[index]

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the box, and record its digests: it is written now."""
        tensor, index = super().resolve_data(write_item), write_item.index
        assert isinstance(tensor, Tensor) and index.offset is not None
        data = as_bytes(tensor)
        digests = measured(len(data), bytes_view(data))
        self.digests.setdefault(index.fqn, {})[position(index.offset)] = digests
        return tensor


class Writer(FileSystemWriter):
    """Writer into a draft of the folder, which is put in its place once every rank has written."""

    def __init__(self, path: Path, notes: str) -> None:
        super().__init__(folders.draft_of(path))
        self.place, self.notes = path, notes

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write the metadata, our own notes and the digests, and commit: on one rank, after all have written.

        Args:
            metadata: of all that is saved. results: of each rank what DCP says of its items, and their digests.
        """
        super().finish(metadata, [items for items, _ in results])
        draft, digests = folders.draft_of(self.place), dict[str, Any]()
        (draft / folders.OWN).write_text(self.notes, encoding="utf-8")
        for _, of_rank in results:
            for name, parts in of_rank.items():
                digests.setdefault(name, {}).update(parts)
        write(draft, digests)
        folders.commit(self.place)


class Files(Archive):
    """A DCP folder, read box by box. Its table is a pickle, of which only DCP's own plain records are made."""

    shared = True  # an optimizer's state may be stored beside the model's

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder, self.reader, self.digests = path, Reader(path), Digests(path)
        # Before they are read: one flipped bit can make a pickle that takes all memory.
        self._refuse(self.digests.faults(path / TABLE, path / folders.OWN))
        self.metadata = self.reader.read_metadata()
        # The unpickler restricts the classes; a pickle fills their fields as it likes: each that is read is checked.
        try:
            faults = [fault for name in self.metadata.state_dict_metadata for fault in self._add(name)]
        except (AttributeError, TypeError, ValueError) as error:
            raise StateError(f"{path / TABLE} is no table of tensors: {error}. Save the checkpoint again.") from error
        self._refuse(faults)
        self.reader.set_up_storage_reader(self.metadata, False)
        self.extra = _notes(path / folders.OWN)

    def _refuse(self, faults: Sequence[str]) -> None:
        if faults:
            raise StateError(f"{self.path} cannot be loaded, and nothing was:\n{indented(faults)}")

    def _add(self, name: str) -> Iterator[str]:
        """Add the entry of a tensor of the table, and yield the faults of its chunks' places.

        Raises:
            AttributeError, TypeError, ValueError: its records are of anything else than names, sizes and places.
        """
        tensor = self.metadata.state_dict_metadata[name]
        if isinstance(tensor, metadata.BytesStorageMetadata):
            return
        # A pickle may as well say "float32", which no tensor's dtype equals.
        kinds = ((name, str), (tensor, TensorStorageMetadata), (tensor.properties.dtype, torch.dtype))
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError(f"it has a {type(tensor).__name__} of another kind under {str(name)[:80]!r}")
        _numbers(name, tensor.size)
        file = self.folder
        for chunk in tensor.chunks:
            _numbers(name, chunk.offsets, chunk.sizes)
            # Numbers may be sizes and still not fit together: rows 6 to 8 of a tensor of 7.
            if any(a + b > n for a, b, n in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)):
                raise ValueError(f"a part of {name} is outside of it")
            record = self.metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if record is None:
                yield f".metadata: says in no file where {name} from {list(chunk.offsets)} is"
                continue
            # An offset of -1 would be an invalid argument of the system in the middle of reading.
            _numbers(name, torch.Size((record.offset, record.length)))
            place = PurePosixPath(record.relative_path)
            file, stop = self.folder / place, record.offset + record.length
            if place.is_absolute() or ".." in place.parts:
                yield f".metadata: {name} is outside of the folder, in {record.relative_path}"
            elif stop > (size := file.stat().st_size if file.is_file() else -1):
                state = "is not there" if size < 0 else f"ends at byte {size}: cut off"
                yield f"{place}: {name} ends at byte {stop}, and the file {state}"
        self.entries[name] = Entry(tuple(tensor.size), tensor.properties.dtype, file)

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        stored: Any = self.metadata.state_dict_metadata[name]
        for chunk in stored.chunks:
            block = Block(tuple(chunk.offsets), tuple(chunk.sizes))
            parts = [part for box in boxes if (part := box.within(block)) is not None]
            if parts:
                entry, data = self._part(name, block)
                for part in parts:
                    self.digests.fill(TABLE, name, entry, part, data, block.offset)

    def _part(self, name: str, block: Block) -> tuple[Entry, View]:
        """Return a stored part of a tensor: its place, and its bytes."""
        record = self.reader.storage_data[MetadataIndex(name, torch.Size(block.offset))]
        file, dtype = self.folder / record.relative_path, self.entries[name].dtype
        try:
            part = self.reader.part(record)
            if (part.shape, part.dtype) != (block.size, dtype):
                raise ValueError(f"{part.dtype} {list(part.shape)} is stored there, not {dtype} {list(block.size)}")
            entry = Entry(block.size, dtype, file, record.offset, record.offset + record.length)
            return entry, bytes_view(as_bytes(part))
        except Exception as error:  # whatever a damaged file makes of itself
            raise StateError(f"{file}: {name} cannot be read: {error}") from error


class Reader(FileSystemReader):
    """DCP's reader, whose table is read without running anything that it asks for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's `.metadata`."""
        file = Path(self.path) / TABLE
        try:
            with opened(file, MAX_TABLE_BYTES, error=StateError) as stream:
                records = Records(stream).load()
        except StateError:
            raise
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise StateError(f"{file} cannot be read: {message_of(error)}. Is it cut off?") from error
        if not isinstance(records, Metadata):
            raise StateError(f"{file} holds a {type(records).__name__} and no DCP metadata.")
        return records

    def part(self, record: Any) -> Tensor:
        """Return the whole stored tensor of a record."""
        unread: Any = None  # which box it is for: no transform asks
        with self.fs.create_stream(self.fs.concat_path(self.path, record.relative_path), "rb") as file:
            view: Any = self._slice_file(file, record)
            stream = self.transforms.transform_load_stream(unread, record.transform_descriptors or (), view)
            stream = stream if stream.seekable() else io.BytesIO(stream.read())
            return torch.load(stream, map_location="cpu", weights_only=True)


class Records(pickle.Unpickler):
    """An unpickler that makes DCP's plain records, and refuses every other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few classes that a table consists of."""
        if module == metadata.__name__:
            kind = getattr(metadata, name, None)
            if isinstance(kind, type) and kind.__module__ == module:
                return kind
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "Path"):
            return pathlib.PurePosixPath
        classes = {
            ("torch", "Size"): torch.Size,
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
            ("torch.serialization", "_get_layout"): _layout,
        }
        if (module, name) in classes:
            return classes[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise StateError(
            f"the .metadata of this DCP folder asks for {module}.{name}, which no table of tensors needs: it is not "
            "opened. Do not load it unless you know where it is from."
        )


def _numbers(name: str, *sizes: Any) -> None:
    for x in sizes:
        if not isinstance(x, torch.Size) or not all(0 <= n <= MAX_NUMBER for n in x):
            raise TypeError(f"the sizes of {name} are not sizes")


class _StorageInfo:
    """Stand-in for DCP's private record of a chunk's place."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise StateError(f"the .metadata of this DCP folder has a tensor of layout {name}: only strided ones are read.")
    return torch.strided


def _notes(file: Path) -> dict[str, Any]:
    notes = read_json(file, MAX_NOTES_BYTES, error=StateError) if file.exists() else {}
    if not isinstance(notes, dict) or not isinstance(notes.get("extra", {}), dict):
        raise StateError(f"{file} is not what a checkpoint of autotp holds there. Take it away, or save again.")
    return notes
