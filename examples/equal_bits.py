"""The same training on 4 ranks, on 2 and on 1: equal to the bit with tp_invariant, and not without.

    torchrun --nproc-per-node 4 examples/equal_bits.py

Trains a small Llama over all ranks, then over half as many, and so on down to one, and compares losses and weights by
`torch.equal`. The exit status is 0 where all are equal.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import autotp

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
}


def trained(tp: int, steps: int, virtual: int | None) -> dict[str, Tensor]:
    """Losses and weights of a training over `tp` ranks: of each group of so many that the world is cut into.

    Args:
        tp: ranks that share the model. steps: of AdamW. virtual: ranks whose bits it is to have; None: its own.
    """
    torch.manual_seed(0)  # the same model and the same batches on every rank
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, use_cache=False, **SIZES)
    model = transformers.LlamaForCausalLM(config)
    batches = torch.randint(config.vocab_size, (steps, 2, 32))
    inputs = {"input_ids": batches[0], "labels": batches[0]}
    sharded: Any = autotp.compile(model, tp=tp, tp_invariant=virtual, example_inputs=inputs)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    losses = []
    for ids in batches:
        loss = sharded(input_ids=ids, labels=ids).loss
        loss.backward()
        sharded.clip_grad_norm_(1.0)  # along the tree
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **sharded.full_state_dict()}


def main() -> int:
    """Train at every number of ranks, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world, equal = dist.get_world_size(), True
    for virtual in (None, world):
        whole = trained(world, steps, virtual)
        name = f"tp_invariant={virtual}" if virtual else "ordinary"
        for tp in (n for n in range(world - 1, 0, -1) if world % n == 0):
            other = trained(tp, steps, virtual)
            odd = sum(not torch.equal(other[key], value) for key, value in whole.items())
            largest = (other["losses"] - whole["losses"]).abs().max().item()
            equal = equal and (not odd or virtual is None)
            if dist.get_rank() == 0:
                print(
                    f"{name}, tp={tp} beside tp={world}: {odd} of {len(whole)} tensors differ, losses by {largest:.1e}"
                )
    if dist.get_rank() == 0:
        print("Right" if equal else "WRONG")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
