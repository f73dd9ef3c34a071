"""Models in training over virtual ranks, and what a few steps of them give."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autotp
from autotp.runtime.state import pieces
from tests.helpers.models import redrawn, transformer

IDS = torch.randint(1, 250, (2, 16), generator=torch.Generator().manual_seed(3))
TOKENS = {"input_ids": IDS, "labels": IDS}
IMAGES = {
    "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
    "labels": IDS[0, :2] % 4,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Dropped(nn.Module):
    """Dropout on slices of columns and on whole values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 67), nn.Linear(67, 32), nn.LayerNorm(32)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(x + self.down(self.inner(torch.relu(self.up(x))))))


def call_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training, and what it is called with."""
    torch.manual_seed(0)
    if name == "dropout":
        return Dropped(), {"x": torch.randn(4, 8, 32)}
    if name == "kv2":
        return transformer("llama-short", num_key_value_heads=2), TOKENS
    if name == "lora":
        peft = pytest.importorskip("peft")
        warnings.filterwarnings(
            "ignore", ".*is_gradient_checkpointing", FutureWarning
        )  # read by peft (transformers 5.23)
        options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return redrawn(peft.get_peft_model(transformer("llama-short"), options)), TOKENS
    if name == "mamba":
        config = transformers.MambaConfig(
            hidden_size=32, state_size=4, num_hidden_layers=1, vocab_size=256, use_cache=False
        )
        return redrawn(transformers.MambaForCausalLM(config)), TOKENS
    return transformer(name), IMAGES if name.startswith("vit") else TOKENS


def trained(
    mesh: DeviceMesh | None, name: str, dtype: str, virtual: int, steps: int = 2, repeats: int = 1, **options: Any
) -> dict[str, Tensor]:
    """Outputs, losses, first gradients, norms, weights and states of a few steps with clipping, each of two backwards.

    Args:
        mesh: of dp, where the batch is dealt, and tp. name, dtype: of the model. virtual: ranks of tp. repeats: of the
            examples. options: of `autotp.compile`.
    """
    torch.set_num_threads(1)
    model, inputs = call_of(name)
    inputs = {k: torch.cat([v.roll(i, -1) for i in range(repeats)]) for k, v in inputs.items()}
    inputs = {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in inputs.items()}
    if mesh is not None and mesh.ndim > 1:
        inputs = {k: v.chunk(mesh.size(0))[mesh.get_local_rank(0)] for k, v in inputs.items()}
        options["dp"] = mesh.size(0)
    module = autotp.compile(
        model.to(DTYPES[dtype]), mesh=mesh, example_inputs=inputs, tp_invariant=virtual, check_capture=False, **options
    ).train()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(5)
    values: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for half in range(2):
            outputs = module(**inputs)
            out = outputs if isinstance(outputs, Tensor) else outputs.logits
            loss = module.mean_loss(_square, outputs) if isinstance(outputs, Tensor) else outputs.loss
            values |= {f"output {step} {half}": out.detach().clone(), f"loss {step} {half}": loss.detach().clone()}
            loss.backward()
        if step == 0:
            values |= {f"gradient of {k}": v for k, v in module.full_grad_dict().items()}
        values[f"norm {step}"] = module.clip_grad_norm_(0.5)
        optimizer.step()
    return values | moments(module, optimizer) | module.full_state_dict()


def _square(x: Tensor) -> Tensor:
    return x.square().mean()


def moments(module: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """States of AdamW, whole, by the names of the original's parameters."""
    values = {}
    for name, storage in module.storages():
        held = pieces(module._shards, name)
        for kind in ("exp_avg", "exp_avg_sq"):
            if all(p in optimizer.state for p in held):
                values[f"{kind} of {name}"] = storage.full([optimizer.state[p][kind] for p in held])
    return values


def different(alone: dict[str, Tensor], values: dict[str, Tensor], dp: int = 1, at: int = 0) -> list[str]:
    """Names of what is not equal to the bit; of outputs those of the slice in this place of `dp`."""
    assert values.keys() == alone.keys()
    odd = []
    for key, value in alone.items():
        own = value.chunk(dp)[at] if key.startswith("output") else value
        if not torch.equal(values[key], own):
            odd.append(key)
    return odd
