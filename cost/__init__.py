"""Costs of a plan: the cluster, its collectives (alpha-beta) and its kernels (roofline)."""

from autotp.cost.machines.cluster import Cluster

from .collectives import call_seconds, collective_bytes, collective_seconds, mostly_start
from .compute import node_flops, op_cost, op_seconds, size_hint, tensor_bytes
from .overlap import CHOICES, LEAST, Chunks, OverlapModel, Product, best_chunks, hidden_seconds, pipeline_seconds

__all__ = [
    "CHOICES",
    "LEAST",
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
    "pipeline_seconds",
    "size_hint",
    "tensor_bytes",
]
