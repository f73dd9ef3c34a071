"""Plan a small Llama for 4 ranks and prove the plan, in one process.

    python examples/verify_llama.py

`autotp.verify` simulates the ranks, runs the plan forward and backward in float64, and compares every value and every
gradient with the original. No launcher and no devices are needed; the exit status is 0 where all agree.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp


def main() -> int:
    """Plan, verify, print both."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    report = autotp.verify(LlamaForCausalLM(config), tp=4)  # a transformers model gets its example inputs itself
    print(report.plan)
    print(report)
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
