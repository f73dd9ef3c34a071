"""A model with adapters of PEFT: its folder holds the adapters and their configuration, as PEFT writes them.

Under the names of the wrapped model its tensors would fit no class of transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from autotp.runtime import state
from autotp.runtime.shard_state import ShardState


def has_adapters(shards: ShardState) -> bool:
    """Whether the original holds adapters: as a `PeftModel`, or by transformers' own `add_adapter`."""
    bare: Any = shards.bare
    return bool(getattr(bare, "peft_config", None)) and hasattr(bare, "save_pretrained")


def names(shards: ShardState) -> dict[str, str]:
    """Name -> first name, of the tensors that are saved: PEFT picks them."""
    bare: Any = shards.bare
    pick = importlib.import_module("peft").get_peft_model_state_dict
    tensors = {n: t for n, t in bare.state_dict().items() if isinstance(t, Tensor)}
    ids = {id(t) for adapter in bare.peft_config for t in pick(bare, tensors, adapter).values()}
    every = dict(state.named_tensors(shards))
    own = {n: every[n] for n, t in tensors.items() if id(t) in ids}
    saved_ids = {id(tensors[n]) for n in own}
    return own if saved_ids == ids else every  # some are made of others


def save(shards: ShardState, tensors: Mapping[str, Tensor], draft: Path) -> None:
    """Write the adapters, from whole tensors under the original's names."""
    bare: Any = shards.bare
    bare.save_pretrained(draft, state_dict=dict(tensors))
