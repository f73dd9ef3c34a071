"""A cluster of round numbers."""

from autotp.cost import Cluster

ROUND = Cluster(
    name="round",
    device="test",
    peak_flops={"float32": 1e12, "bfloat16": 4e12},
    memory_bandwidth=1e9,
    memory_size=1e9,
    devices_per_node=4,
    intra_latency=1e-6,
    intra_bandwidth=1e8,
    inter_latency=1e-5,
    inter_bandwidth=1e7,
    switch=True,
    launch_overhead=2e-6,
    source="made up",
)
