"""Archives of stored tensors, and the comparison of their names, shapes and types with the model's before a load."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp.comm.lockstep import lost, meet
from autotp.comm.ranks import Ranks, from_all
from autotp.errors import StateError
from autotp.ir.graph import NamedTensors
from autotp.ir.op import dtype_name
from autotp.plans.pieces import BUCKET, Block
from autotp.plans.transfers import Send, Spread, transfer
from autotp.runtime import state
from autotp.runtime.interop.ownership import INSTEAD, of_another_rank
from autotp.runtime.storage import Box, ShardState
from autotp.text import indented

from .digests import Entry, as_bytes

AROUND = ".base_layer."  # in the names of what an adapter of PEFT is put around
Boxes = Mapping[str, Sequence[Box]]
Tensors = dict[str, tuple[tuple[int, ...], list[Box]]]  # stored name -> the whole's shape, this rank's boxes
Sources = dict[str, list[str]]  # pattern of transformers' mapping -> stored names


class Archive:
    """Stored tensors by name. A kind of archive reads boxes of a tensor, or all of it: each follows from the other.

    Attributes:
        path: its name in messages. entries: of its tensors. extra: notes beside them.
        shared: other things than the model may be stored beside it.
    """

    shared = False

    def __init__(self, path: Path | str) -> None:
        self.path, self.entries, self.extra = path, dict[str, Entry](), dict[str, Any]()

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        value = self.whole(name)
        for box in boxes:
            box.tensor.copy_(value[box.slices])

    def fill(self, need: Boxes) -> None:
        """Fill boxes by stored names."""
        for name, boxes in need.items():
            self.read(name, boxes)

    def whole(self, name: str) -> Tensor:
        """Return all of the stored tensor `name`."""
        tensor = self.entries[name].empty()
        self.read(name, [Box((0,) * tensor.ndim, tensor)])
        return tensor


class TensorArchive(Archive):
    """A full state dict in memory, of whole tensors or DTensors, or in a pickled file that the user trusts."""

    def __init__(self, tensors: Mapping[str, Any], file: Path | None = None) -> None:
        super().__init__(file or "the state dict")
        if foreign := [n for n, t in tensors.items() if of_another_rank(t)]:
            raise StateError(f"{foreign[0]} is another rank's part: one rank had pickled it for all. {INSTEAD}")
        self.tensors = tensors
        for name, value in tensors.items():
            kind: Any = type(value).__name__
            if isinstance(value, Tensor):
                kind = "on the meta device" if value.is_meta else value.dtype
            self.entries[name] = Entry(tuple(getattr(value, "shape", ())), kind, Path(self.path))

    def whole(self, name: str) -> Tensor:
        """Return the tensor `name`; collective where that is a DTensor."""
        value = self.tensors[name].detach()
        return value.full_tensor() if isinstance(value, DTensor) else value


class Renamed(Archive):
    """An archive under other names.

    Args:
        archive: as it is stored. stored: new name -> name in the archive.
    """

    def __init__(self, archive: Archive, stored: dict[str, str]) -> None:
        super().__init__(archive.path)
        self.archive, self.stored, self.extra = archive, stored, archive.extra
        self.entries = {name: archive.entries[key] for name, key in stored.items()}

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        self.archive.read(self.stored[name], boxes)

    def below(self, need: Boxes) -> Boxes:
        """Return boxes by the names of the archive itself."""
        return {self.stored[name]: boxes for name, boxes in need.items()}

    def fill(self, need: Boxes) -> None:
        """Fill boxes by the new names."""
        self.archive.fill(self.below(need))


@dataclass(frozen=True)
class NameMatch:
    """A match of an archive's names with the model's.

    Attributes:
        stored: first name of each tensor of the model -> the names that it is stored under, more than one where tied.
        missing, unexpected: names as `load_state_dict` reports them.
    """

    stored: dict[str, list[str]]
    missing: list[str]
    unexpected: list[str]


def match(shards: ShardState, archive: Archive, strict: bool, cast: bool) -> NameMatch:
    """Compare the names, shapes and types of an archive with the model's.

    Args:
        shards: of the module. archive: the checkpoint, under the model's names.
        strict: every name must be on both sides. cast: dtypes may differ.

    Raises:
        StateError: tensors are missing, unknown, or of another shape or type; all of them are listed.
    """
    names = _names(shards)
    stored: dict[str, list[str]] = {}
    for name, first in names.items():
        if name in archive.entries:
            stored.setdefault(first, []).append(name)
    # Buffers that are in no state dict may come too, and are not missed.
    missing = [n for n, first in state.named_tensors(shards) if first not in stored]
    ignored = [re.compile(p) for p in getattr(shards.bare, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = []
    for n in archive.entries:
        if n not in names and n not in shards.elsewhere and not any(p.search(n) for p in ignored):
            unexpected.append(n)
    wrong = [text for first, keys in stored.items() for k in keys if (text := _misfit(shards, first, k, archive, cast))]
    if wrong or (strict and (missing or unexpected)):
        raise StateError(_faults_text(archive, missing, unexpected, wrong, cast))
    return NameMatch(stored, missing, unexpected)


def _names(shards: ShardState) -> dict[str, str]:
    """Map each name that may be stored, of the state dict and of non-persistent buffers, to the tensor's first name."""
    buffers = [n for n, _ in shards.root.named_buffers(remove_duplicate=False)]
    return {n: shards.aliases.get(n, n) for n in buffers} | dict(state.named_tensors(shards))


def under_own_names(shards: ShardState, archive: Archive) -> Renamed:
    """Return the archive in the names and forms of the running model.

    A Hugging Face folder may hold the model without its head, a model's body for the headless class, or another form
    for which transformers has a mapping; a training script may have stored the model under a key.
    """
    archive = _converted(shards, archive)

    def key_of(name: str, prefix: str, stripped: str) -> str:
        """Return the stored name; a layer's weight may be stored without the adapter of PEFT around it."""
        full, bare = (prefix + n.removeprefix(stripped) for n in (name, name.replace(AROUND, ".")))
        return full if full in archive.entries else bare

    base, names = f"{getattr(shards.bare, 'base_model_prefix', '')}.", dict(state.named_tensors(shards))
    longest = max(names, key=len, default="")
    outer = sorted({key[: -len(longest)] for key in archive.entries if longest and key.endswith("." + longest)})
    # Prefixes of the stored names and of the model's; the pair that matches most tensors is taken.
    ways = [("", ""), (base, ""), *((prefix, "") for prefix in outer), ("", base)]
    way = max(ways, key=lambda way: len({first for n, first in names.items() if key_of(n, *way) in archive.entries}))
    every = (*_names(shards), *shards.elsewhere)
    stored = {n: key for n in every if (key := key_of(n, *way)) in archive.entries}
    # The rest is unexpected, except beside a model that is stored among other things.
    keys = set(stored.values())
    for key in archive.entries:
        if key not in keys and (not archive.shared or key.startswith(way[0])):
            stored[key if key not in stored else f"{key} (as it is stored)"] = key
    return Renamed(archive, stored)


def _misfit(shards: ShardState, first: str, key: str, archive: Archive, cast: bool) -> str:
    entry, shape, tensor = archive.entries[key], shards.storage_of(first).shape, state.pieces(shards, first)[0]
    what = f"{entry.file.name}: {key} is"
    if isinstance(entry.dtype, str):
        return f"{what} {entry.dtype}: no tensor with values of a type that torch has"
    if entry.shape != shape:
        return f"{what} {list(entry.shape)}, the model has {list(shape)}"
    if entry.dtype != tensor.dtype and not cast:
        return f"{what} {dtype_name(entry.dtype)}, the model has {dtype_name(tensor.dtype)}"
    return ""


def _faults_text(archive: Archive, missing: list[str], unexpected: list[str], wrong: list[str], cast: bool) -> str:
    lines = [f"missing: {name}" for name in missing]
    lines += [f"unknown: {archive.entries[name].file.name}: {name}" for name in unexpected]
    kinds = "" if cast else " Types are changed where cast=True says so."
    return (
        f"{archive.path} does not fit the model, and nothing was loaded.\n{indented([*lines, *wrong])}"
        f"strict=False allows missing and unknown names.{kinds}"
    )


def _converted(shards: ShardState, archive: Archive) -> Archive:
    """Return the archive in the forms of the running model, where transformers has a mapping for it."""
    bare: Any = shards.bare
    if archive.shared or not _mapped(bare):
        return archive
    mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(bare)
    if not mapping:
        return archive
    return Converted(bare, archive, mapping, {n for n, _ in state.named_tensors(shards)})


def reverted(bare: Any, tensors: NamedTensors) -> NamedTensors:
    """Return tensors of the running model in the forms and under the names of its files."""
    if not _mapped(bare):
        return tensors
    loading = importlib.import_module("transformers.core_model_loading")
    back: NamedTensors = loading.revert_weight_conversion(bare, tensors)
    for n, t in back.items():  # a view of another tensor cannot be written as it is
        back[n] = t if t is tensors.get(n) else t.clone(memory_format=torch.contiguous_format)
    return back


def _mapped(bare: Any) -> bool:
    """Return whether this is a transformers model, and that library has the functions used here."""
    loading = sys.modules.get("transformers.core_model_loading")
    members = ("rename_source_key", "revert_weight_conversion", "WeightConverter", "WeightRenaming", "dot_natural_key")
    return hasattr(bare, "base_model_prefix") and all(hasattr(loading, name) for name in members)


class Converted(Renamed):
    """An archive seen through a mapping of transformers. A tensor that the mapping computes is computed whole, one at a
    time, except a stack, of which only the needed items are read."""

    def __init__(self, bare: Any, archive: Archive, mapping: Sequence[Any], names: set[str]) -> None:
        loading = importlib.import_module("transformers.core_model_loading")
        renamings = [m for m in mapping if isinstance(m, loading.WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, loading.WeightConverter)]
        groups: dict[str, tuple[Any, Sources]] = {}
        stored: dict[str, str] = {}
        for key in sorted(archive.entries, key=loading.dot_natural_key):
            name, pattern = (key, None) if key in names else loading.rename_source_key(key, renamings, converters)
            if pattern is None or isinstance(archive.entries[key].dtype, str):
                stored[name if pattern is None else key] = key
                continue
            converter = next(c for c in converters if pattern in c.source_patterns)
            groups.setdefault(name, (converter, {}))[1].setdefault(pattern, []).append(key)
        super().__init__(archive, stored)
        self.bare = bare
        self.groups: dict[str, tuple[str, Any, Sources]] = {}  # new name -> the arguments of the conversion
        for name, (converter, sources) in groups.items():
            self._add(name, converter, sources)

    def _add(self, name: str, converter: Any, sources: Sources) -> None:
        """Add the tensors that a mapping makes of these, by their shapes; where it fails, the stored names stay."""
        entries = {key: self.archive.entries[key] for keys in sources.values() for key in keys}
        try:
            tensors = self._convert(name, converter, sources, lambda k: entries[k].empty("meta"))
        except Exception:  # then they are reported as missing and unknown
            self.entries |= entries
            self.stored |= {key: key for key in entries}
            return
        file = next(iter(entries.values())).file
        for target, t in tensors.items():
            self.entries[target] = Entry(tuple(t.shape), t.dtype, file)
            self.groups[target] = name, converter, sources

    def _convert(self, name: str, converter: Any, sources: Sources, tensor: Callable[[str], Tensor]) -> NamedTensors:
        one = copy.deepcopy(converter)
        for pattern, keys in sources.items():
            for key in keys:
                one.add_tensor(name, key, pattern, tensor(key))
        tensors = one.convert(name, model=self.bare, config=self.bare.config)
        return tensors | {n: t[0] for n, t in tensors.items() if isinstance(t, list)}

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the tensor `name` of the running model."""
        if name not in self.groups:
            super().read(name, boxes)
        elif boxes:
            first, sources = self._stacked(name, boxes)
            tensor = self._convert(*self.groups[name][:2], sources, self.archive.whole)[name]
            for box in boxes:
                box.tensor.copy_(tensor[box.block.slices((first,) + (0,) * (tensor.ndim - 1))])

    def _stacked(self, name: str, boxes: Sequence[Box]) -> tuple[int, Sources]:
        """Return the index of the first stacked tensor (a single expert) that boxes overlap, and the sources needed."""
        _, converter, sources = self.groups[name]
        steps = [f"{type(x).__name__} {getattr(x, 'dim', 0)}" for x in converter.operations]
        if steps not in (["MergeModulelist 0"], ["MergeModulelist 0", "Concatenate 1"]):
            return 0, sources
        first = min(box.offset[0] for box in boxes)
        end = max(box.offset[0] + len(box.tensor) for box in boxes)
        return first, {pattern: keys[first:end] for pattern, keys in sources.items()}

    fill = Archive.fill  # one by one: some are computed


# ---- what other ranks hold -------------------------------------------------------------------------------------------


Holdings = Mapping[str, tuple[tuple[int, ...], Any, Collection[Block]]]  # name -> the whole's shape, type, blocks


class Peers(Archive):
    """Tensors that other ranks hold, as an archive: entries are known on every rank, and `fill` communicates.

    Args:
        ranks: that exchange them. have: this rank's boxes. holdings: of every rank, its blocks of each tensor.
        extra: notes beside them, as of a checkpoint. bucket: bytes of messages that a rank holds at once.
        path: their name in messages.
    """

    shared = True  # an optimizer's states and caches come beside the model

    def __init__(
        self, ranks: Ranks, have: Boxes, holdings: Sequence[Holdings], extra: dict[str, Any],
        bucket: int = BUCKET, path: Path | str = "the source",
    ) -> None:  # fmt: skip
        super().__init__(path)
        self.ranks, self.have, self.holdings, self.extra, self.bucket = ranks, have, holdings, extra, bucket
        for holding in holdings:
            for name, (shape, dtype, _) in holding.items():
                self.entries.setdefault(name, Entry(shape, dtype, Path(path)))

    @staticmethod
    def of(ranks: Ranks, tensors: Tensors, extra: dict[str, Any], bucket: int = BUCKET) -> Peers:
        """Make the archive of the tensors of all ranks. A collective call.

        Args:
            ranks, extra, bucket: see the class. tensors: this rank's.
        """
        have = {name: boxes for name, (_, boxes) in tensors.items() if boxes}
        local = {}
        for name, boxes in have.items():
            local[name] = tensors[name][0], boxes[0].tensor.dtype, _blocks(boxes)
        return Peers(ranks, have, from_all(ranks, local, "which rank has which blocks"), extra, bucket)

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Refuse: tensors of other ranks are read by all ranks together."""
        raise StateError(f"{name} is held by other ranks, and cannot be read by this one alone.")

    def fill(self, need: Boxes) -> None:
        """Fill this rank's boxes from the tensors of all ranks. A collective call.

        Raises:
            RankError: a rank has ended, or left.
        """
        ranks, spreads = self.ranks, {}
        everyone = from_all(ranks, {name: _blocks(boxes) for name, boxes in need.items()}, "the blocks of a move")
        for name, entry in self.entries.items():
            needs = {rank: request[name] for rank, request in enumerate(everyone) if name in request}
            if needs:
                haves = {rank: holding[name][2] for rank, holding in enumerate(self.holdings) if name in holding}
                assert isinstance(entry.dtype, torch.dtype)
                spreads[name] = Spread(entry.shape, entry.dtype.itemsize, haves, needs)
        way, rank = transfer(spreads, self.bucket), ranks.rank
        for send in way.local:
            if send.target == rank:
                _within(need, send).copy_(_within(self.have, send))
        for i, sends in enumerate(way.rounds, 1):
            # Who has ended or left is heard of here: in a round each rank waits for those alone that it exchanges with.
            meet(ranks.channel, f"round {i} of {len(way.rounds)} of a move")
            _round([x for x in sends if rank in (x.source, x.target)], self.have, need, ranks)


def _blocks(boxes: Sequence[Box]) -> list[Block]:
    return [box.block for box in boxes]


def _within(boxes: Boxes, send: Send) -> Tensor:
    """Return the memory of a block, in the box that holds it."""
    parts = (box.within(send.block) for box in boxes[send.name])
    return next(x.tensor for x in parts if x is not None and x.tensor.numel() == send.block.elements)


def _round(sends: Sequence[Send], have: Boxes, need: Boxes, ranks: Ranks) -> None:
    """Exchange blocks with the ranks that this one sends to or receives from; both sides have the same order."""
    operations, arrivals = [], []
    for x in sends:
        if x.source == ranks.rank:
            data = as_bytes(_within(have, x)).to(ranks.device)
            operations.append(dist.P2POp(dist.isend, data, group=ranks.group, group_peer=x.target))
        else:
            data = torch.empty(x.nbytes, dtype=torch.uint8, device=ranks.device)
            operations.append(dist.P2POp(dist.irecv, data, group=ranks.group, group_peer=x.source))
            arrivals.append((_within(need, x), data))
    _wait(operations, ranks)
    for part, data in arrivals:
        part.copy_(data.view(part.dtype).view(part.shape))


def _wait(operations: list[Any], ranks: Ranks) -> None:
    """Wait for all operations of a round, also after one has failed: the other ranks get what they wait for.

    Raises:
        RankError: a rank has ended; it is named.
    """
    errors = []
    for work in dist.batch_isend_irecv(operations) if operations else ():
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)
    for error in errors:
        lost(error, ranks.group_name)
        raise error
