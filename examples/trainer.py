"""transformers' Trainer on a Llama that is split over all ranks; its text is the sources of Python's standard library.

    torchrun --nproc-per-node 2 examples/trainer.py --steps 40 --out /tmp/llama
    torchrun --nproc-per-node 2 examples/trainer.py --steps 80 --out /tmp/llama --resume

Everything but `autotp.compile` and the trainer's class is transformers' own. The folder that it writes is one that
`LlamaForCausalLM.from_pretrained` loads, and so is every checkpoint in it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autotp
from autotp.integrations.trainer import ShardedTrainer


def rows(length: int = 64, count: int = 512) -> list[dict[str, Tensor]]:
    """Sequences of bytes, the same on every rank."""
    sources = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))[: length * count]
    pieces = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long().split(length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces if len(piece) == length]


def llama() -> LlamaForCausalLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))


def trained(settings: TrainingArguments, data: list[dict[str, Tensor]], resume: bool) -> ShardedTrainer:
    """Train over all ranks, from the last checkpoint where `resume` says so, and keep the best weights."""
    batch = torch.stack([row["input_ids"] for row in data[: settings.per_device_train_batch_size]])
    sharded: Any = autotp.compile(llama(), example_inputs={"input_ids": batch, "labels": batch})
    trainer = ShardedTrainer(model=sharded, args=settings, train_dataset=data[32:], eval_dataset=data[:32])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return trainer


def main() -> None:
    """Read the command line, train, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", required=True, help="the folder for checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    options = parser.parse_args()
    every: dict[str, Any] = {"save_steps": options.steps // 2, "eval_steps": options.steps // 2, "logging_steps": 1}
    settings = TrainingArguments(
        output_dir=options.out, max_steps=options.steps, **every, eval_strategy="steps", load_best_model_at_end=True,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3, lr_scheduler_type="cosine",
        warmup_steps=4, use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = trained(settings, rows(), options.resume)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        whole = LlamaForCausalLM.from_pretrained(options.out)
        print(f"{len(losses)} steps: loss {losses[0]:.4f} at the first, {losses[-1]:.4f} at the last")
        print(f"{whole.num_parameters()} parameters in {options.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
