"""Train a GPT-2 in pipeline stages of one tensor-parallel plan, by one of torch's schedules.

    torchrun --nproc-per-node 4 examples/train_pipeline.py --pp 2 --tp 2 --schedule Schedule1F1B

Prints the stages and the losses; the exit status is 0 where these are the model's own on one device.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from transformers import GPT2Config, GPT2LMHeadModel

import autotp

SIZES = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, vocab_size=128, bos_token_id=0, eos_token_id=0)


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser()
    for name, value in {"pp": 2, "tp": 2, "dp": 1, "chunks": 1, "microbatches": 4, "rows": 8, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--schedule", default="Schedule1F1B", help="a class of torch.distributed.pipelining.schedules")
    parser.add_argument("--save", help="a folder for a checkpoint")
    return parser.parse_args()


def batch(step: int, rows: int, slices: int = 1, at: int = 0) -> dict[str, torch.Tensor]:
    """One of so many slices of a batch: rows of tokens."""
    ids = torch.randint(128, (rows, 16), generator=torch.Generator().manual_seed(step)).chunk(slices)[at]
    return {"input_ids": ids, "labels": ids}


def train(args: argparse.Namespace, model: GPT2LMHeadModel) -> tuple[list[float], torch.Tensor]:
    """Losses of the stages, and what they generate afterwards."""
    micro = batch(0, args.rows, args.dp * args.microbatches)
    order = "v" if "ZBV" in args.schedule else "loop"
    pipe = autotp.stages(model, args.pp, args.tp, dp=args.dp, chunks=args.chunks, order=order, example_inputs=micro)
    if dist.get_rank() == 0:
        print(pipe)
    schedule = pipe.schedule(getattr(schedules, args.schedule), args.microbatches)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    losses, lane = [], dist.get_rank() // args.tp % args.dp  # this rank's place on the dp axis
    for step in range(args.steps):
        losses.append(pipe.step(schedule, **batch(step, args.rows, args.dp, lane)).item())
        pipe.clip_grad_norm_(1.0)  # the norm of all stages
        optimizer.step()
        optimizer.zero_grad()
    pipe.module.eval()
    tokens = pipe.module.generate(micro["input_ids"][:1, :4], max_new_tokens=8, do_sample=False)  # on every rank
    if args.save:
        pipe.save_checkpoint(args.save, format="huggingface")  # transformers' from_pretrained reads it
    return losses, tokens


def main() -> None:
    """Train the stages, then the model on one device."""
    args = arguments()
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(SIZES).eval()  # without dropout: with it, one device would draw other masks
    (losses, tokens), optimizer = train(args, model), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, found in enumerate(losses):
        loss = model(**batch(step, args.rows)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if abs(found - loss.item()) > 1e-4:
            sys.exit(f"step {step}: the stages' loss is {found:.6f}, the model's {loss.item():.6f}")
    prompt = batch(0, args.rows)["input_ids"][:1, :4]
    if not torch.equal(tokens, model.generate(prompt, max_new_tokens=8, do_sample=False)):
        sys.exit(f"the stages generate {tokens.tolist()}")
    if dist.get_rank() == 0:
        print(f"losses {', '.join(f'{x:.4f}' for x in losses)}\nRight")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
