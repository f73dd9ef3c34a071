"""The longest sequence of one example that fits, by the memory model, as cp grows: Llama 3 8B, tp=8, trained.

python -m benchmarks.predicted.longest_sequence --memory 80GB --cp 1 2 4 8
"""

from __future__ import annotations

import argparse

import torch
import transformers

import autotp
from autotp.plans.plan import Plan
from autotp.text import read_bytes

STEP = 8192  # tokens: the length is a multiple of it
MOST = 1 << 21
SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": MOST, "use_cache": False,
}  # fmt: skip


def model() -> torch.nn.Module:
    """Llama 3 8B without weights, in bfloat16."""
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()


def planned(llama: torch.nn.Module, tp: int, cp: int, length: int) -> Plan:
    """The plan of one step.

    Args:
        llama: the model. tp, cp: ranks. length: of the whole sequence, in tokens.
    """
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    given = {"input_ids": ids, "labels": ids}
    return autotp.plan(llama, tp, cp=cp, example_inputs=given, check_capture=False, outputs="loss")


def longest(llama: torch.nn.Module, tp: int, cp: int, most: float) -> Plan | None:
    """The plan for the longest sequence that fits; None where none does.

    Args:
        llama: the model. tp, cp: ranks. most: bytes of a device.
    """
    best, low, high = None, 0, MOST // STEP
    while high - low > max(1, low // 16):  # lengths within 6%
        middle = (low + high) // 2
        plan = planned(llama, tp, cp, middle * STEP)
        if plan.memory.peak <= most:
            best, low = plan, middle
        else:
            high = middle
    return best


def main() -> None:
    """The table, a row for each cp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--memory", default="80GB")
    asked = parser.parse_args()
    llama = model()
    print("| cp | devices | longest | kept activations | at the peak | tokens/s a device |\n|" + " ---: |" * 6)
    for cp in asked.cp:
        plan = longest(llama, asked.tp, cp, read_bytes(asked.memory))
        if plan is None:
            print(f"| {cp} | {cp * asked.tp} | none |")
            continue
        tokens, m = plan.totals.length, plan.memory
        rate = tokens / plan.totals.seconds / asked.tp
        row = (cp, cp * asked.tp, f"{tokens * cp:,}", f"{m.activations / 1e9:.1f} GB", f"{m.peak / 1e9:.1f} GB")
        print("| " + " | ".join(map(str, (*row, f"{rate:,.0f}"))) + " |", flush=True)


if __name__ == "__main__":
    main()
