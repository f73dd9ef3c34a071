"""Train a small Llama on random tokens, sharded over 2 ranks and whole, and compare losses and gradient norms.

    torchrun --nproc-per-node 2 examples/train_llama.py

AdamW and gradient clipping are torch's own, on the sharded module's parameters. On the CPU in seconds; the exit
status is 0 where they differ by rounding only.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

STEPS, TOLERANCE = 15, 1e-4


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> tuple[float, float]:
    """One training step; the loss before it, and the norm of all gradients before clipping."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


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
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in (sharded, model)]

    worst = 0.0
    for i in range(STEPS):
        (loss, norm), (true_loss, true_norm) = (step(m, optimizer, tokens) for m, optimizer in pairs)
        worst = max(worst, abs(loss - true_loss), abs(norm - true_norm))
        if dist.get_rank() == 0:
            print(
                f"step {i:2}  loss {loss:.6f}, whole {true_loss:.6f}  gradient norm {norm:.6f}, whole {true_norm:.6f}"
            )
    right = worst <= TOLERANCE
    if dist.get_rank() == 0:
        print(f"{'Right' if right else 'WRONG'}: losses and norms differ by at most {worst:.1e}.")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
