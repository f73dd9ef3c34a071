"""The models: a Llama of a layer or two, in 64 bits throughout; with dropout, or with adapters of PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import autotp

from .context import MICROBATCHES, ROWS, Context, Mesh, loss_of

DROP = 0.2
ADAPTERS = ("default", "second")


def llama(layers: int = 1, seed: int = 0) -> Any:
    """In training mode; torch's RMS norm in the place of transformers' own, which computes in 32 bits."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(path, nn.RMSNorm(config.hidden_size, config.rms_norm_eps))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))  # so that logits are far apart
    return model.double().train()


def dropping(layers: int = 1) -> Any:
    """With dropout where values are whole on every tp rank."""
    model = llama(layers)
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(DROP))
    return model.train()


def adapted() -> Any:
    """With two adapters on a column-parallel and a row-parallel layer."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model: Any = peft.get_peft_model(llama(), lora, autocast_adapter_dtype=False)
    model.add_adapter(ADAPTERS[1], lora, autocast_adapter_dtype=False)
    return model.double().train()


def original(kind: str, mesh: Mesh) -> Any:
    """A model of this kind; stages need two layers."""
    layers = 2 if mesh.pp > 1 else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return adapted() if kind == "adapters" else dropping(layers) if kind == "dropping" else llama(layers)


def alone(kind: str, mesh: Mesh, rank: int, folder: Path, source: Path) -> Context:
    """The original in one process, whose results are to be those that a rank gets."""
    return Context(mesh, rank, original(kind, mesh), False, folder, source)


def on_rank(kind: str, mesh: Mesh, rank: int, folder: Path, source: Path, **options: Any) -> Context:
    """A rank's, just made.

    Args:
        kind, mesh: of the model. rank: this one. folder, source: see `Context`. options: of `autotp.compile`.
    """
    model = original(kind, mesh)
    initial = {n: t.clone() for n, t in model.state_dict().items()}
    context = Context(mesh, rank, None, True, folder, source, initial)
    ids, _ = context.batch(0)
    if mesh.pp > 1:
        micro = {"input_ids": ids[: ROWS // MICROBATCHES]}
        context.pipe = autotp.stages(model, mesh.pp, mesh.tp, example_inputs=micro, outputs="full", check_capture=False)
        context.model = context.pipe.module
        context.schedule = context.pipe.schedule(ScheduleGPipe, MICROBATCHES, loss_of)
        return context
    beside = {mesh.axis: getattr(mesh, mesh.axis)} if mesh.axis != "tp" else {}
    example = {"input_ids": ids}
    context.model = autotp.compile(model, mesh.tp, example_inputs=example, check_capture=False, **beside, **options)
    return context
