"""Adapters of PEFT from their folders, beside the model that they were trained on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autotp.errors import InputError
from autotp.ir.files import read_json

from .archives import Archive, Renamed
from .loading import open_archive

CONFIG, BEFORE = "adapter_config.json", "base_model.model."  # of a folder; what stands before its names
MAX_BYTES = 10_000_000  # of a config
DRAWN = (True, False, "gaussian", None)  # beginnings of an adapter that leave the layer's own weight as it is
NO_ADAPTER = "{folder} is no folder of an adapter of PEFT: it holds no " + CONFIG + "."
UNFIT = "{folder}: this adapter cannot be put into {model}: {error}."
BEGUN = (
    "init_lora_weights is {!r}, which changes the base's weights. Save it with path_initial_model_for_weight_conversion"
)


def add_adapters(model: Any, folders: Mapping[str, Path]) -> None:
    """Put adapters into a model, and make all of them active: what is planned is then of all.

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
    """Let a sharded model be that with this adapter, or with none for an empty name."""
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
            keys = [(n, f"{BEFORE}{a}.{b}".rstrip(".")) for n, (a, there, b) in halves.items() if there]
            # Of a parameter that is no layer's weight PEFT leaves out that it is one.
            pairs = {n: x for n, key in keys for x in (key, key.removesuffix(".weight")) if x in stored.entries}
            lost = stored.entries.keys() - {*pairs.values()}
            archives.append(Renamed(stored, pairs | {f"{path.name}: {x}": x for x in lost}))
        self.parts = {name: archive for archive in archives for name in archive.entries}
        self.entries = {name: archive.entries[name] for name, archive in self.parts.items()}

    def read(self, name: str, boxes: Sequence[Any]) -> None:
        """Fill the boxes from the stored tensor `name`."""
        self.parts[name].read(name, boxes)
