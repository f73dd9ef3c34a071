"""Whole states compared."""

from __future__ import annotations

import torch
from torch import Tensor


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
