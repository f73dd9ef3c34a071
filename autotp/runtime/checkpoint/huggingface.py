"""The original's Hugging Face layout: whole tensors under the original's names, ties once, in files with an index.

Of a model with adapters of PEFT the adapters alone, as PEFT writes them: with the base model's weights, under the names
of the wrapped model, its tensors would fit no class of transformers.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from autotp.comm.ranks import Ranks, leads, together
from autotp.inputs import is_transformers
from autotp.ir.graph import NamedTensors
from autotp.runtime import state
from autotp.runtime.storage import ShardState

from . import folders
from .archives import reverted
from .tensorfiles import INDEX, record
from .wholes import Wholes, grouped, stored_names

ADAPTERS = "adapter_model.safetensors"


def save(shards: ShardState, ranks: Ranks | None, place: Path, max_file: int) -> None:
    """Write the files; one tensor at a time is whole on every rank, and one file's on the rank that writes.

    Args:
        shards, ranks: of the sharded module; rank 0 writes. place: the folder. max_file: bytes of a file, at most.
    """
    writer = leads(ranks)
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

    together(ranks, "putting the checkpoint in its place", lambda: folders.writing(place, finish) if writer else None)


def _write(shards: ShardState, tensors: NamedTensors, file: Path, weight_map: dict[str, str]) -> None:
    """Write one file, in the forms that transformers stores; on the ranks that do not write nothing."""
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
    own = {n: every[n] for n, t in tensors.items() if id(t) in ids}
    own_ids = {id(tensors[n]) for n in own}
    return own if own_ids == ids else every


def _files(wholes: Wholes, max_file: int) -> dict[str, dict[str, str]]:
    """Return file -> what is stored in it, as transformers and PEFT name and fill them."""
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
    described: list[Any] = [getattr(bare, "config", None), getattr(bare, "generation_config", None)]
    for each in described:
        if hasattr(each, "save_pretrained"):
            each.save_pretrained(draft)
