"""What models of the list generate from: two prompts, one of them padded, with an image or a sound."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.helpers.measure import example

STARTS = ("decoder_start_token_id", "bos_token_id")


def prompts(model: Any) -> dict[str, Any]:
    """Example inputs with the first prompt padded; for the decoder that follows an encoder its own start."""
    _start(model)
    found = {k: v for k, v in example(model).items() if not k.startswith("decoder_")}
    ids = found.get("input_ids")
    if ids is None:
        return found
    pad = getattr(model.generation_config, "pad_token_id", None)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    if "pixel_values" not in found:
        ids = ids.masked_fill(mask == 0, 0 if pad is None else pad)
    return {**found, "input_ids": ids, "attention_mask": mask}


def _start(model: Any) -> None:
    """A first token for a decoder whose config names none: generate() asks for one."""
    config = model.generation_config
    if model.config.is_encoder_decoder and all(getattr(config, name, None) is None for name in STARTS):
        config.decoder_start_token_id = 0


def planned_for(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is planned for."""
    more = {k: v for k, v in example(model).items() if k.startswith("decoder_")}
    takes = inspect.signature(model.forward).parameters
    names = set(inputs) - ({"attention_mask"} if "attention_mask" not in takes else set())
    return {**{k: inputs[k] for k in sorted(names)}, **more}
