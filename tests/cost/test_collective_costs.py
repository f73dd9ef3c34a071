"""The algorithms of collectives one by one: formulas from the literature, and which one is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotp.cost import Cluster
from autotp.cost.collective_costs import (
    COLLECTIVES,
    Link,
    RankGroup,
    call_seconds,
    collective_bytes,
    collective_seconds,
    flat_seconds,
    hierarchical_seconds,
    ring_seconds,
    tree_seconds,
)
from autotp.errors import InputError
from tests.helpers.clusters import ROUND

ALPHA, BETA = 3e-6, 2e9
H100 = Cluster.preset("h100")


@pytest.mark.parametrize("n", [2, 3, 8, 64])
@pytest.mark.parametrize("size", [0, 1e3, 1e9])
def test_a_ring_takes_what_the_literature_says(n, size):
    """Thakur et al. 2005: 2(N-1) alpha + 2(N-1)/N D/beta, and half of it for either half."""
    link, want = Link(ALPHA, BETA), 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * size / BETA
    assert ring_seconds("all_reduce", size, n, link) == pytest.approx(want, rel=1e-12)
    assert ring_seconds("all_gather", size, n, link) == pytest.approx(want / 2, rel=1e-12)
    assert ring_seconds("reduce_scatter", size, n, link) == pytest.approx(want / 2, rel=1e-12)
    assert ring_seconds("all_to_all", size, n, link) == pytest.approx(
        (n - 1) * ALPHA + (n - 1) / n**2 * size / BETA, rel=1e-12
    )


@pytest.mark.parametrize("primitive", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 1e4, 1e9])
def test_a_group_inside_a_node_is_priced_as_a_ring(primitive, n, size):
    ring = ring_seconds(primitive, size, n, Link(H100.intra_latency, H100.intra_bandwidth))
    assert collective_seconds(primitive, size, n, H100) == ring
    assert tree_seconds(size, RankGroup.of(n, H100)) > ring_seconds("all_reduce", size, n, RankGroup.of(n, H100).inner)


def test_a_tree_has_logarithmic_latency_between_nodes():
    for nodes, rounds in [(2, 1), (4, 2), (5, 3), (64, 6)]:
        group = RankGroup.of(nodes, ROUND, stride=4)  # one rank in every node
        assert (group.per_node, group.nodes) == (1, nodes)
        assert tree_seconds(800, group) == pytest.approx(2 * rounds * 10e-6 + 2 * 800 / 1e7)
    chains = RankGroup.of(16, ROUND)
    assert tree_seconds(0, chains) == pytest.approx(2 * (3 * 1e-6 + 2 * 10e-6))


def test_a_flat_ring_crosses_each_node_once():
    group = RankGroup.of(12, ROUND)
    assert flat_seconds("all_reduce", 1200, group) == pytest.approx(2 * (9 * 1e-6 + 2 * 10e-6) + 2200 / 1e7)
    assert flat_seconds("all_gather", 1200, group) == pytest.approx(9 * 1e-6 + 2 * 10e-6 + 1100 / 1e7)
    assert flat_seconds("all_to_all", 1200, group) == pytest.approx(3 * 1e-6 + 8 * 10e-6 + 1100 / 12 / 1e7)


def test_a_hierarchy_is_its_stages():
    """In the node, between nodes on 1/m of the bytes, in the node."""
    group, size = RankGroup.of(12, ROUND), 1200.0
    halves = sum(ring_seconds(p, size, 4, group.inner) for p in ("reduce_scatter", "all_gather"))
    ring, tree = ring_seconds("all_reduce", size / 4, 3, group.outer), 2 * 2 * 10e-6 + 2 * 300 / 1e7
    assert ring == pytest.approx(4 * 10e-6 + 400 / 1e7) and ring < tree
    assert hierarchical_seconds("all_reduce", size, group) == pytest.approx(halves + ring)


@pytest.mark.parametrize("primitive", COLLECTIVES[:3])
def test_a_hierarchy_sends_no_more_bytes_than_a_ring(primitive):
    free = Link(0.0, 1.0)  # seconds are then bytes
    group = RankGroup.of(24, ROUND)._replace(inner=free, outer=free)
    assert hierarchical_seconds(primitive, 4800, group) == pytest.approx(collective_bytes(primitive, 4800, 24))


def test_the_cheapest_algorithm_is_taken():
    far = replace(H100, inter_latency=1e-3)
    group = RankGroup.of(256, far)  # 32 nodes: 31 steps of a ring between them, 5 of a tree
    assert collective_seconds("all_reduce", 1e3, 256, far) == pytest.approx(tree_seconds(1e3, group), rel=0.01)
    assert tree_seconds(1e3, group) < flat_seconds("all_reduce", 1e3, group) / 5
    large = [f(1e10, group) for f in (lambda d, g: hierarchical_seconds("all_reduce", d, g), tree_seconds)]
    assert collective_seconds("all_reduce", 1e10, 256, far) == large[0] < large[1]


def test_uneven_nodes_have_no_hierarchy():
    with pytest.raises(InputError, match="equally many"):
        hierarchical_seconds("all_reduce", 1, RankGroup.of(6, ROUND))
    group = RankGroup.of(6, ROUND)
    want = min(flat_seconds("all_reduce", 1e6, group), tree_seconds(1e6, group))
    assert collective_seconds("all_reduce", 1e6, 6, ROUND) == want


@pytest.mark.parametrize("primitive", COLLECTIVES)
def test_ranks_that_lie_apart(primitive):
    """Two in each node of 4 where ranks are 2 apart, one in each where they are 4 or more apart."""
    places = [RankGroup.of(4, ROUND, s)[1:3] for s in (1, 2, 3, 4, 8)]
    assert places == [(4, 1), (2, 2), (1, 4), (1, 4), (1, 4)]
    near, apart, alone = (collective_seconds(primitive, 1e6, 4, ROUND, stride=s) for s in (1, 2, 4))
    assert near < apart < alone
    assert alone <= ring_seconds(primitive, 1e6, 4, Link(ROUND.inter_latency, ROUND.inter_bandwidth))
    assert collective_seconds(primitive, 1e6, 2, ROUND, stride=2) == collective_seconds(primitive, 1e6, 2, ROUND)


def test_groups_between_each_other_share_the_links_of_a_node_without_a_switch():
    chain = replace(ROUND, switch=False)
    near, apart = (collective_seconds("all_gather", 800, 2, chain, stride=s) for s in (1, 2))
    assert near == pytest.approx(1e-6 + 400 / 1e8) and apart == pytest.approx(1e-6 + 400 / 0.5e8)


def test_a_stride_below_one_is_refused():
    with pytest.raises(InputError, match="apart"):
        collective_seconds("all_reduce", 1, 2, ROUND, stride=0)


@pytest.mark.parametrize("primitive", COLLECTIVES)
def test_a_call_costs_its_start(primitive):
    """NCCL's model, src/graph/tuning.cc: a base latency, the steps' latencies, and the bytes."""
    slow = replace(H100, collective_overhead=1e-3)
    for cluster in (H100, slow):
        extra = call_seconds(primitive, 1e6, 8, cluster) - collective_seconds(primitive, 1e6, 8, cluster)
        assert extra == pytest.approx(cluster.collective_overhead)
    assert call_seconds(primitive, 1e6, 1, slow) == 0 == call_seconds("none", 1e6, 8, slow)
    assert call_seconds("local", 1e6, 8, slow) == collective_seconds("local", 1e6, 8, slow)
