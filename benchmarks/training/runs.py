"""Trainings of one small Llama on bytes of real text, each over the ranks of its own mesh.

The text is the sources that the installed transformers ships (Apache-2.0). Weights, batches and learning rates are
those of one seed, so that runs differ by where their sums are cut, and by nothing else.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

ROWS, LENGTH, MICROBATCHES, SEED = 4, 256, 2, 0
RATE, WARM_UP, CLIP = 1e-3, 100, 1.0
FLOAT8 = {"recipe": "tensorwise", "smallest": 64}  # all products of so small a model
SAVE = 200  # steps between two checkpoints


@dataclass(frozen=True)
class Run:
    """A mesh, and what else `autotp.compile` or `autotp.stages` is told; one rank without options is plain torch."""

    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    backwards: bool = False  # rows of a batch from the last to the first: another order of the same sums


ONE = "one process"
RUNS = {
    ONE: Run(1),
    "one process, rows backwards": Run(1, backwards=True),
    "tp=2": Run(2, {"tp": 2}),
    "tp=4": Run(4, {"tp": 4}),
    "dp=2 x tp=2": Run(4, {"tp": 2, "dp": 2}),
    "cp=2 x tp=2": Run(4, {"tp": 2, "cp": 2}),
    "pp=2 x tp=2": Run(4, {"tp": 2, "pp": 2}),
    "float8, tp=2": Run(2, {"tp": 2, "precision": FLOAT8}),
    "tp_invariant=2, tp=1": Run(1, {"tp": 1, "tp_invariant": 2}),
    "tp_invariant=2, tp=2": Run(2, {"tp": 2, "tp_invariant": 2}),
}
BITS = [name for name, run in RUNS.items() if "tp_invariant" in run.options]


class Text:
    """Batches of bytes, [rows, length], from random places; those of a step hang on its number alone."""

    def __init__(self) -> None:
        folder = Path(transformers.__file__).parent
        self.files = sorted(folder.glob("**/*.py"))
        text = b"".join(f.read_bytes() for f in self.files)
        self.bytes, self.digest = torch.frombuffer(bytearray(text), dtype=torch.uint8), hashlib.sha256(text).hexdigest()

    def batch(self, step: int) -> Tensor:
        """Return the rows of a step."""
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.bytes) - LENGTH, (ROWS,), generator=draw).tolist()
        return torch.stack([self.bytes[start : start + LENGTH] for start in starts]).long()


def model_of() -> LlamaForCausalLM:
    """Return the whole model, the same on every rank: 4.9 million parameters."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2048, use_cache=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rate_of(step: int, steps: int) -> float:
    """Learning rate of a step: linear warm-up, then a cosine to a tenth."""
    warm = min(WARM_UP, steps // 10 or 1)
    if step < warm:
        return RATE * (step + 1) / warm
    return RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1))))


class Trained:
    """A model over the ranks of a run, with its optimizer."""

    def __init__(self, run: Run, ids: Tensor) -> None:
        self.run, options, model = run, dict(run.options), model_of()
        example = {"input_ids": ids, "labels": ids}
        self.pipe: Any = None
        self.module: Any = model
        if "pp" in options:
            micro = {name: x[: len(x) // MICROBATCHES] for name, x in example.items()}
            self.pipe = autotp.stages(model, options.pop("pp"), options.pop("tp"), example_inputs=micro, **options)
            self.module = self.pipe.module
            self.schedule = self.pipe.schedule(Schedule1F1B, MICROBATCHES)
        elif options:
            self.module = autotp.compile(model, options.pop("tp"), example_inputs=example, outputs="loss", **options)
        self.parameters = list((self.pipe or self.module).parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, ids: Tensor, rate: float) -> tuple[float, float]:
        """Train one step; return the loss before it, of this rank's rows, and the norm of all gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.pipe:
            loss = self.pipe.step(self.schedule, input_ids=ids, labels=ids)
            norm = self.pipe.clip_grad_norm_(CLIP)
        else:
            dp = self.run.options.get("dp", 1)
            mine = ids.chunk(dp)[dist.get_rank() // self.run.options["tp"] if dp > 1 else 0]
            found = self.module(input_ids=mine, labels=mine)
            loss = found if isinstance(found, Tensor) else found.loss
            loss.backward()
            own = self.run.options.get("tp_invariant") and self.module.clip_grad_norm_  # torch's sums in another order
            norm = own(CLIP) if own else nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def save(self, folder: Path, found: dict[str, Any]) -> None:
        """Keep weights, the optimizer's states and what every rank of the run has found so far."""
        extra = found
        if self.run.options:  # what stands beside weights is one thing on all ranks
            everyone = [found] * self.run.ranks
            dist.all_gather_object(everyone, found)
            extra = {"everyone": everyone}
            (self.pipe or self.module).save_checkpoint(folder, optimizer=self.optimizer, extra=extra)
        else:
            torch.save([self.module.state_dict(), self.optimizer.state_dict(), extra], folder.with_suffix(".pt"))

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from what was kept; return what this rank had found, nothing where none was kept."""
        if self.run.options:
            if not (folder / "autotp.json").exists():
                return {}
            loaded = (self.pipe or self.module).load_checkpoint(folder, optimizer=self.optimizer)
            return dict(loaded.extra["everyone"][dist.get_rank()])
        if not folder.with_suffix(".pt").exists():
            return {}
        weights, states, extra = torch.load(folder.with_suffix(".pt"))
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(states)
        return extra


def trained(name: str, steps: int, folder: Path, served: Path | None) -> dict[str, Any]:
    """Train over the ranks that are there, on from the last checkpoint.

    Args:
        name: of the run. steps: of all of it. folder: for checkpoints. served: where transformers' own files of the
            trained model go, if anywhere.

    Returns: this rank's loss and gradient norm of each step, and its CPU seconds.
    """
    run, text = RUNS[name], Text()
    model = Trained(run, text.batch(0))
    found = model.load(folder) or {"losses": [], "norms": [], "cpu_s": 0.0}
    began, before = time.process_time(), found["cpu_s"]
    for step in range(len(found["losses"]), steps):
        ids = text.batch(step)
        loss, norm = model.step(ids.flip(0) if run.backwards else ids, rate_of(step, steps))
        found["losses"].append(loss)
        found["norms"].append(norm)
        found["cpu_s"] = before + time.process_time() - began
        if (step + 1) % SAVE == 0 and step + 1 < steps:
            model.save(folder, found)
    if served is not None:
        model.module.save_checkpoint(served, format="huggingface")
    return found
