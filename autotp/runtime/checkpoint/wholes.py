"""Whole tensors of a sharded module, a few at a time: one by one, or in files of the original's Hugging Face layout.

The files hold whole tensors under the original's names, ties once, with an index. Of a model with adapters of PEFT they
hold the adapters alone, as PEFT writes them: with the base model's weights, under the names of the wrapped model, its
tensors would fit no class of transformers.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from autotp.comm.ranks import Ranks, agree, together
from autotp.errors import InputError
from autotp.inputs import is_transformers
from autotp.ir.graph import NamedTensors
from autotp.plans.pieces import BUCKET
from autotp.runtime import state
from autotp.runtime.storage import Box, ShardState

from . import folders
from .archives import Peers, reverted
from .tensorfiles import INDEX, record

NAMES = ("huggingface", "original")


class Wholes:
    """The tensors of a module's state dict, of all stages, by first names. To make it is a collective call.

    Args:
        shards: of the module. ranks: of all its axes.
    """

    def __init__(self, shards: ShardState, ranks: Ranks) -> None:
        self.shards = shards
        firsts = state.first_names(shards)
        tensors = {first: (shards.storage_of(first).shape, state.boxes(shards, first)) for first in firsts}
        self.peers = Peers.of(ranks, tensors, {})

    def nbytes(self, first: str) -> int:
        """Return the bytes of a tensor."""
        entry: Any = self.peers.entries[first]
        return prod(entry.shape) * entry.dtype.itemsize

    def gather(self, firsts: Iterable[str], here: bool = True) -> NamedTensors:
        """Return tensors whole, in new memory; none where this rank does not want them. A collective call."""
        wholes = {}
        for first in firsts if here else ():
            wholes[first] = self.peers.entries[first].empty(self.shards.device)
        self.peers.fill({first: [Box((0,) * x.ndim, x)] for first, x in wholes.items()})
        return wholes


def stored_names(shards: ShardState) -> dict[str, str]:
    """Return stored name -> first name, each tensor once: tied ones under the name that is not declared a copy."""
    follows = getattr(shards.bare, "_tied_weights_keys", None) or ()
    names: dict[str, list[str]] = {}
    for name, first in state.named_tensors(shards, everywhere=True):
        names.setdefault(first, []).append(name)
    out = {}
    for first, tied in names.items():
        name = next((n for n in tied if n not in follows), tied[0])
        out[name] = first
    return out


def named_tensors(module: Any, names: str = "huggingface", bucket: int = BUCKET) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights whole, with their names, for an engine that loads such: a collective call each step.

    They are brought together a bucket at a time, on every rank, and let go of before the next. What ranks do between
    two steps is theirs, but all of them go on to the end.

    Args:
        names: "huggingface": names and forms of the original's files, tied tensors once, as `save_checkpoint` writes
            them and the `load_weights` of vLLM takes them; "original": those of the model's own state dict.
        bucket: bytes of whole tensors that a rank holds at once.

    Raises:
        InputError: the names are none of these, or a tensor is larger than the bucket.
        StateError: the weights are on the meta device.
        RankError: that is so on another rank.
    """
    shards: ShardState = module._shards
    ranks = shards.planners
    with module._calls.turn("named_tensors()"):
        together(ranks, "looking at the module", lambda: _check(shards, names))
        agree(ranks, "the options of named_tensors()", {"names": names, "bucket": bucket})
        shards.agree_on_writes("named_tensors()")
        shards.show_own()
        wholes = Wholes(shards, ranks)
        groups = together(ranks, "choosing the tensors", lambda: [*_groups(wholes, names, bucket)])
    for group in groups:
        with module._calls.turn("named_tensors()"), torch.no_grad():
            tensors = wholes.gather(dict.fromkeys(group.values()))
            stored = {name: tensors[first] for name, first in group.items()}
            del tensors
            stored = reverted(shards.bare, stored) if names == "huggingface" else stored
        while stored:
            name = next(iter(stored))
            yield name, stored.pop(name)


def _check(shards: ShardState, names: str) -> None:
    if names not in NAMES:
        raise InputError(f"names={names!r}: give one of {', '.join(NAMES)}.")
    state.refuse_meta(shards)


def _groups(wholes: Wholes, names: str, bucket: int) -> Iterator[dict[str, str]]:
    """Return name -> first name of the tensors of each bucket."""
    every = stored_names(wholes.shards)
    if names == "original":
        every = dict(state.named_tensors(wholes.shards, everywhere=True))
    for name, first in every.items():
        if wholes.nbytes(first) > bucket:
            raise InputError(f"bucket={bucket}: {name} alone is {wholes.nbytes(first)} bytes. Give at least as many.")
    return grouped(wholes, every, bucket)


def grouped(wholes: Wholes, names: Mapping[str, str], limit: int) -> Iterator[dict[str, str]]:
    """Divide tensors into groups of at most so many bytes, in order; one that is larger is alone.

    Args:
        wholes: knows their sizes. names: of each its first name. limit: bytes of a group.
    """
    group, size = dict[str, str](), 0
    for name, first in names.items():
        nbytes = wholes.nbytes(first)
        if group and size + nbytes > limit:
            yield group
            group, size = {}, 0
        group[name], size = first, size + nbytes
    yield group


ADAPTERS = "adapter_model.safetensors"


def save(shards: ShardState, ranks: Ranks, place: Path, max_file: int) -> None:
    """Write the files; one tensor at a time is whole on every rank, and one file's on the rank that writes.

    Args:
        shards, ranks: of the sharded module; rank 0 writes. place: the folder. max_file: bytes of a file, at most.
    """
    writer = ranks.rank == 0
    draft, weight_map = folders.draft_of(place), dict[str, str]()
    wholes = Wholes(shards, ranks)
    files = together(ranks, "choosing the tensors", lambda: _files(wholes, max_file))
    for file, names in files.items():
        tensors: NamedTensors = {}
        for name, first in names.items():
            # One at a time, and on the CPU: a file is larger than what a device has left.
            for tensor in wholes.gather([first], writer).values():
                tensors[name] = tensor.cpu()
        # A full disk on rank 0 raises on all ranks; without a turn they would wait in the next file's all-gather.
        together(ranks, f"writing {file}", functools.partial(_write, shards, tensors, draft / file, weight_map))

    def finish() -> None:
        # One file has no index, as `from_pretrained` expects it.
        if len(files) > 1:
            total = sum(wholes.nbytes(first) for names in files.values() for first in names.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (draft / ("model" + INDEX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if ADAPTERS not in files:
            _describe(shards, draft)
        record(draft)
        # Last: up to the rename a reader finds the checkpoint before, whole.
        folders.commit(place)

    folders.write_on_first(ranks, "putting the checkpoint in its place", place, finish)


def _write(shards: ShardState, tensors: NamedTensors, file: Path, weight_map: dict[str, str]) -> None:
    """Write one file, in the forms that transformers stores; ranks that do not write have no tensors."""
    bare: Any = shards.bare
    if tensors and file.name == ADAPTERS:
        folders.writing(file, lambda: bare.save_pretrained(file.parent, state_dict=tensors))
    elif tensors:
        stored = reverted(bare, tensors)
        folders.writing(file, lambda: save_file(stored, file, {"format": "pt"}))
        weight_map.update(dict.fromkeys(stored, file.name))


def _adapters(bare: Any, every: dict[str, str]) -> dict[str, str]:
    """Return name -> first name of the tensors that PEFT saves of a model; all where some are made of others.

    Args:
        bare: the original. every: of all tensors of its state dict.
    """
    pick = importlib.import_module("peft").get_peft_model_state_dict
    tensors = {n: t for n, t in bare.state_dict().items() if isinstance(t, Tensor)}
    ids = {id(t) for adapter in bare.peft_config for t in pick(bare, tensors, adapter).values()}
    adapters = {n: every[n] for n, t in tensors.items() if id(t) in ids}
    own_ids = {id(tensors[n]) for n in adapters}
    return adapters if own_ids == ids else every


def _files(wholes: Wholes, max_file: int) -> dict[str, dict[str, str]]:
    """Return file -> its tensors (name -> first name), as transformers and PEFT name and fill the files."""
    shards = wholes.shards
    bare: Any = shards.bare
    if getattr(bare, "peft_config", None) and hasattr(bare, "save_pretrained"):
        return {ADAPTERS: _adapters(bare, dict(state.named_tensors(shards, everywhere=True)))}
    groups = [*grouped(wholes, stored_names(shards), max_file)]
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _describe(shards: ShardState, draft: Path) -> None:
    """Write the original's config beside its weights, where the names are those of a model of transformers."""
    bare: Any = shards.bare
    if not is_transformers(bare):
        return
    for name in ("config", "generation_config"):
        config: Any = getattr(bare, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(draft)
