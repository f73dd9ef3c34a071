"""Costs of a plan: the cluster, its collectives (alpha-beta) and its kernels (roofline)."""

from autotp.cost.machines.cluster import Cluster

from .collectives import call_seconds, collective_bytes, collective_seconds
from .compute import node_flops, op_cost, op_seconds, size_hint, tensor_bytes
from .overlap import CHOICES, best_chunks, hidden_seconds, pipeline_seconds

__all__ = [
    "CHOICES",
    "Cluster",
    "best_chunks",
    "call_seconds",
    "collective_bytes",
    "collective_seconds",
    "hidden_seconds",
    "node_flops",
    "op_cost",
    "op_seconds",
    "pipeline_seconds",
    "size_hint",
    "tensor_bytes",
]
