"""Rotary embedding and dropout by counter: kernels by Triton's interpreter, twins, and graphs with them."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autotp
from autotp.driver.pipeline import capture_model
from autotp.errors import InputError
from autotp.ir.graph import Capture
from autotp.kernels import dropout, rotary
from autotp.kernels.operators import counter_dropout, counter_uniform
from autotp.passes.optimise.kernels import rotary as patterns
from autotp.proof.simulate import reference
from tests.helpers.cases.kernel_compile import compiling
from tests.helpers.close import CLOSE, DTYPES, differ
from tests.helpers.processes.interpreter import Interpreter

OPS: Any = torch.ops.autotp
# A rounding of the largest value; Triton's interpreter rounds to bfloat16 towards zero.


BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 6
SHAPES: dict[str, tuple[list[int], list[int], list[int]]] = {  # of x, cos and sin
    "heads before": ([BATCH, HEADS, LENGTH, WIDTH], [1, 1, LENGTH, WIDTH], [BATCH, 1, LENGTH, WIDTH]),
    "heads after": ([BATCH, LENGTH, HEADS, WIDTH], [1, LENGTH, 1, WIDTH], [BATCH, LENGTH, 1, WIDTH]),
    "pairs": ([BATCH, HEADS, LENGTH, WIDTH], [1, 1, LENGTH, WIDTH // 2], [BATCH, 1, LENGTH, WIDTH // 2]),
    "two": ([BATCH, 2], [BATCH, 1], [1, 1]),
    "three": ([HEADS, LENGTH, WIDTH], [LENGTH, WIDTH], [LENGTH, WIDTH]),
    "one": ([WIDTH], [WIDTH], [WIDTH]),
    "nothing": ([BATCH, 0, LENGTH, WIDTH], [1, 1, LENGTH, WIDTH], [1, 1, LENGTH, WIDTH]),
}


def operands(name: str, dtype: torch.dtype, tables: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x does not lie together, and not in order."""
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = SHAPES[name]
    wide = torch.randn([*x[:-1][::-1], 2 * x[-1]], generator=generator).to(dtype)[..., ::2]
    order = [*range(len(x) - 1)][::-1]
    one, other = (torch.randn(n, generator=generator).to(tables) for n in (cos, sin))
    return wide.permute(*order, len(x) - 1), one, other


def rotated(
    name: str, dtype: torch.dtype, tables: torch.dtype, interleaved: bool, other: bool, device: str = "cpu"
) -> tuple[float, float]:
    """By Triton, with `other` as the pairs: the errors of the result and of its gradient."""
    x, cos, sin = (v.to(device) for v in operands(name, dtype, tables))
    exact = x.double().requires_grad_()
    wanted = rotary.rotary(exact, cos.double(), sin.double(), interleaved)
    with patch.object(rotary, "TILE", 16):
        found = rotary._launch(x, cos, sin, other)
        grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype).to(device)
        back = rotary._launch_backward(grad, cos, sin, other, dtype)
    assert device != "cpu" or torch.empty(2).isnan().all()
    assert found.dtype == torch.promote_types(dtype, tables) and back.dtype == dtype
    if not found.numel():
        return 0.0, 0.0
    wanted.backward(grad.double())
    assert exact.grad is not None
    return differ(found, wanted.detach()), differ(back, exact.grad)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated(interpreter: Interpreter, dtype, name, interleaved):
    for tables in {dtype, torch.float32}:
        found, back = interpreter.run(rotated, name, dtype, tables, interleaved, interleaved)
        assert found < CLOSE[torch.promote_types(dtype, tables)] and back < CLOSE[dtype]


def test_pairs_of_the_other_kind_are_noticed(interpreter: Interpreter):
    """The negative control."""
    assert min(interpreter.run(rotated, "heads before", torch.float32, torch.float32, False, True)) > 0.1


@pytest.mark.parametrize("name", ["heads before", "pairs"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_of_the_rotation_and_all_its_gradients(dtype, interleaved, name):
    """Of the tables too, which broadcast."""
    given = [x.detach().requires_grad_() for x in operands(name, dtype, dtype)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found, wanted = OPS.rotary(*given, interleaved), rotary.rotary(*exact, interleaved)  # type: ignore[call-arg]
    grad = torch.randn(found.shape).to(dtype)
    grads = torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, exact, grad.double())
    assert (
        max(differ(a, b) for a, b in zip((found.detach(), *grads[0]), (wanted.detach(), *grads[1]), strict=True))
        < (CLOSE[dtype])
    )


def test_what_the_rotation_refuses():
    x, cos, sin = operands("heads before", torch.float32, torch.float32)
    for given in ((x.double(), cos, sin), (x[..., 1:], cos[..., 1:], sin[..., 1:]), (x, cos[:, :, 1:], sin),
                  (x[None], cos, sin), (x, cos, sin.to("meta"))):  # fmt: skip
        with pytest.raises(InputError, match="rotary takes"):
            OPS.rotary(*given, False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_keeps_torchs_rules(interleaved):
    given = [x.detach().requires_grad_() for x in operands("heads after", torch.float32, torch.float32)]
    torch.library.opcheck(OPS.rotary.default, (*given, interleaved))
    torch.library.opcheck(OPS.rotary_backward.default, (*(x.detach() for x in given), interleaved, torch.bfloat16))


class Rotating(nn.Module):
    """One way to write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = x.shape[-1]
        if self.way == "neighbours":
            turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
            return sin * turned + cos * x
        if "pairs" in self.way:
            one, other = (x[..., ::2], x[..., 1::2]) if self.way == "pairs of neighbours" else x.chunk(2, -1)
            cos, sin = cos[..., : n // 2], sin[..., : n // 2]
            two = one * cos - other * sin, (one if self.way == "not pairs" else other) * cos + sin * one
            return torch.stack(two, -1).flatten(-2) if self.way == "pairs of neighbours" else torch.cat(two, -1)
        if self.way == "not turned":
            return x * cos + torch.cat((x[..., n // 2 :], -x[..., : n // 2]), -1) * sin
        if self.way == "not halves":
            return x * cos + torch.cat((-x[..., n // 2 - 1 :], x[..., : n // 2 - 1]), -1) * sin
        dtype, x = x.dtype, x.float() if self.way == "widened" else x
        one, other = (x[..., : n // 2], x[..., n // 2 :]) if self.way != "chunks" else x.chunk(2, -1)
        turned = torch.cat((-other, one), -1)
        if self.way == "widened apart":
            return (x.float() * cos + turned.float() * sin).to(dtype)
        found = (x * cos) + (turned * sin)
        return found + turned if self.way == "read elsewhere" else found.to(dtype)


def program(model: nn.Module, *given: Tensor) -> Capture:
    return capture_model(model, autotp.Inputs(*given), torch.device("cpu"))[0]


FOUND = ["slices", "chunks", "neighbours", "pairs", "pairs of neighbours", "widened", "widened apart"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [*FOUND, "not turned", "not halves", "not pairs", "read elsewhere"])
def test_where_a_rotation_is_found(way, dtype):
    """Written in float32 it is rounded once, as by the kernel."""
    given = operands("heads before", dtype, dtype)
    made = program(Rotating(way), *given)
    env = {leaf.node: v for leaf, v in zip(made.inputs, given, strict=True)}
    wanted = reference(made.graph, env, lambda node, value: None)[0]
    ways = patterns.rotate, patterns.rotate_pairs
    fired = [
        n for n in reversed(made.graph.nodes) if n.op == "call_function" and any(way(n) is not None for way in ways)
    ]
    assert len(fired) == (way in FOUND), made.graph
    made.graph.eliminate_dead_code()
    calls = [n for n in made.graph.nodes if n.op == "call_function"]
    assert not fired or len(calls) == (3 if "pairs" in way else 1), made.graph
    found = reference(made.graph, env, lambda node, value: None)[0]
    assert found.dtype == wanted.dtype == dtype
    assert differ(found, wanted.double()) < (1e-9 if "widened" in way else CLOSE[dtype])


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


def drawn(
    dtype: torch.dtype, name: str, p: float, wrong: bool = False, device: str = "cpu"
) -> tuple[bool, bool, float]:
    """By Triton against the operators in PyTorch: equal masks, equal numbers, and how far what is kept is."""
    size, whole, dim, _ = PLACES[name]
    seed, place, there = placed(name, wrong, device)
    x = torch.randn([*size, 2], generator=torch.Generator().manual_seed(0)).to(dtype).to(device)[..., 0]
    x = x + x.sign()
    with patch.object(dropout, "TILE", 16):
        found = dropout._launch_dropout(x, seed, there, dim, whole, p)
    wanted = counter_dropout(x, seed, place, dim, whole, p)
    assert device != "cpu" or torch.empty(2).isnan().all()
    assert found.dtype == dtype
    far = differ(found, wanted.double()) if wanted.any() else float(found.abs().sum())
    return torch.equal(found == 0, wanted == 0), numbered(dtype, name, wrong, device), far


def placed(name: str, wrong: bool, device: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The seed, where the elements are, and where Triton is told that they are."""
    at = PLACES[name][3]
    place = None if at is None else torch.tensor(at, dtype=torch.int64, device=device)
    there = place + 1 if wrong and place is not None else place
    return torch.tensor(SEED, device=device), place, there


@cache
def numbered(dtype: torch.dtype, name: str, wrong: bool, device: str) -> bool:
    """Whether Triton draws the same numbers; whatever is dropped of them later."""
    size, whole, dim, _ = PLACES[name]
    seed, place, there = placed(name, wrong, device)
    with patch.object(dropout, "TILE", 16):
        numbers = dropout._launch_uniform(size, seed, there, dim, whole, dtype)
    uniform = counter_uniform(size, seed, place, dim, whole, dtype)
    assert numbers.dtype == dtype
    return bool((numbers - uniform).abs().le(2**-8 if dtype == torch.bfloat16 else 0).all())


# 3/2^24 is a number that may be drawn, and float32 does not hold 1/3 or 0.1.
@pytest.mark.parametrize("p", [0.0, 3 / 2**24, 0.1, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_those_of_the_twin_bit_by_bit(interpreter: Interpreter, dtype, p):
    for name in PLACES:
        mask, numbers, far = interpreter.run(drawn, dtype, name, p)
        assert mask and numbers and far <= (CLOSE[dtype] if dtype == torch.bfloat16 else 0), (name, far)


def test_another_place_is_noticed(interpreter: Interpreter):
    """The negative control."""
    mask, numbers, _ = interpreter.run(drawn, torch.float32, "middle", 0.5, True)
    assert not mask and not numbers


@pytest.mark.parametrize("name", ["whole", "middle"])
def test_drawing_keeps_torchs_rules(name):
    """For a value in another order too: what is drawn lies in one order."""
    size, whole, dim, at = PLACES[name]
    x = torch.randn(size[::-1]).permute(2, 1, 0).requires_grad_()
    place = None if at is None else torch.tensor(at)
    for dropped, drawn in ((OPS.counter_dropout, OPS.counter_uniform),
                           (OPS.counter_dropout_fused, OPS.counter_uniform_fused)):  # fmt: skip
        torch.library.opcheck(dropped.default, (x, torch.tensor(SEED), place, dim, whole, 0.5))
        torch.library.opcheck(drawn.default, (size, torch.tensor(SEED), place, dim, whole, torch.float16))


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
        for interleaved in (False, True):
            rotary._launch(x, x[:1, :1], x[:1, :1], interleaved)
            rotary._launch_backward(x, x[:1, :1], x[:1, :1], interleaved, dtype)
        for dim, place in ((0, None), (1, torch.arange(3)), (3, torch.arange(128))):
            whole = [n + (place is not None and d == dim) for d, n in enumerate(x.shape)]
            dropout._launch_dropout(x, seed, place, dim, whole, 0.1)
            dropout._launch_uniform(x.shape, seed, place, dim, whole, dtype)
    assert len(made) == 10


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_device(dtype):
    for name in SHAPES:
        found = rotated(name, dtype, torch.float32, False, False, "cuda")
        assert max(found) < CLOSE[dtype]
    for name in PLACES:
        mask, _, far = drawn(dtype, name, 0.1, False, "cuda")
        assert mask and far < CLOSE[dtype]
