"""Many decoded tokens on one cache: what the process holds more at the end than the cache."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.helpers.isolate import Record
from benchmarks.step_time import transformed

from .decode_legs import ours
from .megatron import Shape, untouched

SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, wide=96, vocabulary=1024)
SETTLED = 0.25  # of the tokens: until then programs are made, and the allocator finds its size
SPARE = 8e6  # bytes that an allocator may lose to pieces as the cache is copied


@torch.no_grad()
def soak(tokens: int) -> Record:
    """Decode so many tokens with autotp on this rank: bytes that the cache and the process have grown by since the
    first quarter."""
    ids = torch.arange(9).view(1, 9)
    module = ours(transformed(untouched(SHAPE).eval(), SHAPE).eval(), SHAPE, ids, "eager")
    cache, token = DynamicCache(config=module.config), ids
    before: dict[str, int] = {}
    for i in range(tokens):
        logits = module(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        if i == int(SETTLED * tokens):
            before = _now(cache)
    after = _now(cache)
    return {"tokens": tokens, **{name: after[name] - before[name] for name in after}}


def check(found: Record) -> None:
    """Refuse a process that has grown by more than its cache.

    Raises:
        RuntimeError: it has.
    """
    if found["process"] > 2 * found["cache"] + SPARE:
        raise RuntimeError(f"{found['tokens']} tokens: the process grew by {found['process']} bytes: {found}")


def _now(cache: Any) -> dict[str, int]:
    gc.collect()
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    status = Path("/proc/self/status").read_text()
    return {"cache": held, "process": 1024 * int(status.split("VmRSS:")[1].split()[0])}
