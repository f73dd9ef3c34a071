"""All-gathers and reduce-scatters in the form that Inductor's micro-pipeline pass knows, and whether it fused them.

On NVLink torch fuses an all-gather with the matmuls after it, and a matmul with the reduce-scatter after it, through
symmetric memory (Wang et al. 2022, "Overlap Communication with Dependent Computation via Decomposition"). Its pass
looks for one form of either collective; it can be switched on and find nothing, so what it fused is counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autotp.compat import c10d_ops
from autotp.ir.specs import Spec

from . import conversions

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def _gather(x: Tensor, dim: int, tp: int, group: str) -> Tensor:
    x = x.contiguous()
    out = c10d_ops.wait_tensor(c10d_ops.all_gather_into_tensor(x, tp, group))
    return out if dim == 0 else torch.cat(list(out.split(x.shape[0], 0)), dim)


def _scatter(x: Tensor, dim: int, tp: int, group: str) -> Tensor:
    stacked = x.contiguous() if dim == 0 else torch.cat(list(x.split(x.shape[dim] // tp, dim)), 0)
    return c10d_ops.wait_tensor(c10d_ops.reduce_scatter_tensor(stacked, "sum", tp, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tp: int, group: str) -> Tensor:
        ctx.how = dim, tp, group
        return _gather(x, dim, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _Scatter.apply(grad, *ctx.how), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tp: int, group: str) -> Tensor:
        ctx.how = dim, tp, group
        return _scatter(x, dim, tp, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _Gather.apply(grad, *ctx.how), None, None, None


def gather(x: Tensor, src: Spec, dst: Spec, *, rank: int, tp: int, group: str) -> Tensor:
    """The conversion g: of an even split in the form that can be fused; arguments as `conversions.g`."""
    if not even(src, tp):
        return conversions.g(x, src, dst, rank=rank, tp=tp, group=group)
    return _Gather.apply(x, src.sharded_dim, tp, group)  # type: ignore[return-value]


def scatter(x: Tensor, src: Spec, dst: Spec, *, rank: int, tp: int, group: str) -> Tensor:
    """The conversion g*: of an even split in the form that can be fused; arguments as `conversions.g_star`."""
    if not even(dst, tp):
        return conversions.g_star(x, src, dst, rank=rank, tp=tp, group=group)
    return _Scatter.apply(x, dst.sharded_dim, tp, group)  # type: ignore[return-value]


def even(split: Any, tp: int) -> bool:
    """Return whether this split gives every rank an equal run of neighbours; asked when a program is traced."""
    repeat, segments = split.repeat, split.segments
    return repeat == 1 and len(segments) == 1 and segments[0][0] % tp == 0 and segments[0][0] > 0


FORMS = {conversions.g: gather, conversions.g_star: scatter}


@dataclass
class Fused:
    """Counts what the micro-pipeline pass fused, graph by graph as they are compiled."""

    conversions: int
    graphs: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, graph: fx.Graph) -> None:
        """Called by Inductor after its own passes."""
        self.graphs += 1
        names = [getattr(n.target, "__name__", str(n.target)) for n in graph.nodes if n.op == "call_function"]
        self.counts.update(kind for kind in FUSED for name in names if name.startswith(kind))

    def options(self, setting: dict[str, Any] | None) -> dict[str, Any]:
        """The options of the backend, with the pass and this count switched on; the caller's own come first."""
        return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": self, **(setting or {})}

    def summary(self) -> str:
        """The operators that it fused, in words, of the graphs compiled until now."""
        if not self.graphs:
            return f"{self.conversions} conversions are ready for it; nothing is compiled yet"
        if not self.counts:
            return (
                f"switched on, and it fused nothing of {self.conversions} conversions in {self.graphs} compiled graphs"
            )
        counts = ", ".join(f"{self.counts[kind]} {kind}" for kind in FUSED)
        return f"{counts} in {self.graphs} compiled graphs, forward and backward ({self.conversions} conversions)"
