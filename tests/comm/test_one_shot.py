"""All-reduces in one step: which go through symmetric memory, and the memory, which is made once."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autotp import compat
from autotp.comm import collectives, one_shot
from benchmarks.gpu.clock import alone

CUDA = torch.device("cuda")
symmetric_memory: Any = compat.running.symmetric_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "x, fits",
    [
        (torch.ones(2, 8), True),
        (torch.ones(2, 16, dtype=torch.bfloat16).t(), True),
        (torch.ones(3), False),  # 12 bytes
        (torch.ones(0, 4), False),
        (torch.ones(2, 8, dtype=torch.float64), False),
        (torch.ones(one_shot.MAX_BYTES // 4 + 4), False),
        (torch.ones(one_shot.MAX_BYTES // 4), True),
    ],
)
def test_what_fits_is_summed_in_one_step(x, fits):
    room, seen = torch.zeros(one_shot.MAX_BYTES, dtype=torch.uint8), []

    def summed(view: Tensor, value: Tensor, group: str) -> Tensor:
        assert view.data_ptr() == room.data_ptr() and view.shape == value.shape and view.dtype == value.dtype
        assert value.is_contiguous()
        seen.append("one step")
        return 2 * value

    def usual(primitive: str, value: Tensor, reduction: str, *, tp: int, group: str) -> Tensor:
        seen.append(f"{primitive} {reduction} {tp} {group}")
        return 2 * value

    with (
        patch.object(compat, "symmetric_room", lambda group, size, device: room),
        patch.object(compat, "one_shot_sum", summed),
        patch.object(collectives, "real", usual),
    ):
        torch.testing.assert_close(torch.ops.autotp.one_shot_all_reduce(x, 2, "a"), 2 * x)
    assert seen == ["one step" if fits else "all_reduce sum 2 a"]


def test_room_is_made_once_for_a_group_and_none_where_it_cannot_be_had(caplog):
    def refused(*size: int, **options: Any) -> Tensor:
        made.append("refused")
        raise RuntimeError("no peer can read it")

    def had(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append("had")
        return torch.empty(size, dtype=dtype)

    made: list[str] = []
    fakes: dict[str, Any] = {"enable_symm_mem_for_group": lambda group: None, "rendezvous": lambda room, group: None}
    for empty in (refused, had):
        with alone(2) as group, patch.multiple(symmetric_memory, empty=empty, **fakes):
            rooms = [compat.symmetric_room(group, 64, CUDA) for _ in range(2)]
            assert rooms[0] is rooms[1] and (rooms[0] is None) == (empty is refused)
            assert compat.symmetric_room(group, 64, torch.device("cpu")) is None
    assert made == ["refused", "had"] and "no peer can read it" in caplog.text
    assert not dist.is_initialized()
