"""Reinforcement learning with two layouts of one model: a policy that trains, and a generator whose weights follow it.

    torchrun --nproc-per-node 4 examples/grpo.py
    torchrun --nproc-per-node 4 examples/grpo.py --steps 6 --compare
    torchrun --nproc-per-node 4 examples/grpo.py --steps 6 --invariant

The policy is trained at dp=2 x tp=2, and completions are drawn by `generate()` of a module at tp=4 over the same four
ranks; after each step `autotp.move` carries the weights over, and nothing is gathered. The algorithm is group relative
policy optimisation (Shao et al. 2024): several completions of each prompt, whose rewards are compared with each other.
A completion is rewarded for tokens of the parity of its prompt's last one, which the tiny model learns in a minute.

The log-probabilities of the tokens that were drawn are not quite those that the policy has for them. The difference is
printed in two parts: what other degrees make of it (0 with --invariant, where both have the bits of tp=4), and what
decoding with a cache makes of it. --compare trains in one process too, and ends with status 0 only where rewards are
equal and losses differ by rounding alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import autotp

VOCABULARY, PROMPT, NEW = 8, 4, 8  # tokens: that there are, of a prompt, of a completion
PROMPTS, GROUP = 16, 8  # prompts of a step, and completions of each
UPDATES, CLIP = 2, 0.2  # steps of the optimizer for each set of completions; how far the ratio may go from 1
TOLERANCE = 1e-6  # of a loss, in float64


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--invariant", action="store_true", help="the bits of tp=4 at both degrees (without dp)")
    parser.add_argument("--compare", action="store_true", help="with the same training in one process")
    return parser.parse_args()


def model_of() -> nn.Module:
    """A tiny Llama, in float64: so that another order of sums draws no other token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


def prompts_of(step: int) -> Tensor:
    """The prompts of a step, each as often as it has completions."""
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(step))
    return prompts.repeat_interleave(GROUP, 0)


def rewards_of(sequences: Tensor) -> Tensor:
    """The share of a completion's tokens that have the parity of its prompt's last token."""
    return (sequences[:, PROMPT:] % 2 == sequences[:, PROMPT - 1 : PROMPT] % 2).double().mean(1)


def drawn(generator: Any, step: int) -> tuple[Tensor, Tensor]:
    """Completions with their prompts, and the log-probability of each token as it was drawn."""
    torch.manual_seed(step)
    prompts = prompts_of(step)
    with torch.no_grad():
        out = generator.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=True, top_k=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.sequences, picked(torch.stack(out.logits, 1), out.sequences)


def picked(logits: Tensor, sequences: Tensor) -> Tensor:
    """The log-probabilities of the tokens of completions."""
    return logits.log_softmax(-1).gather(-1, sequences[:, PROMPT:, None])[..., 0]


def log_probabilities(module: Any, sequences: Tensor) -> Tensor:
    """The same by one forward over all of them, without a cache."""
    return picked(module(input_ids=sequences, use_cache=False).logits[:, PROMPT - 1 : -1], sequences)


class Loop:
    """A training: the module that learns, the one that draws, and what makes the second follow the first.

    Attributes:
        rows: the part of the sequences that this rank trains on. seconds: by what they were spent on.
        degrees, cache: the largest difference of a log-probability, by its cause.
    """

    def __init__(self, policy: Any, generator: Any, follow: Callable[[], Any], rows: slice, lr: float) -> None:
        self.policy, self.generator, self.follow, self.rows = policy, generator, follow, rows
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
        self.seconds = {"drawing": 0.0, "training": 0.0, "moving": 0.0}
        self.degrees = self.cache = 0.0

    def timed(self, what: str, fn: Callable[[], Any]) -> Any:
        """Do something, and add its seconds to others of its kind."""
        began = time.perf_counter()
        result = fn()
        self.seconds[what] += time.perf_counter() - began
        return result

    def step(self, number: int) -> tuple[float, float]:
        """Draw, learn, move; return the mean reward and the loss of the last update."""
        sequences, at_drawing = self.timed("drawing", lambda: drawn(self.generator, number))
        rewards = rewards_of(sequences).view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        with torch.no_grad():
            before = log_probabilities(self.policy, sequences[self.rows])
            again = log_probabilities(self.generator, sequences)
        self.degrees = max(self.degrees, float((before - again[self.rows]).abs().max()))
        self.cache = max(self.cache, float((again - at_drawing).abs().max()))
        loss = 0.0
        for _ in range(UPDATES):
            loss = self.timed("training", lambda: self.update(sequences[self.rows], advantages[self.rows], before))
        self.timed("moving", self.follow)
        return float(rewards.mean()), loss

    def update(self, sequences: Tensor, advantages: Tensor, before: Tensor) -> float:
        """One step of the optimizer on the clipped objective."""
        ratio = (log_probabilities(self.policy, sequences) - before).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean(loss.detach())


def mean(x: Tensor) -> float:
    """The mean over all ranks, each of which has as many sequences; in one process the value."""
    if Sharded.running:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return float(x)


class Sharded:
    """Whether all ranks train together by now, rather than one by itself."""

    running = True


def sharded(args: argparse.Namespace) -> Loop:
    """The two modules over all ranks."""
    example = {"input_ids": prompts_of(0), "use_cache": False}
    options: dict[str, Any] = {"tp_invariant": 4} if args.invariant else {}
    axes = {} if args.invariant else {"dp": 2}
    half = {"input_ids": prompts_of(0)[: PROMPTS * GROUP // 2], "use_cache": False}
    policy = autotp.compile(model_of(), 2, example_inputs=half if axes else example, **axes, **options)
    generator = autotp.compile(model_of(), 4, example_inputs=example, **options)
    place, slices = (dist.get_rank() // 2, 2) if axes else (0, 1)
    rows = PROMPTS * GROUP // slices
    own = slice(place * rows, (place + 1) * rows)
    return Loop(policy, generator, lambda: autotp.move(policy, generator), own, args.lr)


def main() -> int:
    """Train, and say what came of it."""
    args = arguments()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if dist.get_world_size() != 4:
        raise SystemExit("this example runs on 4 ranks: torchrun --nproc-per-node 4 examples/grpo.py")
    loop = sharded(args)
    loop.step(0)  # programs are made at their first calls
    loop.seconds = dict.fromkeys(loop.seconds, 0.0)
    curve = []
    for number in range(1, args.steps + 1):
        curve.append(loop.step(number))
        if first and (number % 5 == 0 or number == args.steps):
            print(f"step {number}: reward {curve[-1][0]:.3f}, loss {curve[-1][1]:+.5f}", flush=True)
    parts = torch.tensor([loop.degrees, loop.cache], dtype=torch.float64)
    dist.all_reduce(parts, op=dist.ReduceOp.MAX)
    if first:
        times = ", ".join(f"{name} {seconds / args.steps * 1e3:.1f} ms" for name, seconds in loop.seconds.items())
        print(f"a step: {times}")
        print(f"log-probabilities differ by {parts[0]:.1e} for other degrees, by {parts[1]:.1e} for the cache")
    right = True
    if args.compare:
        Sharded.running = False
        model = model_of()
        alone = Loop(model, model, lambda: None, slice(None), args.lr)
        curve_alone = [alone.step(number) for number in range(args.steps + 1)][1:]
        right = all(a == c and abs(b - d) <= TOLERANCE for (a, b), (c, d) in zip(curve, curve_alone, strict=True))
        if first:
            print("Right: rewards and losses are those of one process" if right else "Wrong: one process differs")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
