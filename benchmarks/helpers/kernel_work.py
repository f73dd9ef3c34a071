"""What the benchmark of kernels runs: each kernel, and the same written with torch's operators, as models write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp import kernels as kernels  # enters their operators
from autotp.kernels import operators

TP, VOCABULARY, EPS, DROPPED = 8, 128256, 1e-5, 0.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPS: Any = torch.ops.autotp
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's values: tokens, hidden size, feed-forward columns and vocabulary rows."""

    tokens: int
    hidden: int
    wide: int
    classes: int = VOCABULARY // TP


MODELS = {"8B": Sizes(8192, 4096, 14336 // TP), "70B": Sizes(8192, 8192, 28672 // TP)}


@dataclass(frozen=True)
class Work:
    """One kernel on one input.

    Attributes:
        make: the inputs, by sizes, dtype and device.
        kernel, plain: outputs of them, by the kernel and by torch's operators.
        graded: how many of the inputs, from the first, get gradients.
        elements: read and written in a forward, and in a forward and backward, at the least.
    """

    make: Callable[[Sizes, torch.dtype, str], tuple[Any, ...]]
    kernel: Callable[..., Outputs]
    plain: Callable[..., Outputs]
    graded: int
    elements: Callable[[Sizes], tuple[float, float]]


def _draw(*sizes: tuple[str, ...]) -> Callable[[Sizes, torch.dtype, str], tuple[Tensor, ...]]:
    """Values whose sizes are given by what is in `Sizes`, by name."""

    def make(s: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return tuple(torch.randn([getattr(s, n) for n in size], dtype=dtype, device=device) for size in sizes)

    return make


def _times(forward: float, backward: float, *names: str) -> Callable[[Sizes], tuple[float, float]]:
    def elements(s: Sizes) -> tuple[float, float]:
        n = 1
        for name in names:
            n *= getattr(s, name)
        return forward * n, (forward + backward) * n

    return elements


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """As models write it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def make_scores(s: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Scores, and the classes, of which this rank has one in eight."""
    target = torch.randint(0, TP * s.classes, (s.tokens,), device=device)
    return torch.randn(s.tokens, s.classes, dtype=dtype, device=device), target


def make_ids(s: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """A table's rows, and ids, of which this rank has one in eight."""
    ids = torch.randint(0, TP * s.classes, (s.tokens,), device=device)
    return torch.randn(s.classes, s.hidden, dtype=dtype, device=device), ids


def terms(scores: Tensor, target: Tensor) -> Outputs:
    """The sums of a cross entropy, by one pass."""
    found = OPS.class_terms(scores.detach(), target, False)
    return (OPS.class_sums_of(scores, found[0], target, found, False),)


def sums(scores: Tensor, target: Tensor) -> Outputs:
    """The same by torch's operators, in float32."""
    most = scores.detach().amax(1).float()
    shifted = scores.float() - most.unsqueeze(1)
    known = target < scores.shape[1]
    own = shifted.gather(1, torch.where(known, target, 0).unsqueeze(1)).squeeze(1)
    return (torch.stack([shifted.exp().sum(1), torch.where(known, own, 0)]),)


def rows(table: Tensor, ids: Tensor) -> Outputs:
    """The rows of the ids that are here, zeros for the others."""
    outside = ids >= table.shape[0]
    return (F.embedding(ids.masked_fill(outside, 0), table).masked_fill(outside.unsqueeze(-1), 0),)


def make_seeded(s: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Values, and the seed, which a program reads: of one that it knows Inductor makes indices beyond 64 bits."""
    x = torch.randn(s.tokens, s.hidden, dtype=dtype, device=device)
    return x, torch.full((), 7, dtype=torch.int64, device=device)


def gelu(tanh: bool) -> Work:
    """Bias and GeLU."""
    how = "tanh" if tanh else "none"
    return Work(
        _draw(("tokens", "wide"), ("wide",)),
        lambda x, b: (OPS.bias_gelu(x, b, tanh),),
        lambda x, b: (F.gelu(x + b, approximate=how),),
        2, _times(2, 3, "tokens", "wide"),
    )  # fmt: skip


WORK = {
    "bias_gelu": gelu(False),
    "bias_gelu, tanh": gelu(True),
    "norm, layer": Work(
        _draw(("tokens", "hidden"), ("hidden",), ("hidden",)), lambda x, w, b: OPS.norm(x, w, b, EPS, True)[:1],
        lambda x, w, b: (F.layer_norm(x, w.shape, w, b, EPS),), 3, _times(2, 3, "tokens", "hidden"),
    ),
    "norm, rms": Work(
        _draw(("tokens", "hidden"), ("hidden",)), lambda x, w: OPS.norm(x, w, None, EPS, False)[:1],
        lambda x, w: (rms(x, w),), 2, _times(2, 3, "tokens", "hidden"),
    ),
    "add_norm, rms": Work(
        _draw(("tokens", "hidden"), ("tokens", "hidden"), ("hidden",)),
        lambda x, r, w: OPS.add_norm(x, r, w, None, EPS, False)[:2],
        lambda x, r, w: (rms(x + r, w), x + r), 3, _times(4, 4, "tokens", "hidden"),
    ),
    "class_terms": Work(make_scores, terms, sums, 1, _times(1, 2, "tokens", "classes")),
    "vocabulary_rows": Work(
        make_ids, lambda t, i: (OPS.vocabulary_rows(t, i, 0, TP * t.shape[0], -1),), rows, 1,
        lambda s: ((1 + 1 / TP) * s.tokens * s.hidden, ((2 + 1 / TP) * s.tokens + s.classes) * s.hidden),
    ),
    "counter_dropout": Work(
        make_seeded,
        lambda x, seed: (OPS.counter_dropout_fused(x, seed, None, 0, list(x.shape), DROPPED),),
        lambda x, seed: (operators.counter_dropout(x, seed, None, 0, list(x.shape), DROPPED),),
        1, _times(2, 2, "tokens", "hidden"),
    ),
}  # fmt: skip


def step(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any], graded: int) -> tuple[Any, Any]:
    """Outputs and gradients of a forward and backward, whose gradients come as random values."""
    draw = torch.Generator(inputs[0].device).manual_seed(0)
    given = [x.detach().requires_grad_() if i < graded else x for i, x in enumerate(inputs)]
    outs = function(*given)
    grads = [torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=draw) for x in outs]
    return tuple(x.detach() for x in outs), torch.autograd.grad(outs, given[:graded], grads)


def apart(work: Work, inputs: Sequence[Any]) -> float:
    """Largest difference of an output or gradient of the kernel from eager PyTorch's, over the largest value."""
    pairs = zip(*(sum(step(f, inputs, work.graded), ()) for f in (work.kernel, work.plain)), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def calls(work: Work, function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Callable[[], Any], ...]:
    """A forward without gradients, and a forward and backward with gradients that exist already."""
    given = [x.detach().requires_grad_() if i < work.graded else x for i, x in enumerate(inputs)]
    grads = [torch.randn_like(x) for x in function(*given)]

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    def both() -> None:
        torch.autograd.grad(function(*given), given[: work.graded], grads)

    return forward, both
