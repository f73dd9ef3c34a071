"""The pool of workers that the tests share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes.pool import Pool


def fail(rank: int, world: int, group: dist.ProcessGroup) -> None:
    if rank == world - 1:
        raise ValueError("the last rank's own words")
    dist.barrier(group)


def rank_of(rank: int, world: int, group: dist.ProcessGroup) -> int:
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    return rank * 10 + int(total)


def test_pool_survives_a_failing_rank(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="the last rank's own words"):
        pool.run(fail, world=2)
    assert pool.run(rank_of, world=3) == [3, 13, 23]
    assert pool.run(rank_of, world=1) == [0]
