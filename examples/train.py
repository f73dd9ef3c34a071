"""Train a Llama of a few million parameters on real text: the sources of Python's standard library, bytes as tokens.

    torchrun --nproc-per-node 2 examples/train.py --steps 200
    torchrun --nproc-per-node 4 examples/train.py --tp 2 --dp 2 --bf16
    torchrun --nproc-per-node 2 examples/train.py --steps 15 --compare

Everything but `autotp.compile` is torch's own: AdamW, a schedule with warm-up, clipping, accumulation, activation
checkpointing, autocast. --compare trains the whole model beside it, on every rank, and ends with status 0 only where
losses and gradient norms differ by rounding alone.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

TOLERANCE = {False: 1e-4, True: 3e-2}  # in float32, and with matmuls in bfloat16


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, help="ranks that one copy of the model is split over (default: world / dp)")
    parser.add_argument("--dp", type=int, default=1, help="ranks that the batch is dealt out to")
    parser.add_argument("--fully-shard", action="store_true", help="split weights over dp too")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one dp rank in one forward")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards of a step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warm-up", type=int, default=20, help="steps until the full learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=True, help="recompute layers")
    parser.add_argument("--bf16", action="store_true", help="matmuls in bfloat16")
    parser.add_argument("--compare", action="store_true", help="train the whole model too and compare")
    return parser.parse_args()


def text() -> Tensor:
    """The modules of the standard library one after another, as bytes (n)."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(corpus: Tensor, rows: int, length: int, number: int) -> Tensor:
    """Sequences of bytes from random places (rows, length); the same for the same number, on every rank."""
    starts = torch.randint(len(corpus) - length, (rows,), generator=torch.Generator().manual_seed(number))
    return torch.stack([corpus[start : start + length] for start in starts]).long()


def model_of(args: argparse.Namespace) -> nn.Module:
    """The whole model, with the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=args.length, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's."""
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


class Trainer:
    """A model with its optimizer and schedule; `tokens` are micro-batches of one step."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.args.warm_up:
            return (step + 1) / self.args.warm_up
        done = (step - self.args.warm_up) / max(self.args.steps - self.args.warm_up, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))

    def step(self, tokens: list[Tensor]) -> tuple[float, float]:
        """One step; the loss before it, and the norm of all gradients before clipping."""
        total = 0.0
        for i, ids in enumerate(tokens):
            last = i == len(tokens) - 1
            with syncing(self.model, last), autocast(ids.device.type, self.args):
                loss = self.model(input_ids=ids, labels=ids).loss / len(tokens)
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total, (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def autocast(device: str, args: argparse.Namespace) -> Any:
    """Where --bf16 asks for it."""
    return torch.autocast(device, torch.bfloat16, enabled=args.bf16)


def syncing(model: Any, last: bool) -> Any:
    """Gradients are summed over dp in the last backward of a step only."""
    return nullcontext() if last or not isinstance(model, autotp.ShardedModule) else model.no_sync()


def shard(model: nn.Module, args: argparse.Namespace) -> Any:
    """The sharded model, with its layers checkpointed."""
    ids = batch(text(), args.batch, args.length, 0)
    with autocast("cuda" if torch.cuda.is_available() else "cpu", args):  # so that this is what is captured
        sharded: Any = autotp.compile(
            model, args.tp, dp=args.dp, fully_shard=args.fully_shard, example_inputs={"input_ids": ids, "labels": ids}
        )
    if args.checkpoint:
        layers = sharded.model.layers
        for i in range(len(layers)):
            layers[i] = Checkpointed(layers[i])
    return sharded


def memory(device: torch.device) -> str:
    """The most that this rank has held."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def bar(first: bool) -> Progress:
    """A progress bar with what is worth watching, on one rank only."""
    told = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s  {task.fields[memory]} peak")
    console = Console(stderr=True, quiet=not first)
    return Progress(MofNCompleteColumn(), BarColumn(), told, TimeRemainingColumn(), console=console)


def train(args: argparse.Namespace, sharded: Any, whole: nn.Module | None, tell: Callable[[str], None]) -> float:
    """All steps; the largest relative difference from the whole model, where that is trained beside."""
    corpus, device, dp, worst = text(), next(sharded.parameters()).device, args.dp, 0.0
    trainers = [Trainer(m, args) for m in (sharded, whole) if m is not None]
    mine, losses = dist.get_rank() // sharded.plan.tp % dp, []  # ranks that follow each other are a tp group
    with bar(dist.get_rank() == 0) as progress:
        task = progress.add_task("", total=args.steps, loss=math.nan, speed=0.0, memory="")
        for step in range(args.steps):
            numbers = range(step * args.accumulate, (step + 1) * args.accumulate)
            tokens = [batch(corpus, dp * args.batch, args.length, n).to(device) for n in numbers]
            start = time.perf_counter()
            loss, norm = trainers[0].step([t.chunk(dp)[mine] for t in tokens])
            speed = args.accumulate * dp * args.batch * args.length / (time.perf_counter() - start)
            losses.append(loss)
            for other in trainers[1:]:
                true_loss, true_norm = other.step(tokens)
                worst = max(worst, abs(loss / true_loss - 1), abs(norm / true_norm - 1))
            progress.update(task, advance=1, loss=loss, speed=speed, memory=memory(device))
    tell(f"{args.steps} steps: loss {losses[0]:.4f} at the first, {losses[-1]:.4f} at the last; {memory(device)} peak")
    return worst


def main() -> int:
    """Shard, train, and say how it went."""
    args = arguments()
    model = model_of(args)
    sharded = shard(model, args)
    first = dist.get_rank() == 0
    held = sum(p.to_local().numel() for p in sharded.parameters())

    def tell(line: str) -> None:
        if first:
            print(line, flush=True)

    count, degrees = sum(p.numel() for p in model.parameters()), f"tp={sharded.plan.tp} dp={args.dp}"
    tell(f"{count / 1e6:.2f} million parameters, {held / 1e6:.2f} million on this rank: {degrees}")
    whole = model.to(next(sharded.parameters()).device) if args.compare else None
    del model
    worst = train(args, sharded, whole, tell)
    right = worst <= TOLERANCE[args.bf16]
    if args.compare:
        tell(f"{'Right' if right else 'WRONG'}: losses and norms differ by at most {worst:.1e} from the whole model's")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
