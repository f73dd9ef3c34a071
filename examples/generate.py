"""Generate text with a model that is split over the ranks, token by token.

    torchrun --nproc-per-node 2 examples/generate.py --folder path/of/save_pretrained --prompt "Once upon a time"
    torchrun --nproc-per-node 3 examples/generate.py --tokens 200 --sample

Every rank reads its own slices of the folder (`autotp.from_pretrained`), holds its part of the cache and takes the same
tokens; rank 0 prints them as they come, and tokens a second at the end. Without --folder rank 0 makes a small Llama
with random weights, whose tokens are bytes. Ctrl-C ends all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import autotp

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder of transformers; default: a small model made on the spot")
    parser.add_argument("--prompt", default="def main() -> int:")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens, where no other ends the text before")
    parser.add_argument("--sample", action="store_true", help="draw tokens, rather than to take the likeliest")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Bytes:
    """The tokenizer of the small model: a token for each byte."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        ids = torch.tensor([list(text.encode())])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("latin-1")


def small_model(folder: Path) -> None:
    """Save a Llama with random weights; six heads with two of keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape))  # as they come, random weights repeat one token
    model.generation_config = GenerationConfig()  # type: ignore[assignment]
    model.save_pretrained(folder)


class Printer(BaseStreamer):
    """Prints the text of the tokens as they come, on rank 0, and takes the time of those after the first."""

    def __init__(self, tokenizer: Any, first: bool) -> None:
        self.tokenizer, self.first = tokenizer, first
        self.ids: list[int] = []
        self.shown = ""
        self.times: list[float] = []
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Token ids: first the prompt's, then one at a time."""
        if self.prompt:
            self.prompt = False
            return
        self.times.append(time.perf_counter())
        self.ids += value.flatten().tolist()
        if self.first:
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text

    def end(self) -> None:
        """The last token has come."""
        if self.first:
            print(flush=True)

    @property
    def speed(self) -> float:
        """Tokens a second, without the first: that one took the whole prompt, and the programs were made."""
        settled = self.times[2:] if len(self.times) > 3 else self.times
        return (len(settled) - 1) / (settled[-1] - settled[0]) if len(settled) > 1 else 0.0


def generate(args: argparse.Namespace, folder: Path, tokenizer: Any) -> Printer:
    """Load, say what this rank holds, and generate."""
    sharded: Any = autotp.from_pretrained(folder, objective="decode")
    first = dist.get_rank() == 0
    if first:
        held = sum(p.to_local().numel() for p in sharded.parameters())
        whole = sum(p.numel() for p in sharded.parameters())
        print(f"tp={sharded.plan.tp}: {held / 1e6:.2f} of {whole / 1e6:.2f} million parameters on this rank")
    device = next(sharded.parameters()).device
    inputs = {k: v.to(device) for k, v in tokenizer(args.prompt, return_tensors="pt").items()}
    torch.manual_seed(args.seed)  # rank 0's counts
    printer = Printer(tokenizer, first)
    more = {"cache_implementation": "static"} if args.cache == "static" else {}
    with torch.inference_mode():
        sharded.generate(**inputs, max_new_tokens=args.tokens, do_sample=args.sample, streamer=printer, **more)
    return printer


def place(args: argparse.Namespace) -> Path:
    """The folder of the model, which rank 0 makes where none is given, for all ranks."""
    if args.folder is not None:
        return args.folder
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if dist.get_rank() == 0:
        small_model(Path(names[0]))
    dist.broadcast_object_list(names)
    return Path(names[0])


def interrupt(*_: Any) -> None:
    """What a signal does: torchrun sends SIGTERM to the ranks where Ctrl-C ends it, or where one of them fails."""
    raise KeyboardInterrupt


def main() -> int:
    """Generate, and say how fast."""
    args = arguments()
    signal.signal(signal.SIGTERM, interrupt)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        folder = place(args)
        printer = generate(args, folder, Bytes() if args.folder is None else AutoTokenizer.from_pretrained(folder))
    except KeyboardInterrupt:
        print(f"rank {dist.get_rank()} was interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # the other ranks may be gone, and leaving the process group would wait for them
    digest = hashlib.sha256(repr(printer.ids).encode()).hexdigest()[:12]
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if printer.first:
        print(
            f"{len(printer.ids)} tokens, {printer.speed:.1f} tokens/s; on all ranks the same: {len(set(digests)) == 1}"
        )
    dist.destroy_process_group()
    return 0 if len(set(digests)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
