"""The original's Hugging Face layout: whole tensors under the original's names, ties once, in files with an index."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from autotp.comm.ranks import Ranks, together
from autotp.runtime import state

from . import folders
from .renaming import reverted
from .tensorfiles import INDEX

if TYPE_CHECKING:
    from autotp.runtime.module import ShardedModule


def save(root: ShardedModule, ranks: Ranks | None, place: Path, max_file: int) -> None:
    """Write the files; one tensor at a time is whole on every rank, and one file's on the rank that writes."""
    writer = ranks is None or ranks.rank == 0
    draft = folders.draft_of(place)
    files = _files(root, max_file)
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        tensors: dict[str, Tensor] = {}
        for name, first in names.items():
            tensor = _whole(root, first)
            if writer:
                tensors[name] = tensor.to("cpu", copy=True).contiguous()
        together(ranks, f"writing {file}", functools.partial(_write, root, tensors, draft / file, weight_map))

    def finish() -> None:
        if not writer:
            return
        if len(files) > 1:
            total = sum(_size(root, first) for names in files.values() for first in names.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (draft / ("model" + INDEX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        _describe(root, draft)
        folders.keep_others(place, draft)
        folders.commit(place)

    together(ranks, "putting the checkpoint in its place", lambda: folders.writing(place, finish))


def _write(root: ShardedModule, tensors: dict[str, Tensor], file: Path, weight_map: dict[str, str]) -> None:
    """One file, in the forms that transformers stores; on the ranks that do not write nothing."""
    if tensors:
        stored = reverted(root._source.bare, tensors)
        folders.writing(file, lambda: save_file(stored, file, {"format": "pt"}))
        weight_map.update(dict.fromkeys(stored, file.name))


def _whole(root: ShardedModule, first: str) -> Tensor:
    """A whole tensor on every rank (collective)."""
    storage = root._storages.get(first)
    if storage is None:
        return state.buffer_of(root, first).detach()
    return storage.full([p.detach() for p in state.pieces(root, first)])


def _size(root: ShardedModule, first: str) -> int:
    storage = root._storages.get(first)
    if storage is None:
        held = state.buffer_of(root, first)
        return held.numel() * held.element_size()
    return math.prod(storage.shape) * state.pieces(root, first)[0].element_size()


def _stored(root: ShardedModule) -> dict[str, str]:
    """Stored name -> first name, each tensor once: tied ones under the name that is not declared to follow another."""
    follows = getattr(root._source.bare, "_tied_weights_keys", None) or ()
    names: dict[str, list[str]] = {}
    for name, first in state.named_tensors(root):
        names.setdefault(first, []).append(name)
    return {next((n for n in own if n not in follows), own[0]): first for first, own in names.items()}


def _files(root: ShardedModule, max_file: int) -> dict[str, dict[str, str]]:
    """File -> what is stored in it, as transformers names and fills them."""
    groups: list[dict[str, str]] = [{}]
    size = 0
    for name, first in _stored(root).items():
        own = _size(root, first)
        if groups[-1] and size + own > max_file:
            groups.append({})
            size = 0
        groups[-1][name] = first
        size += own
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _describe(root: ShardedModule, draft: Path) -> None:
    """The original's config beside its weights, where it is one that transformers reads."""
    bare: Any = root._source.bare
    described: list[Any] = [getattr(bare, "config", None), getattr(bare, "generation_config", None)]
    for each in described:
        if hasattr(each, "save_pretrained"):
            each.save_pretrained(draft)
