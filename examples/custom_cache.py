"""A model that no library wrote takes its cache as tensors and returns it; sharded, each rank keeps its part of it.

    torchrun --nproc-per-node 2 examples/custom_cache.py

`carried` says which output comes back as which input. Each rank gets its part of those outputs and passes it on as it
is; the first call passes whole tensors of length 0. Runs on the CPU in seconds, on any number of ranks; the exit status
is 0 where every token is that of the original.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autotp

HEADS, KV_HEADS, SIZE, WORDS = 8, 2, 8, 96
WIDTH = HEADS * SIZE


class Decoder(nn.Module):
    """One block: every two key/value heads serve eight heads of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KV_HEADS * SIZE), nn.Linear(WIDTH, KV_HEADS * SIZE)

    def forward(self, ids: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scores of each next word, and keys and values [batch, key/value heads, length, size] of all tokens."""
        x = self.table(ids)
        q = self.q(x).unflatten(-1, (KV_HEADS, HEADS // KV_HEADS, SIZE))
        k = torch.cat([past_k, self.k(x).unflatten(-1, (KV_HEADS, SIZE)).transpose(1, 2)], 2)
        v = torch.cat([past_v, self.v(x).unflatten(-1, (KV_HEADS, SIZE)).transpose(1, 2)], 2)
        scores = torch.einsum("bighd,bgjd->bghij", q, k) / SIZE**0.5
        at = torch.arange(k.shape[2], device=ids.device)
        later = at > at[past_k.shape[2] :, None]  # a token sees those before it, and itself
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        y = torch.einsum("bghij,bgjd->bighd", weights, v).flatten(2)
        return self.head(x + self.o(y)), k, v


def decode(model: nn.Module, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy decoding: the new words, and what the cache has become."""
    k = v = torch.zeros(len(ids), KV_HEADS, 0, SIZE)
    new = []
    for _ in range(tokens):
        scores, k, v = model(ids, k, v)
        ids = scores[:, -1:].argmax(-1)
        new.append(ids)
    return torch.cat(new, 1), k


def main() -> int:
    """Decode with both models."""
    torch.manual_seed(0)  # the same model and the same prompt on every rank
    model, prompt = Decoder().eval(), torch.randint(WORDS, (2, 5))
    past = torch.zeros(2, KV_HEADS, 7, SIZE)  # its length may be any in later calls
    sharded = autotp.compile(model, example_inputs=(prompt, past, past), carried={1: "past_k", 2: "past_v"})
    with torch.no_grad():
        (ours, cache), (theirs, whole) = decode(sharded, prompt, 24), decode(model, prompt, 24)
    right = torch.equal(ours, theirs)
    shapes: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(cache.shape))
    if dist.get_rank() == 0:
        print(sharded.plan)
        print(f"keys on the ranks: {', '.join(map(str, shapes))}, of {tuple(whole.shape)}")
        print("Right" if right else "WRONG")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
