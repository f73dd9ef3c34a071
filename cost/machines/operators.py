"""The operators that calibration times, as a step runs them: forward and backward, on operands that no cache holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .clock import Clock
from .fit import Kernel

LAUNCHES = 48  # operators that a launch is the mean of
TINY = 8  # rows and width of a product that is all launch
HEAD = 64  # elements of an attention head
LONG = 0.05  # seconds of a matmul after which no larger one of its dtype is measured
PASSES = 3  # the cost model counts a backward as twice its forward


def _products(x: Tensor, w: Tensor, g: Tensor) -> object:
    """The products of a linear layer, forward and backward: laid out differently, they take different times."""
    return x @ w.T, g @ w, g.T @ x


def _layer(x: Tensor, w: Tensor, g: Tensor) -> object:
    """A linear layer forward and backward, with all that eager execution starts for its three products.

    The gradient of the weight stays, as until an optimizer's step.
    """
    x, bias = (t.detach().requires_grad_() for t in (x, g[0]))
    return F.linear(x, w.requires_grad_(), bias).backward(g)


@dataclass(frozen=True)
class MeasuredSizes:
    """What is measured of a kind of device.

    Attributes:
        matmuls: rows and width of square weights.
        attentions: batch times heads, and length.
        copies, transfers: bytes, of collectives those of the whole tensor.
        products: runs the three products of a linear layer. What a processor's eager execution starts besides adds to
            their time; a device's queue hides it.
        cold: bytes of operands that are taken in turn, more than a cache of one's own holds: what a step multiplies
            was last read a step ago.
        between: rows and width of the matmuls that ranks compute between two collectives.
        budget: seconds for each.
    """

    matmuls: tuple[tuple[int, int], ...]
    attentions: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]
    transfers: tuple[int, ...]
    products: Callable[[Tensor, Tensor, Tensor], object]
    cold: int
    between: tuple[int, int]
    budget: float = 0.1


SIZES = {
    "cpu": MeasuredSizes(
        ((96, 192), (768, 192), (384, 384), (48, 768), (768, 768), (48, 1536)),
        ((16, 96), (8, 320)),
        (2**18, 2**20, 2**22, 2**24),
        (2**12, 2**16, 2**20, 2**23),
        _layer, 2**26, (384, 384),
    ),
    "cuda": MeasuredSizes(
        ((1024, 1024), (512, 4096), (2048, 2048), (4096, 4096), (8192, 8192)),
        ((64, 1024), (64, 4096)),
        (2**24, 2**26, 2**28),
        (2**12, 2**18, 2**22, 2**26, 2**28),
        _products, 2**27, (2048, 2048),
    ),
}  # fmt: skip


def kernels(clock: Clock, dtypes: Iterable[torch.dtype], step: Callable[[str], None]) -> Iterator[Kernel]:
    """Launches, operators bound by memory, and products of each dtype that this device has them for, timed.

    Args:
        clock: of this rank; its device is measured.
        dtypes: of the products.
        step: called with what comes next.
    """
    sizes, device = SIZES[clock.device.type], clock.device
    step("launch")
    yield Kernel("launch", "float32", 0.0, 1.0, clock.time(partial(_launches, device)) / LAUNCHES)
    step("product launch")
    least = next(_in_turn([(TINY, TINY)] * 3, torch.float32, device, 0))
    seconds = clock.time(partial(sizes.products, *least)) / PASSES
    yield Kernel("product launch", "float32", 2.0 * TINY**3, 1.0, seconds)
    yield from _memory(clock, sizes, step)
    usable = list(filter(partial(_multiplies, device), dtypes))
    for dtype in usable:
        yield from _matmuls(clock, sizes, dtype, step)
    fused = torch.bfloat16 if device.type == "cuda" and torch.bfloat16 in usable else torch.float32
    yield from _attentions(clock, sizes, fused, step)


def _memory(clock: Clock, sizes: MeasuredSizes, step: Callable[[str], None]) -> Iterator[Kernel]:
    """Copies into new memory, as operators write, and two operators forward and backward."""
    for size in sizes.copies:
        rows = _in_turn([(size // 4 // 256, 256)], torch.float32, clock.device, sizes.cold)
        calls: dict[str, tuple[int, Callable[[Tensor], object]]] = {
            "copy": (1, torch.clone),
            "gelu": (PASSES, partial(_there_and_back, F.gelu)),
            "layer norm": (PASSES, partial(_there_and_back, partial(F.layer_norm, normalized_shape=(256,)))),
        }
        for item, (passes, call) in calls.items():
            step(item)
            seconds = clock.time(partial(_next, call, rows)) / passes
            yield Kernel(item, "float32", 0.0, 2.0 * size, seconds)


def _matmuls(clock: Clock, sizes: MeasuredSizes, dtype: torch.dtype, step: Callable[[str], None]) -> Iterator[Kernel]:
    short = str(dtype).removeprefix("torch.")
    for rows, n in sizes.matmuls:
        step(f"matmul {short}")
        operands = _in_turn([(rows, n), (n, n), (rows, n)], dtype, clock.device, sizes.cold)
        seconds = clock.time(partial(_next, sizes.products, operands)) / PASSES
        nbytes = float((2 * rows * n + n * n) * dtype.itemsize)
        yield Kernel(f"matmul {short}", short, 2.0 * rows * n * n, nbytes, seconds)
        if seconds > LONG:  # this device is slow with the dtype
            break


def _attentions(
    clock: Clock, sizes: MeasuredSizes, dtype: torch.dtype, step: Callable[[str], None]
) -> Iterator[Kernel]:
    """Fused causal attention forward and backward; its rate counts against that of matmuls of the dtype."""
    for heads, length in sizes.attentions:
        step("attention")
        operands = _in_turn([(1, heads, length, HEAD)] * 3, dtype, clock.device, sizes.cold)
        attention = partial(_there_and_back, partial(F.scaled_dot_product_attention, is_causal=True))
        seconds = clock.time(partial(_next, attention, operands)) / PASSES
        nbytes = float(4 * heads * length * HEAD * dtype.itemsize)
        flops = 4.0 * heads * length * length * HEAD  # as the cost model counts it: in full
        yield Kernel("attention", str(dtype).removeprefix("torch."), flops, nbytes, seconds)


def product(device: torch.device) -> Callable[[], object]:
    """A call that computes for about as long as a step of a small model does between two collectives."""
    rows, n = SIZES[device.type].between
    x, w = torch.rand(rows, n, device=device), torch.rand(n, n, device=device)
    return lambda: x @ w @ w @ w


def _in_turn(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, cold: int
) -> Iterator[tuple[Tensor, ...]]:
    """Operands of these shapes, without end: others each time, until `cold` bytes have been read.

    Then all gradients go at once, as after a step: what a system takes back and gives again counts.
    """
    nbytes = sum(map(math.prod, shapes)) * dtype.itemsize
    # Random numbers: a device multiplies ones faster, for they take less power.
    count = max(cold // nbytes, 1)
    many = [torch.rand(count, *shape, device=device).to(dtype) for shape in shapes]
    sets = [tuple(operands) for operands in zip(*many, strict=True)]
    while True:
        yield from sets
        for x in (x for operands in sets for x in operands):
            x.grad = None


def _next(call: Callable[..., object], operands: Iterator[tuple[Tensor, ...]]) -> object:
    return call(*next(operands))


def _there_and_back(operator: Callable[..., Tensor], *operands: Tensor) -> None:
    """Forward and backward."""
    y = operator(*(x.detach().requires_grad_() for x in operands))
    y.backward(y.detach())


def _launches(device: torch.device) -> None:
    """A chain of operators on next to nothing, forward and backward, as eager training runs them."""
    x = w = torch.ones(8, device=device, requires_grad=True)
    for _ in range(LAUNCHES // 3):  # one operator forward, two backward: as the cost model counts
        x = x * w
    x.backward(torch.ones_like(x))


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    x = torch.ones(8, 8, dtype=dtype, device=device)
    try:
        _products(x, x, x)
    except RuntimeError:  # "not implemented for": the device, or this build of torch, lacks the dtype
        return False
    return True
