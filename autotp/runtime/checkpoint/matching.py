"""Which stored tensor is which of the model's, and everything that does not fit, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp.errors import StateError
from autotp.runtime import state
from autotp.runtime.interop.foreign import INSTEAD, of_another_rank
from autotp.runtime.shard_state import ShardState
from autotp.runtime.storage import Box

from .checked import Entry

Rename = Callable[[str], str]


class Archive(Protocol):
    """Stored tensors by name. `shared`: other things than the model may be stored beside it."""

    shared: bool
    entries: dict[str, Entry]
    extra: dict[str, Any]

    @property
    def path(self) -> Path | str:
        """What it is called in messages."""
        ...

    def read(self, name: str, boxes: Any) -> None:
        """Fill the boxes from the stored tensor `name`."""
        ...


class TensorArchive:
    """A full state dict in memory, of whole tensors or DTensors, or in a pickled file that the user trusts."""

    shared = False

    def __init__(self, tensors: Mapping[str, Any], file: Path | None = None) -> None:
        self.path: Path | str = file or "the state dict"
        if foreign := [n for n, t in tensors.items() if of_another_rank(t)]:
            raise StateError(f"{foreign[0]} is another rank's part: one rank had pickled it for all. {INSTEAD}")
        self.extra: dict[str, Any] = {}
        self.tensors = tensors
        self.entries = {n: _entry(t, Path(self.path)) for n, t in tensors.items()}

    def read(self, name: str, boxes: Sequence[Box]) -> None:
        """Fill the boxes from the tensor `name`; collective where that is a DTensor."""
        value = self.tensors[name].detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        for box in boxes:
            box.tensor.copy_(value[box.slices])


def _entry(value: Any, file: Path) -> Entry:
    if not isinstance(value, Tensor):
        return Entry((), type(value).__name__, file)
    return Entry(tuple(value.shape), "on the meta device" if value.is_meta else value.dtype, file)


@dataclass(frozen=True)
class NameMatch:
    """What of an archive is which tensor of the model.

    Attributes:
        stored: first name of each tensor of the model -> the names that it is stored under, more than one where tied.
        missing, unexpected: names as `load_state_dict` reports them.
    """

    stored: dict[str, list[str]]
    missing: list[str]
    unexpected: list[str]


def match(shards: ShardState, archive: Archive, strict: bool, cast: bool, renamed: bool) -> NameMatch:
    """Compare the names, shapes and types of an archive with the model's.

    Args:
        shards: of the module. archive: the checkpoint. strict: every name must be on both sides.
        cast: another floating-point dtype is no difference. renamed: the names may have other prefixes.

    Raises:
        StateError: tensors are missing, unknown, or of another shape or type; all of them are listed.
    """
    names = dict(state.named_tensors(shards))
    aliases = shards.aliases
    buffers = {
        n: aliases.get(n, n) for n, _ in shards.root.named_buffers(remove_duplicate=False)
    }  # those not persistent may come too
    rename, within = _naming(shards, names, archive) if renamed else (str, "")
    stored: dict[str, list[str]] = {}
    names_read = set()
    for name, first in (buffers | names).items():
        if rename(name) in archive.entries:
            names_read.add(rename(name))
            if rename(name) not in stored.setdefault(first, []):
                stored[first].append(rename(name))
    missing = [n for n, first in names.items() if first not in stored]
    ignored = [re.compile(p) for p in getattr(shards.bare, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names_read |= {rename(n) for n in shards.elsewhere}  # other stages of a pipeline look for those
    unexpected = [
        n
        for n in archive.entries
        if n not in names_read and n.startswith(within) and not any(p.search(n) for p in ignored)
    ]
    wrong = [text for first, keys in stored.items() for k in keys if (text := _odd(shards, first, k, archive, cast))]
    if wrong or (strict and (missing or unexpected)):
        raise StateError(_faults_text(archive, missing, unexpected, wrong, cast))
    return NameMatch(stored, missing, unexpected)


def _naming(shards: ShardState, names: Mapping[str, str], archive: Archive) -> tuple[Rename, str]:
    """How the model's names are stored, by which way finds most of them, and the prefix of what is the model's.

    A Hugging Face folder may hold the model without its head or a model's body for the headless class; a training
    script may have stored it under a key.
    """
    base = getattr(shards.bare, "base_model_prefix", "")
    longest = max(names, key=len, default="")
    outer = sorted({key[: -len(longest)] for key in archive.entries if longest and key.endswith("." + longest)})
    ways: list[tuple[Rename, str]] = [(lambda n: n, "")]
    for prefix in [f"{base}.", *outer]:
        ways.append(((lambda n, p=prefix: p + n), prefix if archive.shared else ""))
    ways += [((lambda n: n.removeprefix(base + ".")), "")] if isinstance(base, str) and base else []
    return max(ways, key=lambda way: len({first for n, first in names.items() if way[0](n) in archive.entries}))


def _odd(shards: ShardState, first: str, key: str, archive: Archive, cast: bool) -> str:
    entry, shape, tensor = archive.entries[key], shards.storage_of(first).shape, state.pieces(shards, first)[0]
    what = f"{entry.file.name}: {key} is"
    if isinstance(entry.dtype, str):
        return f"{what} {entry.dtype}: no tensor with values of a type that torch has"
    if entry.shape != shape:
        return f"{what} {list(entry.shape)}, the model has {list(shape)}"
    if entry.dtype != tensor.dtype and not cast:
        return f"{what} {_short(entry.dtype)}, the model has {_short(tensor.dtype)}"
    return ""


def _faults_text(archive: Archive, missing: list[str], unexpected: list[str], wrong: list[str], cast: bool) -> str:
    lines = [f"{archive.path} does not fit the model, and nothing was loaded."]
    lines += [f"  missing: {name}" for name in missing]
    lines += [f"  unknown: {archive.entries[name].file.name}: {name}" for name in unexpected]
    lines += [f"  {text}" for text in wrong]
    kinds = "" if cast else " Types are changed where cast=True says so."
    return "\n".join(lines) + f"\nstrict=False allows missing and unknown names.{kinds}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
