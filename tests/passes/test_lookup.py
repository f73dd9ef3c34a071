"""Looking up along a split dimension."""

from __future__ import annotations

import pytest
import torch

from autotp.ir.specs import Runs
from autotp.rules.lookup import vocabulary_embedding

ROWS = Runs(1, ((3, 1),))  # three rows over four ranks: the last one has none


@pytest.mark.parametrize("rank", range(4))
def test_an_unknown_id_fails_on_every_rank(rank):
    rows = torch.ones(int(rank < 3), 2)
    for ids in ([0, 3], [-1, 0]):
        with pytest.raises(IndexError):
            vocabulary_embedding(rows, torch.tensor(ids), ROWS, -1, rank=rank, tp=4)
    found = vocabulary_embedding(rows, torch.tensor([0, 1, 2]), ROWS, -1, rank=rank, tp=4)
    assert found.sum() == 2 * (rank < 3)
