"""Train a language model of transformers on real text: the sources of Python's standard library, bytes as tokens.

    torchrun --nproc-per-node 2 examples/train.py --steps 200
    torchrun --nproc-per-node 4 examples/train.py --tp 2 --dp 2 --bf16
    torchrun --nproc-per-node 2 examples/train.py --steps 15 --compare
    torchrun --nproc-per-node 2 examples/train.py --config path/of/config.json --save last --save-every 50
    torchrun --nproc-per-node 2 examples/train.py --resume last --save last

A script to start from: your model goes into `model_of`, your data into `Text`. All but `autotp.compile` and its
checkpoints is torch's own. A resumed run goes through the same losses as one that was never stopped, to the bit.
--compare trains the whole model too, on every rank, and ends with status 0 only where the two differ by rounding alone.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import autotp

TOLERANCE = {False: 1e-4, True: 3e-2}  # in float32, and with matmuls in bfloat16
CURVE = ("seed", "batch", "length", "accumulate", "steps", "lr", "warm_up", "clip", "dp", "bf16")  # what losses hang on


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, help="a config.json of transformers, or its folder (default: a small Llama)")
    add("--width", type=int, default=256, help="of the small Llama")
    add("--layers", type=int, default=4, help="of the small Llama")
    add("--tp", type=int, help="ranks that one copy of the model is split over (default: world / dp)")
    add("--dp", type=int, default=1, help="ranks that the batch is dealt out to")
    add("--fully-shard", action="store_true", help="split weights over dp too")
    add("--steps", type=int, default=200, help="of the whole run, which is what the schedule is for")
    add("--stop", type=int, metavar="STEP", help="end after this one; --resume goes on from there")
    add("--batch", type=int, default=4, help="sequences of one dp rank in one forward")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--accumulate", type=int, default=2, help="forwards of a step")
    add("--lr", type=float, default=3e-4)
    add("--warm-up", type=int, default=20, help="steps until the full learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of all gradients")
    add("--seed", type=int, default=0, help="of the weights and of dropout")
    add("--recompute", action=argparse.BooleanOptionalAction, default=True, help="layers' activations in the backward")
    add("--bf16", action="store_true", help="matmuls in bfloat16")
    add("--save", type=Path, metavar="DIR", help="write a checkpoint there at the end")
    add("--save-every", type=int, metavar="STEPS", help="and after so many steps each time")
    add("--resume", type=Path, metavar="DIR", help="go on from a checkpoint")
    add("--logger", "--log", choices=["tensorboard"], help="losses, norms and rates, to look at while it runs")
    add("--log-dir", type=Path, default=Path("runs"), metavar="DIR", help="where to (default: runs)")
    add("--compare", action="store_true", help="train the whole model too, without dropout, and compare")
    args = parser.parse_args(argv)
    if args.save_every and not args.save:
        parser.error("--save-every needs --save DIR")
    if args.compare and args.resume:
        parser.error("--compare begins at the first step: leave out --resume")
    return args


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


class Text:
    """Batches of bytes from random places of the standard library's sources (rows, length), the same on every rank.

    Which batches come next hangs on `position` alone, so that is all a checkpoint has to hold.
    """

    def __init__(self, rows: int, length: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.bytes = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.rows, self.length, self.position = rows, length, 0

    def __next__(self) -> Tensor:
        draw = torch.Generator().manual_seed(self.position)
        starts = torch.randint(len(self.bytes) - self.length, (self.rows,), generator=draw)
        self.position += 1
        return torch.stack([self.bytes[start : start + self.length] for start in starts]).long()


def config_of(args: argparse.Namespace) -> Any:
    """The model's config: of --config, of the checkpoint that is resumed, or that of a small Llama."""
    if args.resume and args.resume.is_dir() and not (args.resume / "autotp.json").exists():
        raise SystemExit(f"--resume {args.resume}: this folder holds no checkpoint of this script")
    path = args.config or (args.resume if args.resume and (args.resume / "config.json").exists() else None)
    if path is None:
        return LlamaConfig(
            vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=args.length, use_cache=False,
        )  # fmt: skip
    if not path.exists():
        raise SystemExit(f"--config {path}: there is no such file or folder")
    return AutoConfig.from_pretrained(path, use_cache=False)


def model_of(args: argparse.Namespace) -> Any:
    """The whole model, with the same weights on every rank."""
    config = config_of(args)
    if getattr(config, "vocab_size", 256) < 256:
        raise SystemExit(f"the tokens are bytes, and the config's vocab_size is {config.vocab_size}: take 256 or more")
    if getattr(config, "max_position_embeddings", args.length) < args.length:
        raise SystemExit(f"--length {args.length}: the model has {config.max_position_embeddings} positions")
    torch.manual_seed(args.seed)
    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise SystemExit(f"{type(config).__name__} is the config of no causal language model") from error
    if args.resume and (args.resume / "config.json").exists():
        before, now = AutoConfig.from_pretrained(args.resume).to_dict(), model.config.to_dict()
        other = [f"{k}={before.get(k)!r}" for k in now if now[k] != before.get(k) and not k.startswith("_")]
        if other:
            raise SystemExit(f"--resume {args.resume} is of another model than --config: {', '.join(other[:5])} there")
    return model.train(not args.compare)  # dropout by counter draws other numbers than the whole model's


class Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's."""
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def shard(model: nn.Module, args: argparse.Namespace) -> Any:
    """The sharded model, with its layers recomputed."""
    ids = next(Text(args.batch, args.length))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=args.bf16):  # so that this is what is captured
        sharded: Any = autotp.compile(
            model, args.tp, dp=args.dp, fully_shard=args.fully_shard, example_inputs={"input_ids": ids, "labels": ids}
        )
    lists = [m for m in sharded.modules() if isinstance(m, nn.ModuleList)]
    layers = max(lists, key=len, default=nn.ModuleList())  # the longest list of modules is that of the layers
    for i in range(len(layers) if args.recompute else 0):
        layers[i] = Recomputed(layers[i])
    return sharded


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
            last = i == len(tokens) - 1  # gradients are summed over dp in the last backward of a step only
            alone = isinstance(self.model, autotp.ShardedModule) and not last
            autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=self.args.bf16)
            with self.model.no_sync() if alone else nullcontext(), autocast:
                loss = self.model(input_ids=ids, labels=ids).loss / len(tokens)
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total, (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


class Monitor:
    """What is worth watching, on rank 0: a line of progress, every tenth one where there is no terminal, and logs."""

    def __init__(self, args: argparse.Namespace, step: int) -> None:
        self.first, self.steps, self.tty, self.writer = dist.get_rank() == 0, args.steps, sys.stderr.isatty(), None
        if self.first and args.logger == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 a library that only this option needs

            self.writer = SummaryWriter(str(args.log_dir), purge_step=step + 1)  # what comes after is done again

    def show(self, step: int, speed: float, peak: str, **values: float) -> None:
        """The values of a step, which has just been done."""
        line = f"step {step}/{self.steps}  loss {values['loss']:.4f}  {speed:,.0f} tokens/s  {peak} peak"
        if self.first and (self.tty or step % 10 == 0):
            print(line, end="\r" if self.tty and step < self.steps else "\n", file=sys.stderr, flush=True)
        if self.writer is not None:
            for name, value in {**values, "tokens_per_second": speed}.items():
                self.writer.add_scalar(f"train/{name}", value, step)
            self.writer.flush()


def memory(device: torch.device) -> str:
    """The most that this rank has held."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What losses hang on, beside the state of a run."""
    return {name: getattr(args, name) for name in CURVE} | {"ranks": dist.get_world_size()}


def random_states() -> list[str]:
    """This rank's generators: what dropout draws next hangs on them."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return [bytes(state.tolist()).hex() for state in states]


def save(trainer: Trainer, text: Text, step: int) -> None:
    """Weights and optimizer, each rank its own part; beside them all that the next losses hang on, and the config."""
    args, states = trainer.args, [None] * dist.get_world_size()
    dist.all_gather_object(states, random_states())
    extra = {"step": step, "position": text.position, "schedule": trainer.schedule.state_dict(), "random": states}
    extra |= {"options": options(args)}
    trainer.model.save_checkpoint(args.save, optimizer=trainer.optimizer, extra=extra)
    if dist.get_rank() == 0:  # at once: a run that ends here leaves no half of a file
        part = args.save / "config.json.part"
        part.write_text(trainer.model.config.to_json_string())
        part.replace(args.save / "config.json")
    dist.barrier()


def resume(trainer: Trainer, text: Text) -> int:
    """Put everything back as `save` wrote it; the steps that were done."""
    args = trainer.args
    try:
        extra = trainer.model.load_checkpoint(args.resume, optimizer=trainer.optimizer).extra
    except autotp.AutoTPError as error:
        raise SystemExit(f"--resume {args.resume}: {error}") from error
    if "position" not in extra:
        raise SystemExit(f"--resume {args.resume}: these are weights alone; this script saved no step with them")
    trainer.schedule.load_state_dict(extra["schedule"])
    text.position = extra["position"]
    states = [bytearray.fromhex(state) for state in extra["random"][dist.get_rank() % len(extra["random"])]]
    torch.set_rng_state(torch.frombuffer(states[0], dtype=torch.uint8))
    if torch.cuda.is_available() and len(states) > 1:
        torch.cuda.set_rng_state(torch.frombuffer(states[1], dtype=torch.uint8))
    if other := [f"{k}={v}" for k, v in extra["options"].items() if v != options(args)[k]]:
        say(f"The run before had {', '.join(other)}: these losses do not continue its curve.")
    return extra["step"]


def train(args: argparse.Namespace, sharded: Any, whole: Any) -> tuple[list[float], float]:
    """All steps; the losses, and the largest relative difference from the whole model where that is trained beside."""
    device, dp, losses, worst = next(sharded.parameters()).device, args.dp, [], 0.0
    text = Text(dp * args.batch, args.length)
    trainers = [Trainer(m, args) for m in (sharded, whole) if m is not None]
    begin, end = resume(trainers[0], text) if args.resume else 0, min(args.steps, args.stop or args.steps)
    if begin >= end:
        raise SystemExit(f"{begin} steps are done, and --steps or --stop say {end}")
    mine = dist.get_rank() // sharded.plan.tp % dp  # ranks that follow each other are a tp group
    monitor = Monitor(args, begin)
    for step in range(begin + 1, end + 1):
        tokens, start = [next(text).to(device) for _ in range(args.accumulate)], time.perf_counter()
        loss, norm = trainers[0].step([t.chunk(dp)[mine] for t in tokens])
        speed = args.accumulate * dp * args.batch * args.length / (time.perf_counter() - start)
        losses.append(loss)
        for other in trainers[1:]:
            true_loss, true_norm = other.step(tokens)
            worst = max(worst, abs(loss / true_loss - 1), abs(norm / true_norm - 1))
        rate = float(trainers[0].schedule.get_last_lr()[0])
        monitor.show(step, speed, memory(device), loss=loss, gradient_norm=norm, rate=rate)
        if args.save and (step == end or (args.save_every and step % args.save_every == 0)):
            save(trainers[0], text, step)
    return losses, worst


def run(args: argparse.Namespace) -> tuple[list[float], bool]:
    """Shard, train, and say how it went; the losses, and whether they are the whole model's where that was asked."""
    model = model_of(args)
    sharded = shard(model, args)
    device, count = next(sharded.parameters()).device, sum(p.numel() for p in model.parameters()) / 1e6
    here = sum(p.to_local().numel() for p in sharded.parameters()) / 1e6
    say(f"{count:.2f} million parameters, {here:.2f} million on this rank: tp={sharded.plan.tp} dp={args.dp}")
    whole = model.to(device) if args.compare else None
    del model
    losses, worst = train(args, sharded, whole)
    right = worst <= TOLERANCE[args.bf16]
    say(f"{len(losses)} steps: loss {losses[0]:.4f} at the first, {losses[-1]:.4f} at the last; {memory(device)} peak")
    if args.compare:
        say(f"{'Right' if right else 'WRONG'}: losses and norms differ by at most {worst:.1e} from the whole model's")
    return losses, right


if __name__ == "__main__":
    _, right = run(arguments())
    dist.destroy_process_group()
    sys.exit(0 if right else 1)
