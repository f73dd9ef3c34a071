"""Train a small Llama on random tokens, sharded over 2 ranks and whole, and compare the losses step by step.

    torchrun --nproc-per-node 2 examples/train_llama.py

AdamW and gradient clipping are torch's own, on the sharded module's parameters. On the CPU in seconds; the exit
status is 0 where the losses differ by rounding only.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

STEPS, TOLERANCE = 20, 1e-4


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """One training step; the loss before it."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> int:
    """Train both."""
    torch.manual_seed(0)  # the same weights and the same tokens on every rank
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(128, (4, 16))

    sharded = autotp.compile(model, example_inputs={"input_ids": tokens, "labels": tokens})
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=3e-3)) for m in (sharded, model)]

    worst = 0.0
    for i in range(STEPS):
        ours, theirs = (step(m, optimizer, tokens) for m, optimizer in pairs)
        worst = max(worst, abs(ours - theirs))
        if dist.get_rank() == 0:
            print(f"step {i:2}  sharded {ours:.6f}  whole {theirs:.6f}")
    right = worst <= TOLERANCE
    if dist.get_rank() == 0:
        print(f"{'Right' if right else 'WRONG'}: the losses differ by at most {worst:.1e}.")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
