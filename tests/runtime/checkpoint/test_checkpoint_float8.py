"""A run with delayed scaling in float8 that is saved and loaded goes on to the bit: also within a step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.compare import difference, mesh_of
from tests.helpers.modules.float8 import WORDS, sharded, words

BATCHES = torch.arange(7 * 32).view(7, 4, 8) % WORDS
SAVED, END = (3, 4), 6  # after so many micro-batches: within a step of two, and between two steps


class Run:
    """Micro-batches, of which two are a step, with an evaluation after each."""

    def __init__(self, **where: Any) -> None:
        self.model = sharded(words(torch.float64), "delayed", BATCHES[0], **where)
        self.begin()

    def begin(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())

    def go(self, first: int, last: int) -> list[dict[str, Tensor]]:
        """The loss of each, and the histories after it."""
        seen = []
        for i in range(first, last):
            self.model.train()
            loss = self.loss(BATCHES[i])
            (loss / 2).backward()
            if i % 2:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.model.eval()
            self.loss(BATCHES[-1])
            histories = {n: b.clone() for n, b in self.model.named_buffers() if "float8" in n}
            seen.append({"loss": loss.detach(), **histories})
        return seen

    @torch.no_grad()
    def load(self, folder: str, done: int) -> None:
        """In place of all that it has, which is lost before."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.zero_()
        self.optimizer.zero_grad()
        self.begin()
        self.model.load_checkpoint(Path(folder) / str(done), optimizer=self.optimizer)


def on_ranks(rank: int, world: int, group: Any, folder: str) -> tuple[Any, Any, Any]:
    """What a run saw that was never stopped; others, from what it had saved; and one that has lost what waits."""
    run = Run(mesh=mesh_of(group))
    straight, gradients = run.go(0, SAVED[0]), {}
    for done, following in pairwise((*SAVED, END)):
        run.model.save_checkpoint(Path(folder) / str(done), optimizer=run.optimizer)
        gradients[done] = [None if p.grad is None else p.grad.clone() for p in run.model.parameters()]
        straight += run.go(done, following)
    resumed = []
    for done in (*SAVED, SAVED[-1]):
        run.load(folder, done)
        for p, gradient in zip(run.model.parameters(), gradients[done], strict=True):
            p.grad = gradient
        if len(resumed) == len(SAVED):
            run.model.block.q.float8_latest.zero_()
        resumed.append(run.go(done, END))
    return straight, resumed[:-1], resumed[-1]


def equal(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    pairs = [(a[n], b[n]) for a, b in zip(some, others, strict=True) for n in a]
    return all(torch.equal(a, b) for a, b in pairs) and len(pairs) == 17 * len(some)


@pytest.mark.ranks
def test_a_run_with_histories_goes_on_to_the_bit_and_at_another_degree(pool, tmp_path):
    alone = Run(tp=1)
    wanted = alone.go(0, END)
    for straight, found, lost in pool.run(on_ranks, str(tmp_path), world=2):
        assert all(equal(seen, straight[done:]) for done, seen in zip(SAVED, found, strict=True))
        assert not equal(lost, straight[SAVED[-1] :])
        assert max(difference(a[n], t) for a, b in zip(straight, wanted, strict=True) for n, t in b.items()) < 1e-12
    alone.load(str(tmp_path), SAVED[-1])
    seen = zip(alone.go(SAVED[-1], END), wanted[SAVED[-1] :], strict=True)
    assert max(difference(a[n], t) for a, b in seen for n, t in b.items()) < 1e-12
