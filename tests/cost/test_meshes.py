"""Meshes of many devices: which there are, and what their axes send."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from autotp.cost import Cluster
from autotp.cost.collective_costs import call_seconds
from autotp.cost.meshes import (
    Mesh,
    boundary_sends,
    bubble,
    factorisations,
    variants,
    weight_sends,
)
from autotp.text import divisors

H100 = Cluster.preset("h100")


@pytest.mark.parametrize("devices", [1, 12, 16, 35])
def test_every_factorisation_is_there_once(devices):
    every = itertools.product(range(1, devices + 1), repeat=4)
    wanted = {x for x in every if math.prod(x) == devices and x[0] <= 4 and x[2] <= 2 and x[3] <= 8}
    cps = [n for n in divisors(devices) if n <= 2]
    inner = itertools.product([n for n in divisors(devices) if n <= 8], cps, [1])
    found = [m.degrees for m in factorisations(devices, inner, 4)]
    assert set(found) == wanted and len(found) == len(wanted)


def test_experts_are_dealt_inside_dp():
    found = [(m.pp, m.dp, m.ep) for m in factorisations(16, [(2, 1, 4)], 2)]
    assert found == [(1, 8, 4), (2, 4, 4)] and not list(factorisations(16, [(8, 1, 4)], 2))
    rows = Mesh(1, 8, 1, 2, ep=4)
    assert rows.copies == 2 and rows.stride("ep") == 4 and Mesh(1, 8, 1, 2).copies == 1
    assert weight_sends(rows, 8e9, H100).bytes == 2 * 7 / 8 * 8e9


def test_variants_make_up_the_examples_of_a_step():
    found = list(variants(Mesh(4, 2, 1, 2), example=2, examples=64, most=16, sizes=(1, 2, 4)))
    assert {m.dp * m.batch * m.microbatches for m in found} == {64}
    assert {m.batch for m in found} == {2, 4, 8}
    assert {m.chunks for m in found if m.microbatches == 16} == {1, 2, 3, 4}  # 6 and 8 make more than 16 stages
    assert not list(variants(Mesh(1, 3, 1, 1), 1, 64, 16, (1,))), "3 ranks do not divide 64 examples"
    odd = variants(Mesh(4, 1, 1, 1), 1, 6, 16, (1,))
    assert [m.chunks for m in odd] == [1], "an interleaved schedule goes around the ranks in whole turns"


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 2), (4, 8), (8, 8)])
def test_the_bubble_is_that_of_a_pipeline_step_by_step(ranks, microbatches):
    ends: dict[tuple[int, int], int] = {}
    for at, stage in itertools.product(range(microbatches), range(ranks)):
        ends[at, stage] = 1 + max(ends.get((at - 1, stage), 0), ends.get((at, stage - 1), 0))
    assert max(ends.values()) == pytest.approx(microbatches * (1 + bubble(ranks, 1, microbatches)))


def test_the_bubble_shrinks_with_micro_batches_and_chunks():
    shares = [bubble(4, 1, m) for m in (4, 8, 16)]
    assert shares == [3 / 4, 3 / 8, 3 / 16] and bubble(4, 2, 8) == 3 / 16


def test_groups_lie_tp_first_then_cp_dp_and_pp():
    mesh = Mesh(pp=4, dp=3, cp=2, tp=4)
    assert [mesh.stride(axis) for axis in ("tp", "cp", "dp", "pp")] == [1, 4, 8, 24]
    assert [mesh.spans(axis, H100) for axis in ("tp", "cp", "dp", "pp")] == [False, False, True, True]


def test_what_is_sent_for_weights():
    mesh, size = Mesh(pp=1, dp=8, cp=2, tp=4), 64e6
    whole, split = (weight_sends(replace(mesh, fully_shard=x), size, H100) for x in (False, True))
    assert whole.bytes == pytest.approx(2 * 15 / 16 * size)
    assert split.bytes == pytest.approx(3 * 15 / 16 * size), "gathered twice, reduced once"
    assert whole.seconds == call_seconds("all_reduce", size, 16, H100, stride=4)
    near = weight_sends(Mesh(pp=1, dp=8, cp=1, tp=1), size, H100)
    assert near.seconds < weight_sends(Mesh(pp=1, dp=8, cp=1, tp=8), size, H100).seconds, "the latter is over nodes"


def test_what_flows_between_stages():
    far = boundary_sends(Mesh(pp=2, dp=1, cp=1, tp=8, chunks=2), 1e6, H100)
    assert far.bytes == 4e6, "two chunks, forward and backward"
    assert far.seconds == pytest.approx(4 * (H100.inter_latency + 1e6 / H100.inter_bandwidth))
    near = boundary_sends(Mesh(pp=2, dp=1, cp=1, tp=4, chunks=2), 1e6, H100)
    assert near.seconds < far.seconds and boundary_sends(Mesh(1, 2, 1, 1), 1e6, H100) == (0.0, 0.0)
