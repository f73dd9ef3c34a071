"""Costs of a plan: the cluster, its collectives (alpha-beta) and its kernels (roofline)."""

from autotp.cost.machines.cluster import Cluster

__all__ = ["Cluster"]
