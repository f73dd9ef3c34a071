"""Weights in a folder that holds other things too, as transformers' `save_pretrained` writes them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotp.comm.ranks import together
from autotp.errors import InputError
from autotp.runtime.shard_state import ShardState

from . import folders, saving

NOT_NEEDED = ("state_dict", "is_main_process", "save_function", "safe_serialization")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
OLD = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


def save(shards: ShardState, folder: str | os.PathLike[str], max_file: int | str, options: Mapping[str, Any]) -> None:
    """Write into a folder; `OriginalInterface.save_pretrained` says what the arguments are. A collective call."""
    ranks = shards.ranks.planners if shards.ranks is not None else None
    size = together(ranks, "reading the options", lambda: _size(max_file, options))
    into = Path(os.path.abspath(folder))
    draft = into / ".weights"
    saving.save(shards, draft, format="huggingface", max_file=size)
    first = ranks is None or ranks.rank == 0
    together(ranks, "moving the weights", lambda: folders.writing(into, lambda: _move(draft, into)) if first else None)


def _size(limit: int | str, options: Mapping[str, Any]) -> int:
    """Bytes.

    Raises:
        InputError: it is no size, or an option asks for what is not written.
    """
    odd = [name for name in options if name not in NOT_NEEDED]
    if odd or not options.get("safe_serialization", True):
        raise InputError(
            f"save_pretrained({(odd or ['safe_serialization=False'])[0]}): a sharded module writes safetensors files "
            "and the config, nothing else. Do the rest on rank 0 afterwards."
        )
    match = re.fullmatch(r"([\d.]+)\s*([A-Z]*)", str(limit).strip().upper())
    if match is None or match[2] not in UNITS:
        raise InputError(f"max_shard_size={limit!r}: give bytes, or a text such as '5GB'.")
    return int(float(match[1]) * UNITS[match[2]])


def _move(draft: Path, into: Path) -> None:
    """Put the new files in the place of the old ones."""
    new = {p.name for p in draft.iterdir()}
    for pattern in OLD:
        for old in into.glob(pattern):
            if old.name not in new:
                old.unlink()
    for name in sorted(new):
        os.replace(draft / name, into / name)
    shutil.rmtree(draft)
