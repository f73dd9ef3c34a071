"""Training that outlives its ranks: what a killed rank held is in shared memory, and those that come go on from it.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/outlive.py

Kill one of the two processes while it runs (`--slow 1` takes a second for each step): torchrun starts both again, and
they go on after the last step that was kept. On several nodes see docs/checkpoints.md, "Outlive a rank".
"""

import time

BEGAN = time.time()  # before imports, which take as long as all the rest of a start

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import autotp  # noqa: E402

IMPORTED = time.time()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; `--help` lists them."""
    parser = argparse.ArgumentParser(description="Training that outlives its ranks.")
    add = parser.add_argument
    add("--steps", type=int, default=20, help="of the whole run")
    add("--every", type=int, default=1, help="keep each step of so many")
    add("--redundancy", type=int, default=0, help="1: a neighbour holds a second copy")
    add("--width", type=int, default=96, help="of the Llama")
    add("--heads", type=int, default=12, help="of the Llama")
    add("--layers", type=int, default=2, help="of the Llama")
    add("--tp-invariant", type=int, help="12: the same losses, to the bit, by 1, 2, 3, 4, 6 and 12 ranks")
    add("--slow", type=float, default=0, metavar="SECONDS", help="that each step takes longer, to kill one in")
    return parser.parse_args(argv)


def model_of(args: argparse.Namespace) -> Any:
    """The whole model, with the same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=args.layers,
            num_attention_heads=args.heads, num_key_value_heads=args.heads, use_cache=False,
        )
    )  # fmt: skip


def batch(step: int) -> Tensor:
    """The tokens of a step, `[2, 32]`: counting, from places that depend on the step alone."""
    starts = torch.randint(256, (2, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(32)) % 256


def train(args: argparse.Namespace) -> None:
    """Train to the last step, from where an earlier start of this run was ended."""
    first = batch(0)
    sharded: Any = autotp.compile(
        model_of(args),
        example_inputs={"input_ids": first, "labels": first},
        tp_invariant=args.tp_invariant,
        resume=True,
    )
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    with sharded.snapshot(optimizer, every=args.every, redundancy=args.redundancy) as kept:
        began = kept.step
        say(f"tp={dist.get_world_size()} goes on after step {began}\n{kept}", flush=True)
        for step in range(began, args.steps):
            ids = batch(step)
            loss = sharded(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            say(f"step {step + 1}: loss {loss.item():.9g}", flush=True)
            if step == began:
                say(f"started in {time.time() - IMPORTED:.1f} s, after {IMPORTED - BEGAN:.1f} s of imports", flush=True)
            time.sleep(args.slow)
    say(f"done after {args.steps} steps", flush=True)


if __name__ == "__main__":
    train(arguments())
    dist.destroy_process_group()
