"""Dropout by counter: the kernel by Triton's interpreter, against their twins."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from autotp.kernels import dropout
from autotp.kernels.operators import counter_dropout
from tests.helpers.cases.kernel_compile import compiling
from tests.helpers.close import CLOSE, DTYPES, differ
from tests.helpers.processes.interpreter import Interpreter

OPS: Any = torch.ops.autotp
PLACES: dict[str, tuple[list[int], list[int], int, list[int] | None]] = {  # size here, whole, dimension, place there
    "whole": ([3, 4, 5], [3, 4, 5], 0, None),
    "first": ([2, 4, 5], [3, 4, 5], 0, [0, 2]),
    "middle": ([3, 3, 5], [3, 4, 5], 1, [0, 1, 3]),
    "last": ([3, 4, 2], [3, 4, 5], 2, [1, 4]),
    "far": ([2, 3], [2**20, 2**20], 0, [0, 2**20 - 1]),  # too little of its other dimension: drawn by torch
    "nothing": ([3, 0, 5], [3, 4, 5], 1, []),
    "number": ([], [], 0, None),
}
SEED = -12345678901234567


def drawn(dtype: torch.dtype, name: str, p: float, wrong: bool = False, device: str = "cpu") -> tuple[bool, float]:
    """By Triton against the operator in PyTorch: equal masks, and how far what is kept is."""
    size, whole, dim, at = PLACES[name]
    seed = torch.tensor(SEED, device=device)
    place = None if at is None else torch.tensor(at, dtype=torch.int64, device=device)
    there = place + 1 if wrong and place is not None else place
    x = torch.randn([*size, 2], generator=torch.Generator().manual_seed(0)).to(dtype).to(device)[..., 0]
    x = x + x.sign()
    with patch.object(dropout, "TILE", 16):
        found = dropout._launch_dropout(x, seed, there, dim, whole, p)
    wanted = counter_dropout(x, seed, place, dim, whole, p)
    assert device != "cpu" or torch.empty(2).isnan().all()
    assert found.dtype == dtype
    far = differ(found, wanted.double()) if wanted.any() else float(found.abs().sum())
    return torch.equal(found == 0, wanted == 0), far


# 3/2^24 is a number that may be drawn, and float32 does not hold 1/3 or 0.1.
@pytest.mark.parametrize("p", [0.0, 3 / 2**24, 0.1, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_those_of_the_twin_bit_by_bit(interpreter: Interpreter, dtype, p):
    for name in PLACES:
        mask, far = interpreter.run(drawn, dtype, name, p)
        assert mask and far <= (CLOSE[dtype] if dtype == torch.bfloat16 else 0), (name, far)


def test_another_place_is_noticed(interpreter: Interpreter):
    """The negative control."""
    mask, _ = interpreter.run(drawn, torch.float32, "middle", 0.5, True)
    assert not mask


@pytest.mark.parametrize("name", ["whole", "middle"])
def test_drawing_keeps_torchs_rules(name):
    """For a value in another order too: what is drawn lies in one order."""
    size, whole, dim, at = PLACES[name]
    x = torch.randn(size[::-1]).permute(2, 1, 0).requires_grad_()
    place = None if at is None else torch.tensor(at)
    for dropped in (OPS.counter_dropout, OPS.counter_dropout_fused):
        torch.library.opcheck(dropped.default, (x, torch.tensor(SEED), place, dim, whole, 0.5))
    torch.library.opcheck(OPS.counter_uniform.default, (size, torch.tensor(SEED), place, dim, whole, torch.float16))


def thresholds(count: int) -> bool:
    """Whether an integer says of every drawn number around p what float32 says."""
    for p in torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist():
        least = dropout._least(p)
        near = torch.tensor([max(least + d, 0) for d in (-2, -1, 0, 1)])
        if not torch.equal(near >= least, near.float() * 2.0**-24 >= p):
            return False
    return True


def test_a_number_is_kept_by_an_integer_as_by_float32():
    assert thresholds(500)
    with patch.object(dropout.math, "ceil", lambda x: int(x)):  # the negative control
        assert not thresholds(500)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_compile_for_a_device(dtype):
    pytest.importorskip("triton")
    x, seed = torch.empty(2, 3, 5, 128, dtype=dtype), torch.tensor(1)
    with compiling() as made:
        for dim, place in ((0, None), (1, torch.arange(3)), (3, torch.arange(128))):
            whole = [n + (place is not None and d == dim) for d, n in enumerate(x.shape)]
            dropout._launch_dropout(x, seed, place, dim, whole, 0.1)
    assert len(made) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_device(dtype):
    for name in PLACES:
        mask, far = drawn(dtype, name, 0.1, False, "cuda")
        assert mask and far < CLOSE[dtype]
