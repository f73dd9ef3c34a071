"""The cost model on real plans against what is known of tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.cost import Cluster
from autotp.cost.collective_costs import collective_seconds
from autotp.driver.compile import capture_model, solve_plan
from autotp.driver.options import Options, Steering
from autotp.inputs import Inputs
from autotp.ir.graph import Capture
from autotp.plans.estimates import Degree
from autotp.plans.plan import Plan
from tests.helpers.models import BATCH, HIDDEN, LENGTH, inputs_of, transformer

H100 = Cluster.preset("h100")
SLOW = replace(H100, name="slow links", intra_bandwidth=50e9)
TOKENS = 8192


@cache
def captured(layers: int) -> Capture:
    model = transformer("llama", num_hidden_layers=layers)
    return capture_model(model, Inputs(**inputs_of(model)), torch.device("cpu"))[0]


def sent_per_layer(tp: int, sequence: bool) -> float:
    """Elements that a rank sends forward in one layer more."""
    options = Options.read(tp, Steering(sequence_parallel=sequence))
    fewer, more = (solve_plan(captured(n), [], options, "Llama").totals.forward_bytes for n in (2, 4))
    return (more - fewer) / 2 / 4  # bytes of float32


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_sends_4bsh_elements_forward_with_and_without_sequence_parallelism(tp):
    """Korthikanti et al. 2022, section 4.2.2, of plans that the solver made."""
    plain, sequence = sent_per_layer(tp, False), sent_per_layer(tp, True)
    assert plain == sequence == 4 * BATCH * LENGTH * HIDDEN * (tp - 1) / tp


def layer_of_70b_shape(heads: int) -> Any:
    """One of Llama-70B's layers and next to no vocabulary; `heads` of keys and values."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, num_attention_heads=64,
        num_key_value_heads=heads, vocab_size=64, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


@cache
def layer_of_70b(tp: int, cluster: Cluster) -> Plan:
    """A plan for one of Llama-70B's layers on one sequence of 8192 tokens."""
    model = layer_of_70b_shape(heads=8)
    ids = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}
    return autotp.plan(model, tp, example_inputs=ids, cluster=cluster, check_capture=False)


def communication_over_compute(cluster: Cluster) -> float:
    """Of one layer's forward, as planned for NVLink: seconds of its collectives over its flops at the peak rate."""
    plan = layer_of_70b(8, H100)
    inside = [c for c in plan.collectives if c.source.startswith("model.layers.0.") and c.forward]
    sent = sum(c.forward_bytes for c in inside)
    assert sent == 4 * TOKENS * 8192 * 7 / 8 * 2  # bfloat16
    seconds = sum(collective_seconds(c.forward or "none", c.bytes, 8, cluster) for c in inside)
    return seconds / (plan.totals.local_flops / cluster.peak("bfloat16"))


def test_a_70b_layer_communicates_little_on_nvlink_and_mostly_on_slow_links():
    near, far = communication_over_compute(H100), communication_over_compute(SLOW)
    assert near < 0.6 and far > 4
    assert layer_of_70b(8, SLOW).totals.seconds > 2 * layer_of_70b(8, H100).totals.seconds  # even planned for them


def test_throughput_per_device_falls_beyond_the_node_and_more_steeply_further():
    """By the sweep, where a node has 8 devices; the control is one node of 32.

    As many heads of keys and values as of queries: with 8, tp=16 has them twice, which costs by itself.
    """
    model, ids = layer_of_70b_shape(heads=64), {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}

    def swept(cluster: Cluster) -> tuple[list[float], list[Degree]]:
        rows = autotp.sweep(model, [8, 16, 32], example_inputs=ids, cluster=cluster).rows
        return [1 - b.throughput / a.throughput for a, b in pairwise(rows)], list(rows)

    falls, rows = swept(H100)
    control, alike = swept(replace(H100, name="one node", devices_per_node=32))
    assert 0.3 < falls[0] < falls[1]
    assert control[0] < falls[0] - 0.05 and control[1] < falls[1] - 0.01
    assert rows[0] == alike[0]
    for row, other in zip(rows[1:], alike[1:], strict=True):  # the difference is communication, but for a kernel
        assert row.exposed > 1.2 * other.exposed
        assert row.seconds - other.seconds == pytest.approx(row.exposed - other.exposed, rel=0.01)


def test_a_matmul_that_is_made_too_thin_costs_more_than_its_share():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    free = replace(
        H100, launch_overhead=1e-12, memory_bandwidth=1e18, intra_latency=1e-12, intra_bandwidth=1e18,
        collective_overhead=1e-12,
    )  # fmt: skip

    def seconds(tp: int, tile: int) -> float:
        cluster = replace(free, matmul_tile=tile)
        return autotp.plan(model, tp, example_inputs=torch.randn(4096, 64), cluster=cluster).totals.seconds

    assert seconds(8, 1) == pytest.approx(seconds(1, 1) / 8, rel=1e-2)
    assert seconds(8, 512) > 2 * seconds(8, 1)
