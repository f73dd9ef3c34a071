"""Ways in by what is saved and loaded; what a folder holds is read as those read it that know nothing of autotp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.optim import AdamW

from .context import Context, Numbers

OTHERS = ("elsewhere", "nowhere")


def save(context: Context) -> Numbers:
    """`save_checkpoint`, with an optimizer and notes."""
    return _saved(context, "saved")


def save_behind(context: Context) -> Numbers:
    """Likewise in the background."""
    return _saved(context, "saved behind", background=True)


def _saved(context: Context, name: str, **options: Any) -> Numbers:
    optimizer = AdamW(context.parameters(), lr=context.rate)
    with context.quiet():
        context.loss(0).backward() if context.pipe is None else _piped(context)
    optimizer.step()
    if context.left_out:
        return {}
    place = context.place(context.option("path", name))
    extra = {"step": context.option("step", 1)}
    if not context.sharded:
        wanted = {f"model.{n}": t for n, t in context.weights().items()}
        states = {n: optimizer.state[p] for n, p in context.model.named_parameters()}
        for n, state in states.items():
            wanted |= {f"optimizer.state.{n}.{key}": state[key].clone() for key in ("exp_avg", "exp_avg_sq")}
        return wanted | {"step": 1}
    options |= {"extra": extra, "optimizer": context.option("optimizer", optimizer)}
    options |= {"format": context.options["format"]} if "format" in context.options else {}
    pending = (context.pipe or context.model).save_checkpoint(place, **options)
    if pending is not None:
        pending.result()
    return held(context.folder / name)


def _piped(context: Context) -> None:
    ids, targets = context.batch(0)
    context.pipe.step(context.schedule, input_ids=ids, target=targets)


def save_pretrained(context: Context) -> Numbers:
    """`save_pretrained`, as transformers has it."""
    if context.left_out:
        return {}
    place = context.place(context.option("path", "pretrained"))
    context.model.save_pretrained(place, **{k: v for k, v in context.options.items() if k != "path"})
    return load_file(context.folder / "pretrained" / "model.safetensors")


def load(context: Context) -> Numbers:
    """`load_checkpoint` of a folder of transformers."""
    if context.left_out:
        return {}
    if not context.sharded:
        context.model.load_state_dict(load_file(context.source / "model.safetensors"))
        return context.weights()
    place = context.source.with_name(context.option("path", context.source.name))
    options = {k: v for k, v in context.options.items() if k != "path"}
    (context.pipe or context.model).load_checkpoint(place, **options)
    return context.weights()


def load_state(context: Context) -> Numbers:
    """`load_state_dict` of whole tensors."""
    if context.left_out:
        return {}
    name = context.option("path", context.source.name)
    tensors = load_file(context.source.with_name(name) / "model.safetensors")
    if context.option("strict", True) is False:
        tensors.pop("lm_head.weight")
    context.model.load_state_dict(tensors, strict=context.option("strict", True))
    return context.weights()


def held(folder: Path) -> Numbers:
    """The tensors of a folder of torch.distributed.checkpoint, whole, and the notes beside them."""
    reader = FileSystemReader(folder)
    tensors: dict[str, Any] = {}
    for name, data in reader.read_metadata().state_dict_metadata.items():
        if hasattr(data, "size"):
            tensors[name] = torch.zeros(data.size, dtype=data.properties.dtype)  # type: ignore[union-attr]
    load_dcp(tensors, storage_reader=reader, no_dist=True)
    notes = json.loads((folder / "autotp.json").read_text())
    return {**{n: t for n, t in tensors.items() if isinstance(t, Tensor)}, "step": notes["extra"]["step"]}
