"""Load a checkpoint into a sharded module: everything is checked first, then each rank reads its own slices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autotp.capture.copies import plain_state
from autotp.comm.ranks import agree, together
from autotp.errors import InputError, StateError
from autotp.ir.files import PathLike, opened, read_json
from autotp.runtime import state
from autotp.runtime.call_message import few, short
from autotp.runtime.storage import Box, ShardState, same_layout
from autotp.text import indented, message_of

from . import dcpfiles, folders, optimizers
from .archives import Archive, NameMatch, Renamed, TensorArchive, match, under_own_names
from .digests import as_bytes
from .tensorfiles import INDEX, TensorFiles

PARTLY = "The module may hold a part of it by now: load it again, whole, before you use the module."
UNCHANGED = "The optimizer has the state that it had."
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
Memory = dict[Tensor, Tensor]  # a tensor on the meta device -> what is to stand in its place
NOTES = 200  # characters of what was saved beside weights that ranks compare


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        missing_keys, unexpected_keys: as `load_state_dict` reports them; empty unless `strict=False`.
        extra: what was given to `save` as `extra`.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    extra: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def load(
    shards: ShardState,
    source: PathLike | Mapping[str, Any] | Archive,
    *,
    optimizer: Optimizer | None = None,
    strict: bool = True,
    cast: bool = False,
    check_finite: bool = False,
    trusted: bool = False,
    weights: bool = True,
    renamed: bool = True,
) -> Loaded:
    """Load a checkpoint; `ShardedModule.load_checkpoint` says what the arguments are. A collective call.

    Args:
        shards: of the module. source, optimizer, strict, cast, check_finite, trusted: see there.
        weights: False loads the optimizer alone.
        renamed: follow prefixes and transformers' mapping where the names are others than the model's.
    """
    ranks = shards.planners

    def prepare() -> tuple[Archive, Archive, NameMatch, Any]:
        stored = open_archive(source, trusted)
        archive = under_own_names(shards, stored) if renamed else stored
        matches = match(shards, archive, strict, cast) if weights else NameMatch({}, [], [])
        states = optimizers.matching(shards, optimizer, stored) if optimizer is not None else None
        return stored, archive, matches, states

    stored, archive, matches, states = together(ranks, "reading what the checkpoint holds", prepare)
    tensors = stored.tensors if isinstance(stored, TensorArchive) else {}
    # Two folders of one model have the same names and shapes: they differ by what they are called, or by their notes.
    facts = {"name": "" if tensors else Path(archive.path).name, "notes": str(archive.extra.get("extra", {}))[:NOTES]}
    facts |= {"strict, cast": f"{strict}, {cast}", "optimizer": optimizer is not None}
    facts |= {n: few(t) for n, t in tensors.items()}
    kinds = [(name, e.shape, str(e.dtype)) for name, e in sorted(stored.entries.items())]
    agree(ranks, "the checkpoint", {"names, shapes and types": short(kinds).hex(), **facts})
    shards.show_own()
    together(ranks, "checking the checkpoint", lambda: _check(shards, archive, matches, check_finite))
    replacements = together(ranks, "reading the tensors", lambda: _read(shards, archive, matches, tensors))
    if weights:
        settle(shards, replacements)
    # The weights first: where the states cannot be read, the error says that the optimizer has what it had.
    if optimizer is not None:
        into = partial(_leaving, UNCHANGED, partial(optimizers.load, shards, optimizer, stored, states))
        together(ranks, "reading the optimizer's state", into)
    return Loaded(matches.missing, matches.unexpected, archive.extra.get("extra", {}))


def open_archive(source: PathLike | Mapping[str, Any] | Archive, trusted: bool) -> Archive:
    """Return the archive of a checkpoint, of the kind that its files say."""
    if isinstance(source, Archive):
        return source
    if not isinstance(source, Mapping | str | os.PathLike):
        raise StateError(f"a checkpoint is a path or a full state dict, and got {type(source).__name__}.")
    # A state dict has no files; weights that torchao quantised are in it as tensors that wrap others: their parts are
    # taken.
    if isinstance(source, Mapping):
        return TensorArchive(plain_state(source))
    # A save that was cut off between its two renames has left `.ckpt.previous` and no `ckpt`: that is the one to read.
    path = folders.present(Path(source))
    if not path.exists():
        raise StateError(f"there is no {path}: give a Hugging Face or DCP folder, or a safetensors file.")
    # DCP's files hold parts of tensors, and only the table says which.
    if path.is_dir() and (path / ".metadata").exists():
        return dcpfiles.Files(path)
    # Before pickles: a folder with model.safetensors and pytorch_model.bin is read without opening what can run code.
    if path.suffix == ".safetensors" or (
        path.is_dir() and any(p.name.endswith((".safetensors", INDEX)) for p in path.iterdir())
    ):
        return TensorFiles(path)
    pickles = [path]
    if not path.is_file():
        pickles = sorted(p for p in path.iterdir() if p.suffix in PICKLES)
    # By its name, without opening it: README.md would be called a pickle, which trusted=True opens.
    if not pickles or (path.is_file() and path.suffix not in PICKLES):
        raise StateError(
            f"{path} is no checkpoint that can be read: a folder needs *.safetensors (with an index where there are "
            "several) or DCP's .metadata; a file must be *.safetensors."
        )
    return _pickled(pickles, trusted)


def _pickled(files: Sequence[Path], trusted: bool) -> TensorArchive:
    names = ", ".join(f.name for f in files)
    if not trusted:
        raise StateError(
            f"{files[0].parent} holds its weights as pickles ({names}), which can run code when they are opened. If "
            "you know where they are from, pass trusted=True; better, save them as safetensors."
        )
    tensors: dict[str, Any] = {}
    for file in files:
        with opened(file, error=StateError):
            pass  # a regular file
        try:
            state_dict = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever a damaged file makes of itself
            raise StateError(f"{file} cannot be read: {message_of(error)}") from error
        if not isinstance(state_dict, Mapping):
            raise StateError(f"{file} holds a {type(state_dict).__name__} and no state dict.")
        tensors |= state_dict
    return TensorArchive(tensors, files[0])


def _check(shards: ShardState, archive: Archive, matches: NameMatch, check_finite: bool) -> None:
    """Check values before any is loaded: tied tensors are equal, and where asked all are finite."""
    faults = []
    for first, keys in matches.stored.items():
        # All values are read a second time when they are loaded, so only what must be known before is read here.
        if len(keys) < 2 and not check_finite:
            continue
        ones = [_scratch(shards, archive, first, key) for key in keys]
        # By bits, so that two NaN are equal, and 0 and -0 are not.
        tied = [(a, b) for other in ones[1:] for a, b in zip(ones[0], other, strict=True)]
        if any(not torch.equal(as_bytes(a), as_bytes(b)) for a, b in tied):
            faults.append(f"{' and '.join(keys)} differ, and in the model they are one tied tensor")
        if check_finite:
            pairs = zip(keys, ones, strict=True)
            bad = [k for k, values in pairs if not all(map(_finite, values))]
            faults += [f"{archive.entries[k].file.name}: {k} holds NaN or an infinity" for k in bad]
    if faults:
        raise StateError(f"{archive.path} was not loaded:\n{indented(faults)}")


def _scratch(shards: ShardState, archive: Archive, first: str, key: str) -> list[Tensor]:
    """Return this rank's part of a stored tensor, in new memory."""
    one = archive.entries[key].empty("meta")
    out = [Box(b.offset, one.new_empty(b.tensor.shape, device="cpu")) for b in state.boxes(shards, first)]
    archive.read(key, out)
    return [b.tensor for b in out]


def _finite(x: Tensor) -> bool:
    eight_bits = x.is_floating_point() and x.element_size() == 1  # torch has no isfinite for those
    dtype = torch.float32 if eight_bits else x.dtype
    parts = x.reshape(-1).split(1 << 18)  # the result of the test takes memory too
    return all(bool(part.to(dtype).isfinite().all()) for part in parts)


def _read(shards: ShardState, archive: Archive, matches: NameMatch, tensors: Mapping[str, Any]) -> Memory:
    """Read every tensor, and return memory for those on the meta device.

    Args:
        shards: of the module. archive, matches: what is stored. tensors: of a state dict, by name.
    """
    replacements = {}
    in_place = any(not old.is_meta for first in matches.stored for old in state.pieces(shards, first))
    need = boxes_of(shards, matches, replacements)
    for first, (key, *_) in matches.stored.items():
        value, now = tensors.get(key), memory_of(shards, state.pieces(shards, first), replacements)
        if isinstance(value, DTensor) and len(now) == 1 and same_layout(now[0], value):
            now[0].copy_(value)  # nothing is gathered
            del need[key]
    _leaving(PARTLY if in_place else "Nothing was loaded.", partial(archive.fill, need))
    return replacements


def boxes_of(shards: ShardState, matches: NameMatch, replacements: Memory) -> dict[str, list[Box]]:
    """Return this rank's boxes of the model's tensors, by the name that each is stored under.

    Args:
        shards: of the module. matches: the stored names. replacements: see `memory_of`.
    """
    need = {}
    for first, (key, *_) in matches.stored.items():
        tensors = memory_of(shards, state.pieces(shards, first), replacements)
        need[key] = shards.storage_of(first).boxes(tensors)
    return need


def settle(shards: ShardState, replacements: Memory) -> None:
    """Install the memory of parameters that had none, and note that all ranks have the same weights."""
    if replacements:
        state.install(shards, replacements)
    shards.loaded()


def memory_of(shards: ShardState, tensors: Sequence[Tensor], replacements: Memory) -> list[Any]:
    """Return the tensors to write to: those that hold a parameter, or new memory for those on the meta device.

    Args:
        shards: of the module. tensors: that hold it. replacements: meta tensor -> memory; grows.
    """
    for old in tensors:
        if old.is_meta and old not in replacements:
            replacements[old] = torch.empty_like(old, device=shards.device)
    return [replacements.get(old, old) for old in tensors]


def _leaving(state_after: str, read: Callable[[], None]) -> None:
    """Read, and add the resulting state to an error."""
    try:
        read()
    except StateError as error:
        raise StateError(f"{error} {state_after}") from error


# ---- adapters of PEFT ------------------------------------------------------------------------------------------------


CONFIG, BEFORE = "adapter_config.json", "base_model.model."  # of a folder; what stands before its names
MAX_BYTES = 10_000_000  # of a config
DRAWN = (True, False, "gaussian", None)  # beginnings of an adapter that leave the layer's own weight as it is
NO_ADAPTER = "{folder} is no folder of an adapter of PEFT: it holds no " + CONFIG + "."
UNFIT = "{folder}: this adapter cannot be put into {model}: {error}."
BEGUN = (
    "init_lora_weights is {!r}, which changes the base's weights. Save it with path_initial_model_for_weight_conversion"
)


def add_adapters(model: Any, folders: Mapping[str, Path]) -> None:
    """Put adapters into a model, and make all of them active: a plan is then of all.

    Args:
        model: of transformers, without weights. folders: by the adapters' names.

    Raises:
        InputError: a folder holds none, or it does not fit the model.
    """
    for name, folder in folders.items():
        if not (folder / CONFIG).is_file():
            raise InputError(NO_ADAPTER.format(folder=folder))
        try:
            from peft import PeftConfig  # noqa: PLC0415  only where there is an adapter

            begun = read_json(folder / CONFIG, MAX_BYTES, error=InputError).get("init_lora_weights")
            if begun not in DRAWN:
                raise ValueError(BEGUN.format(begun))  # worded as what PEFT refuses
            with torch.device("meta"), warnings.catch_warnings(action="ignore", category=UserWarning):  # of the second
                model.add_adapter(PeftConfig.from_pretrained(str(folder)), name)
        except (ImportError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise InputError(UNFIT.format(folder=folder, model=type(model).__name__, error=error)) from error
    model.set_adapter([*folders])


def activate(module: nn.Module, name: str) -> None:
    """Activate this adapter of a sharded model, or none for an empty name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415  only where there is an adapter

    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.set_adapter([name] if name else [], inference_mode=True)


class Adapted(Archive):
    """A model's files and those of its adapters, under the names that the model has with them.

    Args:
        bare: the model. folder: its own. folders: of adapters, by name. trusted: as for a checkpoint.
    """

    def __init__(self, bare: nn.Module, folder: Path, folders: Mapping[str, Path], trusted: bool) -> None:
        archives: list[Archive] = [open_archive(folder, trusted)]
        super().__init__(archives[0].path)
        self.extra = archives[0].extra
        for name, path in folders.items():
            stored, part = open_archive(path, trusted), f".{name}."
            halves = {n: f"{n}.".rpartition(part) for n in bare.state_dict()}
            keys = [(n, f"{BEFORE}{a}.{b}".rstrip(".")) for n, (a, separator, b) in halves.items() if separator]
            # Of a parameter that is no layer's weight PEFT leaves out that it is one.
            pairs = {n: x for n, key in keys for x in (key, key.removesuffix(".weight")) if x in stored.entries}
            lost = stored.entries.keys() - {*pairs.values()}
            archives.append(Renamed(stored, pairs | {f"{path.name}: {x}": x for x in lost}))
        self.parts = {name: archive for archive in archives for name in archive.entries}
        self.entries = {name: archive.entries[name] for name, archive in self.parts.items()}

    def read(self, name: str, boxes: Sequence[Any]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        self.parts[name].read(name, boxes)
