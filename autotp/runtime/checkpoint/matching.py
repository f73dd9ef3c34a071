"""Which stored tensor is which of the model's, and everything that does not fit, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autotp.errors import StateError
from autotp.runtime import state
from autotp.runtime.shard_state import ShardState

from .boxes import Box
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
    """A full state dict in memory, or in a pickled file that the user trusts."""

    shared = False

    def __init__(self, tensors: Mapping[str, Any], file: Path | None = None) -> None:
        wrong = [n for n, t in tensors.items() if not isinstance(t, Tensor) or isinstance(t, DTensor) or t.is_meta]
        if wrong:
            raise StateError(
                f"{file or 'the state dict'}: {', '.join(wrong)}: only whole tensors with values can be loaded. "
                "DTensors are for load_state_dict()."
            )
        self.extra: dict[str, Any] = {}
        self.tensors = tensors
        self.file, there = file, file or Path("the state dict")
        self.entries = {n: Entry(tuple(t.shape), t.dtype, there) for n, t in tensors.items()}

    @property
    def path(self) -> Path | str:
        """The file, where there is one."""
        return self.file or "the state dict"

    def read(self, name: str, boxes: list[Box]) -> None:
        """Fill the boxes from the tensor `name`."""
        for box in boxes:
            box.tensor.copy_(self.tensors[name].detach()[box.slices])


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


def match(shards: ShardState, archive: Archive, strict: bool, cast: bool) -> NameMatch:
    """Compare the names, shapes and types of an archive with the model's.

    Args:
        shards: of the module. archive: the checkpoint. strict: every name must be on both sides.
        cast: another floating-point dtype is no difference.

    Raises:
        StateError: tensors are missing, unknown, or of another shape or type; all of them are listed.
    """
    names = dict(state.named_tensors(shards))
    aliases = shards.aliases
    buffers = {
        n: aliases.get(n, n) for n, _ in shards.root.named_buffers(remove_duplicate=False)
    }  # those not persistent may come too
    rename, within = _naming(shards, names, archive)
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
    entry, storage = archive.entries[key], shards.storage_of(first)
    tensor = state.pieces(shards, first)[0] if storage is not None else state.buffer_of(shards, first)
    shape = storage.shape if storage is not None else tuple(tensor.shape)
    what = f"{entry.file.name}: {key} is"
    if entry.shape != shape:
        return f"{what} {list(entry.shape)}, the model has {list(shape)}"
    if isinstance(entry.dtype, str):
        return f"{what} {entry.dtype}, a type that torch does not have"
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
