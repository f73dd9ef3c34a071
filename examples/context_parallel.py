"""Training on long sequences: each dealt over cp ranks, weights split over tp ranks.

torchrun --nproc-per-node 4 examples/context_parallel.py --cp 2 --length 4096
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import autotp

SIZES = {"n_embd": 128, "n_layer": 2, "n_head": 8, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}


def main() -> None:
    """A few steps, the first of which is compared with one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    shape = asked.cp, dist.get_world_size() // asked.cp
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("cp", "tp"))

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=asked.length, **SIZES, **STILL)
    with torch.device(kind):
        model = transformers.GPT2LMHeadModel(config)
        tokens = torch.randint(config.vocab_size, (1, asked.length))  # the whole sequence, the same on all ranks
    batch = {"input_ids": tokens, "labels": tokens}

    sharded = autotp.compile(model, cp=asked.cp, mesh=mesh, example_inputs=batch, outputs="loss")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    losses = []
    for step in range(asked.steps):
        loss = sharded(**batch)  # of all tokens of the sequence, of which this rank computes its part
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    if dist.get_rank() == 0:
        print(f"{asked.length} tokens, {asked.length // asked.cp} on each cp rank")
        print(*(note for note in sharded.plan.notes if "over cp" in note), sep="\n")
        wanted = float(model(**batch).loss.detach())
        print("Right" if abs(losses[0] - wanted) < 1e-4 else f"Wrong: one device has {wanted:.4f} in step 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
