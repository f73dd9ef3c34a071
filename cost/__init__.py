"""Costs of a plan: the cluster, its collectives (alpha-beta) and its kernels (roofline)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotp.cost.machines.cluster import Cluster

if TYPE_CHECKING:
    from .collective_costs import call_seconds, collective_bytes, collective_seconds, mostly_start
    from .compute import node_flops, op_cost, op_seconds, peak_share, size_hint, tensor_bytes
    from .overlap import (
        CHOICES,
        LEAST_LAUNCHES,
        Chunks,
        OverlapModel,
        Product,
        best_chunks,
        hidden_seconds,
        pipeline_seconds,
    )

# Name -> its file, imported when the name is first used: a plan is read without torch.
HOMES = {
    "CHOICES": "overlap",
    "Chunks": "overlap",
    "LEAST_LAUNCHES": "overlap",
    "OverlapModel": "overlap",
    "Product": "overlap",
    "best_chunks": "overlap",
    "call_seconds": "collective_costs",
    "collective_bytes": "collective_costs",
    "collective_seconds": "collective_costs",
    "hidden_seconds": "overlap",
    "mostly_start": "collective_costs",
    "node_flops": "compute",
    "op_cost": "compute",
    "op_seconds": "compute",
    "peak_share": "compute",
    "pipeline_seconds": "overlap",
    "size_hint": "compute",
    "tensor_bytes": "compute",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = member = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    return member


__all__ = [
    "CHOICES",
    "LEAST_LAUNCHES",
    "Chunks",
    "Cluster",
    "OverlapModel",
    "Product",
    "best_chunks",
    "call_seconds",
    "collective_bytes",
    "collective_seconds",
    "hidden_seconds",
    "mostly_start",
    "node_flops",
    "op_cost",
    "op_seconds",
    "peak_share",
    "pipeline_seconds",
    "size_hint",
    "tensor_bytes",
]
